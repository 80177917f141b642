"""`attn_implementation="fugaku"` of transformers: torch's attention, and the kernels for what torch's lacks, sinks and fast dropout."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients, Saved, apply_saving
from .attention import Heads, Plan
from .served import compute_dtype

NAME = "fugaku"
UNSERVED = ("softcap", "position_bias", "cache", "output_attentions")  # options
Attend = Callable[..., tuple[Tensor, Tensor | None]]


def register() -> None:
    """Add the implementation to transformers, if it is 4.53 or newer."""
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
        from transformers.modeling_utils import AttentionInterface
    except ImportError:
        return
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _attend(heads: Heads, sinks: Tensor | None, plan: Plan) -> Tensor:
    """Return attention to keys and to sinks (n,), a score of each head without a key."""

    def forward() -> tuple[Tensor, Saved]:
        out, lse = plan.forward(heads)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.float().view(-1, 1))
            out.mul_((lse - total).exp_().unsqueeze(-1))
            lse = total
        return out, (*heads, out, lse, sinks)

    def backward(dout: Tensor, *saved: Tensor) -> Gradients:
        *inputs, out, lse, sinks = saved
        gradients = plan.backward(dout, Heads(*inputs), out, lse)
        if sinks is None:
            return gradients
        along = (dout.float() * out.float()).sum(-1)
        shares = torch.exp(sinks.float().view(-1, 1) - lse)
        return *gradients, -(shares * along).sum((0, 2)).to(sinks.dtype)

    return apply_saving(forward, backward, *heads, sinks)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the context (b, s, n, d) of queries (b, n, s, d), and None for the probabilities."""
    heads = Heads(*(x.to(compute_dtype(x)) for x in (query, key, value)))
    mask = attention_mask
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = mask is None and is_causal and query.shape[2] > 1
    sinks = options.get("s_aux")
    dropout = options.get("dropout", 0.0)
    # Torch computes attention without sinks and dropout as fast.
    if (sinks is not None or dropout) and not any(map(options.get, UNSERVED)):
        added = None if mask is None else _added(mask, heads.query.dtype, -math.inf)
        plan = Plan.of(heads, is_causal, added, options.get("scaling"), dropout)
        if plan is not None:
            return _attend(heads, sinks, plan).transpose(1, 2).contiguous(), None
    return _transformers_attention(module, heads, mask, is_causal, options)


def _added(mask: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """Return a mask that is added to scores. mask: True, or more than the lowest number in an added mask, is visible"""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, hidden)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, hidden)


def _transformers_attention(
    module: torch.nn.Module,
    heads: Heads,
    mask: Tensor | None,
    is_causal: bool,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """Call torch's attention, or the model's own if it has sinks or capped scores, which torch's has not."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend: Attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is not None and any(options.get(name) is not None for name in ("s_aux", "softcap")):
        attend = eager
        if is_causal:
            shape = (heads.query.shape[2], heads.key.shape[2])
            mask = torch.ones(shape, dtype=torch.bool).tril()[None, None]
        if mask is not None:
            dtype = heads.query.dtype
            mask = _added(mask, dtype, torch.finfo(dtype).min)
    return attend(module, *heads, mask, **options)
