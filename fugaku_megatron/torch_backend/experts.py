"""`experts_implementation="fugaku"` of transformers: torch's grouped matmuls, and kernels for what is between them.

f expert width, h hidden size, k experts per token, p pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..host import kernels

NAME = "fugaku"
TYPES = (torch.float32, torch.bfloat16)


def register() -> None:
    """Add the implementation to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def _route(x: Tensor, pairs: Tensor, places: Tensor, dispatches: bool) -> Tensor:
    """Return the row of each pair's token, x (tokens, h) -> (p, h), or the sum of each token's pairs, x (p, h) -> (tokens, h)."""
    out = x.new_empty(len(pairs if dispatches else places), x.shape[1])
    if dispatches:
        kernels.permute(x.contiguous(), pairs, out, places.shape[1])
    else:
        kernels.unpermute(x.contiguous(), places, out)
    return out


class _Route(torch.autograd.Function):
    """`_route`; each direction is the derivative of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pairs: Tensor, places: Tensor, dispatches: bool) -> Tensor:
        ctx.save_for_backward(pairs, places)
        ctx.dispatches = dispatches
        return _route(x, pairs, places, dispatches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pairs, places = ctx.saved_tensors
        return _route(gradient, pairs, places, not ctx.dispatches), None, None, None


class _Gate(torch.autograd.Function):
    """The silu of the first half of pre (p, 2 f) times the second half times factors (p,) in FP32."""

    @staticmethod
    def forward(ctx: Any, pre: Tensor, factors: Tensor) -> Tensor:
        inner = pre.new_empty(len(pre), pre.shape[1] // 2)
        kernels.scaled_gate(pre.unflatten(1, (2, -1)), factors, inner, "silu")
        ctx.save_for_backward(pre, factors)
        return inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dinner: Tensor) -> tuple[Tensor, Tensor]:
        pre, factors = ctx.saved_tensors
        dpre = torch.empty_like(pre)
        dfactors = torch.empty_like(factors)
        halves = (pre.unflatten(1, (2, -1)), factors, dpre.unflatten(1, (2, -1)))
        again = torch.empty_like(dinner)
        kernels.scaled_gate_backward(dinner.contiguous(), *halves, dfactors, again, "silu")
        return dpre, dfactors


def _is_gate(module: Any) -> bool:
    """Return whether an expert's inner product is silu(first half) * second half."""
    from transformers.integrations.moe import _default_apply_gate

    is_plain = module.has_gate and module.is_concatenated and not module.has_bias
    is_default = type(module)._apply_gate is _default_apply_gate
    return is_plain and is_default and "SiLU" in type(getattr(module, "act_fn", None)).__name__


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts (tokens, h).

    hidden_states: (tokens, h)
    top_k_index, top_k_weights: (tokens, k)
    """
    from transformers.integrations.moe import _grouped_linear, grouped_mm_experts_forward

    x = hidden_states.to(module.down_proj.dtype)
    is_special = module._is_expert_parallel or module.has_post_expert_norm or not _is_gate(module)
    if is_special or x.dtype not in TYPES or not x.numel() or torch.compiler.is_compiling():
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    chosen = top_k_index.contiguous()
    counts = chosen.new_empty(module.num_experts)
    pairs = chosen.new_empty(chosen.numel())
    places = torch.empty_like(chosen)
    kernels.sort_pairs(chosen, counts, pairs, places)
    offsets = counts.cumsum(0).to(torch.int32)
    route = (pairs, places)
    is_transposed = module.is_transposed

    rows = _Route.apply(x, *route, True)  # type: ignore[no-untyped-call]
    pre = _grouped_linear(rows, module.gate_up_proj, offsets, is_transposed=is_transposed)
    # The factors commute with the second product.
    inner = _Gate.apply(pre, top_k_weights.flatten()[pairs].float())  # type: ignore[no-untyped-call]
    out = _grouped_linear(inner, module.down_proj, offsets, is_transposed=is_transposed)
    total: Tensor = _Route.apply(out, *route, False)  # type: ignore[no-untyped-call]
    return total.to(hidden_states.dtype)
