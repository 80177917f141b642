"""`experts_implementation="fugaku"` of transformers: the experts of a layer as grouped matmuls over pairs sorted by expert.

e experts, f expert width, h hidden size, k experts per token, p pairs of a token and an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..host import kernels
from .kernel_operators import KernelOperator, launch, none, supports

NAME = "fugaku"
FEW_PAIRS = 16  # whose weights are read unpacked


def register() -> None:
    """Add the implementation to transformers."""
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(NAME, experts_forward)


def _product(x: Tensor, weight: Tensor, counts: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    """Return each expert's rows of x (p, in) times its matrix. weight: (e, out, in), or (e, in, out) if the number is 1"""
    if numbers[0]:
        out = x.new_empty(len(x), weight.shape[2])
        launch("grouped_linear_data_gradient", x, weight, counts, out)
        return [out]
    out = x.new_empty(len(x), weight.shape[1])
    if len(x) > FEW_PAIRS:
        launch("grouped_linear_forward", x, weight, counts, out)
        return [out]
    sizes = counts.tolist()
    for matrix, rows, into in zip(weight, x.split(sizes), out.split(sizes)):
        if len(rows):
            kernels.linear_few_rows(rows, matrix, into)
    return [out]


def _product_backward(
    tensors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    numbers: Sequence[float],
) -> list[Tensor]:
    x, weight, counts = tensors
    dy = gradients[0]
    is_transposed = bool(numbers[0])
    name = "grouped_linear_forward" if is_transposed else "grouped_linear_data_gradient"
    dx = torch.empty_like(x)
    launch(name, dy, weight, counts, dx)
    if len(numbers) > 1:  # frozen
        return [dx, none(), none()]
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    pair = (x, dy) if is_transposed else (dy, x)
    launch("grouped_linear_weight_gradient", *pair, counts, dweight)
    return [dx, dweight.to(weight.dtype), none()]


def _dispatch(x: Tensor, pairs: Tensor, places: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    """Return the row of each pair's token, x (tokens, h) -> (p, h)."""
    out = x.new_empty(len(pairs), x.shape[1])
    launch("permute", x, pairs, out, places.shape[1])
    return [out]


def _combine(x: Tensor, pairs: Tensor, places: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    """Return the sum of each token's pairs, x (p, h) -> (tokens, h)."""
    out = x.new_empty(len(places), x.shape[1])
    launch("unpermute", x, places, out)
    return [out]


def _dispatch_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    pairs, places = tensors[1:]
    return [*_combine(gradients[0], pairs, places, ()), none(), none()]


def _combine_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    pairs, places = tensors[1:]
    return [*_dispatch(gradients[0], pairs, places, ()), none(), none()]


def _gate(pre: Tensor, factors: Tensor, numbers: Sequence[float]) -> list[Tensor]:
    """Return silu of the first half of pre (p, 2 f) times the second half times factors (p,) in FP32."""
    inner = pre.new_empty(len(pre), pre.shape[1] // 2)
    launch("scaled_gate", pre.unflatten(1, (2, -1)), factors, inner, "silu")
    return [inner]


def _gate_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    pre, factors = tensors
    dpre = torch.empty_like(pre)
    dfactors = torch.empty_like(factors)
    again = torch.empty_like(results[0])
    gates = (pre.unflatten(1, (2, -1)), factors, dpre.unflatten(1, (2, -1)))
    launch("scaled_gate_backward", gradients[0], *gates, dfactors, again, "silu")
    return [dpre, dfactors]


PRODUCT = KernelOperator("grouped_linear", _product, _product_backward)
DISPATCH = KernelOperator("dispatch_rows", _dispatch, _dispatch_backward)
COMBINE = KernelOperator("combine_rows", _combine, _combine_backward)
GATE = KernelOperator("scaled_gate", _gate, _gate_backward)


def _is_silu(module: Any) -> bool:
    """Return whether an expert's inner product is silu(first half) * second half."""
    from transformers.integrations.moe import _default_apply_gate

    is_default = type(module)._apply_gate is _default_apply_gate
    return is_default and "SiLU" in type(getattr(module, "act_fn", None)).__name__


def experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Return the weighted sum of each token's experts (tokens, h).

    hidden_states: (tokens, h)
    top_k_index, top_k_weights: (tokens, k)
    """
    x = hidden_states.to(module.down_proj.dtype)
    if not supports(x) or module._is_expert_parallel or module.has_post_expert_norm:
        from transformers.integrations.moe import grouped_mm_experts_forward

        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    # Pairs sorted by expert: how many, which, and where each pair is.
    chosen = top_k_index.flatten()
    counts = chosen.new_zeros(module.num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    pairs = chosen.argsort(stable=True)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs)))
    places = places.view(top_k_index.shape)
    factors = top_k_weights.flatten()[pairs].float()

    def product(rows: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        is_frozen = () if weight.requires_grad else (1.0,)
        numbers = (module.is_transposed, *is_frozen)
        out = PRODUCT(rows.contiguous(), weight.contiguous(), counts, numbers=numbers)[0]
        return out + getattr(module, f"{name}_bias")[chosen[pairs]] if module.has_bias else out

    rows = DISPATCH(x.contiguous(), pairs, places)[0]
    pre = product(rows, "gate_up_proj" if module.has_gate else "up_proj")
    if module.has_gate and not module.has_bias and module.is_concatenated and _is_silu(module):
        # The factors commute with the second product.
        out = product(GATE(pre, factors)[0], "down_proj")
    else:
        inner = module._apply_gate(pre) if module.has_gate else module.act_fn(pre)
        out = (product(inner, "down_proj") * factors.unsqueeze(1)).to(x.dtype)
    return COMBINE(out.contiguous(), pairs, places)[0].to(hidden_states.dtype)
