"""Gated delta rule and causal convolution of Qwen3-Next and Qwen3.5, in place of the functions in transformers' modeling files.

d key size, dv value size; g key heads, n value heads; the kernels take tokens first, (s, b, ...).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients, Saved, apply_saving
from ..host import kernels
from ..nn.ops import Ops
from ..nn.ops.delta_net import DeltaGates, DeltaHeads
from .served import is_served

Function = Callable[..., Any]
OPS = Ops.build("native")


def _document_starts(bounds: Tensor | None, s: int) -> Tensor | None:
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
    is_batch_of_documents = bounds is not None and len(query) > 1
    normalized = options.get("use_qk_l2norm_in_kernel")
    if not normalized or is_batch_of_documents or not is_served(query, key, value):
        return original(query, key, value, **options)
    b, s, g, d = key.shape
    n, dv = value.shape[2:]
    heads = (query, key, value.reshape(b, s, g, -1))
    qkv = torch.cat([each.transpose(0, 1) for each in heads], -1).flatten(2)
    gates = DeltaGates(*(options[name].float().transpose(0, 1) for name in ("g", "beta")))
    state = options.get("initial_state")
    state = None if state is None else state.float()
    starts = _document_starts(bounds, s)
    out, last = OPS.gated_delta_rule(qkv, gates, DeltaHeads(g, n, d, dv), starts, state)
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
    """Compute transformers' causal_conv1d_fn, the silu of the depthwise convolution of x (b, channels, s) with weight (channels, taps)."""
    known = bias is None and activation == "silu" and options.get("seq_idx") is None
    if not known or not is_served(x, weight):
        return original(x, weight, bias, activation, **options)
    x = x.permute(2, 0, 1).contiguous()
    weight = weight.contiguous()
    starts = _document_starts(options.get("cu_seq_lens_q") if x.shape[1] == 1 else None, len(x))

    def forward() -> tuple[Tensor, Saved]:
        y = torch.empty_like(x)
        kernels.convolution_forward(x, weight, y, starts=starts)
        return y, (x, weight)

    def backward(dy: Tensor, x: Tensor, weight: Tensor) -> Gradients:
        dx = torch.empty_like(x)
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        kernels.convolution_backward(dy.contiguous(), x, weight, dx, dweight, starts=starts)
        return dx, dweight.to(weight.dtype)

    return apply_saving(forward, backward, x, weight).permute(1, 2, 0)


MARK = "torch_chunk_gated_delta_rule"  # in the modeling files that have these functions
# Their function -> ours, which gets it as its first argument
FUNCTIONS: dict[str, Function] = {MARK: chunk_rule, "causal_conv1d_fn": convolution}
