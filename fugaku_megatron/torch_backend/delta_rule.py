"""Gated delta rule and causal convolution of Qwen3-Next and Qwen3.5, in place of the functions in transformers' modeling files.

d key size, dv value size; g key heads, n value heads; the kernels take tokens first, (s, b, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..host import kernels

Function = Callable[..., Any]
TYPES = (torch.float32, torch.bfloat16)


class _DeltaRule(torch.autograd.Function):
    """Result (s, b, n dv) and last state of qkv (s, b, g (2 d + dv n / g))."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, decay: Tensor, beta: Tensor, state: Tensor, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        s, b, _ = qkv.shape
        segments = (s + kernels.DELTA_SEGMENT - 1) // kernels.DELTA_SEGMENT
        states = state.new_empty(segments + 1, *state.shape)
        states[0] = state
        out = qkv.new_empty(s, b, state.shape[1] * state.shape[3])
        kernels.delta_rule_forward(qkv, decay, beta, states, out, starts=starts)
        ctx.save_for_backward(qkv, decay, beta, states, starts)
        return out, states[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:
        qkv, decay, beta, states, starts = ctx.saved_tensors
        # The kernel replaces the gradient of the last state by the gradient of the first one.
        dstate = dstate.clone()
        made = [torch.empty_like(each) for each in (qkv, decay, beta)]
        inputs = (qkv, decay, beta, states, dout.contiguous(), dstate)
        kernels.delta_rule_backward(*inputs, *made, starts=starts)
        return *made, dstate, None


class _Convolution(torch.autograd.Function):
    """The silu of the depthwise convolution of x (s, b, channels) with weight (channels, taps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
        y = torch.empty_like(x)
        kernels.convolution_forward(x, weight, y, starts=starts)
        ctx.save_for_backward(x, weight, starts)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, starts = ctx.saved_tensors
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        kernels.convolution_backward(dy.contiguous(), x, weight, dx, dweight, starts=starts)
        return dx, dweight.to(weight.dtype), None


def _document_starts(bounds: Tensor | None, s: int) -> Tensor | None:
    """Return the first position of each token's document, int32 (1, s), from the documents' bounds; None: one document."""
    if bounds is None:
        return None
    numbers = torch.searchsorted(bounds[1:].contiguous(), torch.arange(s), right=True)
    return bounds[numbers].to(torch.int32).unsqueeze(0)


def _is_supported(*tensors: Tensor) -> bool:
    dtype = tensors[0].dtype
    is_served = all(x.dtype == dtype and x.numel() for x in tensors)
    return is_served and dtype in TYPES and not torch.compiler.is_compiling()


def chunk_rule(
    original: Function, query: Tensor, key: Tensor, value: Tensor, **options: Any
) -> Any:
    """Compute transformers' chunk_gated_delta_rule."""
    bounds = options.get("cu_seqlens")
    is_batch_of_documents = bounds is not None and len(query) > 1
    normalized = options.get("use_qk_l2norm_in_kernel")
    if not normalized or is_batch_of_documents or not _is_supported(query, key, value):
        return original(query, key, value, **options)
    b, s, g, d = key.shape
    n, dv = value.shape[2:]
    heads = (query, key, value.reshape(b, s, g, -1))
    qkv = torch.cat([each.transpose(0, 1) for each in heads], -1).flatten(2)
    gates = (options[name].float().transpose(0, 1).contiguous() for name in ("g", "beta"))
    state = options.get("initial_state")
    state = torch.zeros(b, n, d, dv) if state is None else state.float()
    starts = _document_starts(bounds, s)
    out, last = _DeltaRule.apply(qkv, *gates, state, starts)  # type: ignore[no-untyped-call]
    out = out.transpose(0, 1).unflatten(-1, (n, dv))
    return out, last if options.get("output_final_state") else None


def convolution(
    original: Function,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Any:
    """Compute transformers' causal_conv1d_fn, x (b, channels, s)."""
    known = bias is None and activation == "silu" and options.get("seq_idx") is None
    if not known or not _is_supported(x, weight):
        return original(x, weight, bias, activation, **options)
    bounds = options.get("cu_seq_lens_q") if len(x) == 1 else None
    tokens = x.permute(2, 0, 1).contiguous()
    starts = _document_starts(bounds, len(tokens))
    y = _Convolution.apply(tokens, weight.contiguous(), starts)  # type: ignore[no-untyped-call]
    return y.permute(1, 2, 0)


# A function of the modeling files that have it -> ours, which gets it as its first argument
MARK = "torch_chunk_gated_delta_rule"
FUNCTIONS: dict[str, Function] = {
    MARK: chunk_rule,
    "causal_conv1d_fn": convolution,
}
