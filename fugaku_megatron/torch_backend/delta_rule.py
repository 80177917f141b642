"""Gated delta rule and causal convolution of Qwen3-Next and Qwen3.5, in place of the functions in transformers' modeling files.

d key size, dv value size; g key heads, n value heads; the kernels take tokens first, (s, b, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..host import kernels
from .kernel_operators import KernelOperator, given, launch, none, supports

Function = Callable[..., Any]


def _rule(
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    starts: Tensor,
    numbers: Sequence[float],
) -> list[Tensor]:
    """Return the result (s, b, n dv), the last state, and the states between segments, which backward needs."""
    s, b, _ = qkv.shape
    _, n, _, dv = state.shape
    segments = (s + kernels.DELTA_SEGMENT - 1) // kernels.DELTA_SEGMENT
    states = state.new_empty(segments + 1, *state.shape)
    states[0] = state
    out = qkv.new_empty(s, b, n * dv)
    launch("delta_rule_forward", qkv, decay, beta, states, out, starts=given(starts))
    return [out, states[-1].clone(), states]


def _rule_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    dout, dstate = gradients[:2]
    # The kernel replaces the gradient of the last state by that of the first.
    first = dstate.clone() if len(dstate) else torch.zeros_like(tensors[3])
    made = [torch.empty_like(each) for each in tensors[:3]]
    dout = dout if len(dout) else torch.zeros_like(results[0])
    inputs = (*tensors[:3], results[2], dout, first)
    launch("delta_rule_backward", *inputs, *made, starts=given(tensors[4]))
    return [*made, first, none()]


def _convolution(
    x: Tensor, weight: Tensor, starts: Tensor, numbers: Sequence[float]
) -> list[Tensor]:
    """Return silu of the depthwise convolution of x (s, b, channels) with weight (channels, taps)."""
    y = x.new_empty(x.shape)
    launch("convolution_forward", x, weight, y, starts=given(starts))
    return [y]


def _convolution_backward(
    tensors: list[Tensor], results: list[Tensor], gradients: list[Tensor], _: Sequence[float]
) -> list[Tensor]:
    x, weight, starts = tensors
    dx = x.new_empty(x.shape)
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    launch("convolution_backward", gradients[0], x, weight, dx, dweight, starts=given(starts))
    return [dx, dweight.to(weight.dtype), none()]


DELTA_RULE = KernelOperator("delta_rule", _rule, _rule_backward)
CONVOLUTION = KernelOperator("causal_convolution", _convolution, _convolution_backward)


def document_starts(bounds: Tensor | None, s: int) -> Tensor | None:
    """Return the first position of each token's document, int32 (1, s), from the documents' bounds; None: one document."""
    if bounds is None:
        return None
    numbers = torch.searchsorted(bounds[1:].contiguous(), torch.arange(s), right=True)
    return bounds[numbers].to(torch.int32).unsqueeze(0)


def chunk_rule(
    original: Function, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """Compute transformers' chunk_gated_delta_rule."""
    bounds = options.get("cu_seqlens")
    is_packed = bounds is not None and len(query) == 1
    normalized = options.get("use_qk_l2norm_in_kernel")
    if not normalized or not supports(query, key, value) or (bounds is not None and not is_packed):
        return original(query, key, value, **options)
    b, s, g, d = key.shape
    n, dv = value.shape[2:]
    heads = (query, key, value.reshape(b, s, g, -1))
    qkv = torch.cat([each.transpose(0, 1) for each in heads], -1).flatten(2)
    gates = (options[name].float().transpose(0, 1).contiguous() for name in ("g", "beta"))
    state = options.get("initial_state")
    state = torch.zeros(b, n, d, dv) if state is None else state.float()
    out, last, _ = DELTA_RULE(qkv, *gates, state, document_starts(bounds, s))
    out = out.transpose(0, 1).unflatten(-1, (n, dv))
    return out, last if options.get("output_final_state") else None


def recurrent_rule(
    original: Function, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """Compute transformers' fused_recurrent_gated_delta_rule, of one token of each sample and without gradient."""
    state = options.get("initial_state")
    differentiable = torch.is_grad_enabled() or torch.compiler.is_compiling()
    normalized = options.get("use_qk_l2norm_in_kernel")
    if differentiable or state is None or not normalized or not supports(query, key, value):
        return original(query, key, value, **options)
    b, _, g, _ = key.shape
    rows = torch.cat((query[:, 0], key[:, 0], value.reshape(b, g, -1)), -1).flatten(1)
    gates = (options[name][:, 0].float().contiguous() for name in ("g", "beta"))
    # transformers copies the returned state to its cache.
    state = state.float().clone()
    out = rows.new_empty(b, value[0].numel())
    kernels.delta_rule_decode(rows, *gates, state, torch.arange(b), out)
    return out.view(value.shape), state if options.get("output_final_state") else None


def convolution(
    original: Function,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Any:
    """Compute transformers' causal_conv1d_fn, x (b, channels, s)."""
    bounds = options.get("cu_seq_lens_q")
    is_packed = bounds is not None and len(x) == 1
    if (
        bias is not None
        or activation != "silu"
        or not supports(x, weight)
        or options.get("seq_idx") is not None
    ):
        return original(x, weight, bias, activation, **options)
    tokens = x.permute(2, 0, 1).contiguous()
    starts = document_starts(bounds, len(tokens)) if is_packed else None
    return CONVOLUTION(tokens, weight.contiguous(), starts)[0].permute(1, 2, 0)


def convolution_update(
    original: Function, x: Tensor, state: Tensor, weight: Tensor, *options: Any
) -> Any:
    """Compute transformers' causal_conv1d_update of one token, x (b, channels, 1), by a product and not by torch's convolution."""
    if options != (None, "silu"):
        return original(x, state, weight, *options)
    window = torch.cat((state, x), -1)
    state.copy_(window[..., 1:])
    products = window[..., -weight.shape[-1] :].float() * weight.float()
    return F.silu(products.sum(-1, keepdim=True)).to(x.dtype)


# A function of transformers' modeling files -> ours, which gets it as its first argument
FUNCTIONS: dict[str, Function] = {
    "torch_chunk_gated_delta_rule": chunk_rule,
    "torch_recurrent_gated_delta_rule": recurrent_rule,
    "causal_conv1d_fn": convolution,
    "causal_conv1d_update": convolution_update,
}
