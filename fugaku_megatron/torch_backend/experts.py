"""`experts_implementation="fugaku"` of transformers: torch's grouped matmuls, and kernels for what is between them.

f expert width, h hidden size, k experts per token, p pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients, Saved, apply_conjugates, apply_saving
from ..host import kernels
from .served import is_served

NAME = "fugaku"


def register() -> None:
    """Add the implementation to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def _gate(pre: Tensor, factors: Tensor) -> Tensor:
    """Return the silu of the first half of pre (p, 2 f) times the second half times factors (p,) in FP32."""

    def forward() -> tuple[Tensor, Saved]:
        inner = pre.new_empty(len(pre), pre.shape[1] // 2)
        kernels.scaled_gate(pre.unflatten(1, (2, -1)), factors, inner, "silu")
        return inner, (pre, factors)

    def backward(dinner: Tensor, pre: Tensor, factors: Tensor) -> Gradients:
        dpre, dfactors, again = map(torch.empty_like, (pre, factors, dinner))
        halves = (pre.unflatten(1, (2, -1)), factors, dpre.unflatten(1, (2, -1)))
        kernels.scaled_gate_backward(dinner.contiguous(), *halves, dfactors, again, "silu")
        return dpre, dfactors

    return apply_saving(forward, backward, pre, factors)


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
    if is_special or not is_served(x):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    chosen = top_k_index.contiguous()
    counts = chosen.new_empty(module.num_experts)
    pairs = chosen.new_empty(chosen.numel())
    places = torch.empty_like(chosen)
    kernels.sort_pairs(chosen, counts, pairs, places)
    offsets = counts.cumsum(0).to(torch.int32)

    def dispatch(x: Tensor) -> Tensor:
        rows = x.new_empty(len(pairs), x.shape[1])
        kernels.permute(x.contiguous(), pairs, rows, places.shape[1])
        return rows

    def combine(rows: Tensor) -> Tensor:
        total = rows.new_empty(len(places), rows.shape[1])
        kernels.unpermute(rows.contiguous(), places, total)
        return total

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return _grouped_linear(rows, weight, offsets, is_transposed=module.is_transposed)

    pre = product(apply_conjugates(dispatch, combine, x), module.gate_up_proj)
    # The factors commute with the second product.
    inner = _gate(pre, top_k_weights.flatten()[pairs].float())
    out = product(inner, module.down_proj)
    return apply_conjugates(combine, dispatch, out).to(hidden_states.dtype)
