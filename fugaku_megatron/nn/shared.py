"""What the operations of both kernel choices share: gradients' accumulation, dropout, recompute.

Left out: everything that has two implementations (`torch_ops`, `native_ops`). Test: pytest tests/test_ops.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..host import kernels


@dataclass(frozen=True)
class MaskPlace:
    """Which dropout mask: a function of seed, stream and the element's place in its sample's global tensor.

    `sample_dim` counts samples from `first_sample`, the last dimension counts columns from 0, all others together rows from `row0`.
    """

    seed: int
    stream: int
    first_sample: int
    sample_dim: int
    row0: int = 0


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` (parameter's shape, any float dtype) to the parameter's FP32 gradient."""
    parameter.main_grad.add_(grad)


def _masked(x: Tensor, p: float, mask: MaskPlace) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    kernels.dropout(x, out, p, mask.seed, mask.stream, mask.first_sample, mask.sample_dim, mask.row0)
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, mask: MaskPlace) -> Tensor:
        ctx.p, ctx.mask = p, mask
        return _masked(x, p, mask)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _masked(dy, ctx.p, ctx.mask), None, None


def dropout(x: Tensor, p: float, mask: MaskPlace) -> Tensor:
    """Zero elements of x with probability p, scale the others by 1/(1-p); the mask is a function of its place alone."""
    return x if p == 0.0 else _Dropout.apply(x, p, mask)


def backward(y: Tensor, dy: Tensor | None) -> None:
    """torch.autograd.backward(y, dy), by the engine itself: torch's function first loads its symbolic-shape checks with sympy,
    500 modules and 32 MiB a rank."""
    dy = torch.ones_like(y) if dy is None else dy
    torch.autograd.Variable._execution_engine.run_backward((y,), (dy,), False, False, (), allow_unreachable=True,
                                                           accumulate_grad=True)


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], again: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        ctx.again, ctx.args = again, args
        ctx.save_for_backward(x)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.again(x, *ctx.args)
        y.data = y.new_empty(1)  # backward reads none of the result
        backward(y, dy)
        return None, None, x.grad, *(None for _ in ctx.args)


def recompute(function: Callable[..., Tensor], x: Tensor, *args: Any, again: Callable[..., Tensor] | None = None) -> Tensor:
    """function(x, *args), whose intermediate tensors are dropped and computed again in backward.

    again: what backward calls instead, to leave out what only the result's values need; the same graph comes of it.
    Dropout masks are functions of their place, so there is no random state to restore and the second run has the same bits.
    torch.utils.checkpoint does the same and more, but its first call loads torch's compiler, 70 MiB a rank.
    """
    assert x.requires_grad or not torch.is_grad_enabled(), "autograd would drop the function's gradients"
    return _Recompute.apply(function, again or function, x, *args)
