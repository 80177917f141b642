"""RMS norms of transformers' models, also times 1 + weight and with a gate, recognized by their values and not by names."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .kernel_operators import KernelOperator, launch, supports

Forward = Callable[..., Tensor]


def _norm(x: Tensor, weight: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    y = torch.empty_like(x)
    rstd = x.new_empty(x.shape[:-1].numel(), dtype=torch.float32)
    launch("rms_norm", x, weight, y, rstd, *numbers)
    return [y, rstd]


def _norm_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    x, weight = tensors
    dx = torch.empty_like(x)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    launch("rms_norm_backward", gradients[0], x, results[1], weight, dx, dweight)
    return [dx, dweight.to(weight.dtype)]


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    y = torch.empty_like(x)
    launch("gated_norm", x, gate, weight, y, *numbers)
    return [y]


def _gated_norm_backward(
    tensors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    numbers: Sequence[float],
) -> list[Tensor]:
    x, gate, weight = tensors
    dx = torch.empty_like(x)
    dgate = torch.empty_like(x)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    launch("gated_norm_backward", gradients[0], *tensors, dx, dgate, dweight, *numbers)
    return [dx, dgate, dweight.to(weight.dtype)]


RMS_NORM = KernelOperator("rms_norm", _norm, _norm_backward)
GATED_NORM = KernelOperator("gated_norm", _gated_norm, _gated_norm_backward)


def _epsilon(module: Any) -> float:
    return float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))


def _plain(self: Any, x: Tensor) -> Tensor:
    """Forward of a norm times weight, in the wider dtype of both."""
    if not supports(x):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    dtype = torch.promote_types(x.dtype, self.weight.dtype)
    numbers = (_epsilon(self),)
    return RMS_NORM(x.to(dtype).contiguous(), self.weight.to(dtype), numbers=numbers)[0]


def _centered(self: Any, x: Tensor) -> Tensor:
    """Forward of a norm times 1 + weight, which BF16 would round."""
    if not supports(x):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    weight = 1.0 + self.weight.float()
    return RMS_NORM(x.float().contiguous(), weight, numbers=(_epsilon(self),))[0].to(x.dtype)


def _gated(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """Forward of a norm times weight times silu(gate)."""
    if gate is None or not supports(x, gate) or gate.shape != x.shape:
        return type(self).forward(self, x, gate)  # type: ignore[no-any-return]
    dtype = torch.promote_types(x.dtype, self.weight.dtype)
    rows, gates = (each.to(dtype).reshape(-1, 1, x.shape[-1]) for each in (x, gate))
    weight = self.weight.to(dtype)
    y = GATED_NORM(rows.contiguous(), gates, weight, numbers=(_epsilon(self),))[0]
    return y.view(x.shape).to(x.dtype)


FORMS: tuple[Forward, ...] = (_plain, _centered, _gated)


def is_norm(module: nn.Module) -> bool:
    return "RMSNorm" in type(module).__name__


def native_forward(module: nn.Module) -> Forward | None:
    """Return our forward with the values of a norm of transformers, or None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or not supports(weight):
        return None
    arguments = len(inspect.signature(type(module).forward).parameters)
    with torch.no_grad():
        random = torch.Generator().manual_seed(1)
        # Small enough for epsilon to matter.
        tensors = 0.01 * torch.randn(2, 3, len(weight), generator=random)
        probe = copy.deepcopy(module).float()
        next(probe.parameters()).copy_(torch.rand(len(weight), generator=random))
        for form in FORMS:
            if len(inspect.signature(form).parameters) == arguments:
                x = tensors[: arguments - 1]
                value = type(module).forward(probe, *x)
                if torch.allclose(value, form(probe, *x), rtol=1e-5, atol=1e-5):
                    return form
    return None
