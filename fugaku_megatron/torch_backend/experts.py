"""`experts_implementation="fugaku"` of transformers: torch's grouped matmuls, and kernels for what is between them.

f expert width, h hidden size, k experts per token, p pairs of a token and an expert, sorted by expert.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients, Saved, apply_conjugates, apply_saving
from ..nn.ops import Ops
from ..nn.ops.activation import Activation
from .served import is_served

NAME = "fugaku"
OPS = Ops.build("native")
SWIGLU = Activation("swiglu")


def register() -> None:
    """Add the implementation to transformers, if it is 5.0 or newer."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:
        return
    ExpertsInterface.register(NAME, experts_forward)


def _gate(pre: Tensor, factors: Tensor) -> Tensor:
    """Return the silu of the first half of pre (p, 2 f) times the second half times factors (p,) in FP32."""

    def forward() -> tuple[Tensor, Saved]:
        return OPS.scaled_gate(pre, factors, SWIGLU), (pre, factors)

    def backward(dinner: Tensor, pre: Tensor, factors: Tensor) -> Gradients:
        dpre = torch.empty_like(pre)
        overwritten = dinner.clone(memory_format=torch.contiguous_format)
        return dpre, OPS.scaled_gate_gradient(overwritten, pre, factors, dpre, SWIGLU)

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
    counts, pairs, places = OPS.sort_pairs(top_k_index.contiguous(), module.num_experts)
    offsets = counts.cumsum(0).to(torch.int32)
    dispatch = partial(OPS.permute, pairs=pairs, k=places.shape[1])
    combine = partial(OPS.unpermute, places=places)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return _grouped_linear(rows, weight, offsets, is_transposed=module.is_transposed)

    pre = product(apply_conjugates(dispatch, combine, x), module.gate_up_proj)
    # The factors commute with the second product.
    inner = _gate(pre, top_k_weights.flatten()[pairs].float())
    out = product(inner, module.down_proj)
    return apply_conjugates(combine, dispatch, out).to(hidden_states.dtype)
