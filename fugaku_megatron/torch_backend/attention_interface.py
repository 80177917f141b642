"""`attn_implementation="fugaku"` of transformers: torch's attention, and the kernels for what torch's lacks, sinks and fast dropout."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients, Saved, apply_saving
from .attention import Heads, Options, Plan

NAME = "fugaku"


def register() -> None:
    """Add the implementation to transformers."""
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

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
    heads = Heads(query, key, value)
    if torch.is_autocast_enabled("cpu"):
        heads = Heads(*(x.to(torch.get_autocast_dtype("cpu")) for x in heads))
    plan = _plan(module, heads, attention_mask, options)
    if plan is None:
        return _transformers_attention(module, heads, attention_mask, options)
    context = _attend(heads, options.get("s_aux"), plan)
    return context.transpose(1, 2).contiguous(), None


def _plan(
    module: torch.nn.Module, heads: Heads, mask: Tensor | None, options: dict[str, Any]
) -> Plan | None:
    """Return the calls of the kernels, or None for what torch computes as fast or the kernels lack."""
    unknown = ("softcap", "position_bias", "cache", "output_attentions")
    dropout = options.get("dropout", 0.0)
    is_special = options.get("s_aux") is not None or bool(dropout)
    if not is_special or any(map(options.get, unknown)):
        return None
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if mask is not None:
        mask = _added(mask, heads.query.dtype, -math.inf)
    causal = mask is None and is_causal and heads.query.shape[2] > 1
    return Plan.of(heads, Options(dropout, causal, mask, options.get("scaling")))


def _added(mask: Tensor, dtype: torch.dtype, hidden: float) -> Tensor:
    """Return a mask that is added to scores. mask: True, or more than the lowest number in an added mask, is visible"""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, hidden)
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, hidden)


def _transformers_attention(
    module: torch.nn.Module, heads: Heads, mask: Tensor | None, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Call torch's attention, or the model's own if it has sinks or capped scores, which torch's has not."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    result: tuple[Tensor, Tensor | None]
    if eager is None or all(options.get(name) is None for name in ("s_aux", "softcap")):
        result = ALL_ATTENTION_FUNCTIONS["sdpa"](module, *heads, mask, **options)
        return result
    query, key, _ = heads
    if mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()[None, None]
    if mask is not None:
        mask = _added(mask, query.dtype, torch.finfo(query.dtype).min)
    result = eager(module, *heads, mask, **options)
    return result
