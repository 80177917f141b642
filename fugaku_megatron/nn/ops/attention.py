"""Causal attention (groups: Ainslie et al. 2023, arXiv:2305.13245; window: Beltagy et al. 2020, arXiv:2004.05150).

n heads of this rank in g query groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import Function, Gradients
from ..dropout_key import Dropout
from ..gradients import as_rows
from ..heads import Heads
from ..kv_cache import LayerCache
from ..shared_attention import AttentionGradients, Block, SharedCall
from ..sinks import Sinks
from .backend import Backend
from .dropout import dropout


class CachedRows(NamedTuple):
    """samples: (r,), each row's sample in the cache. positions: (r,), each row's position in its sample."""

    samples: Tensor
    positions: Tensor


def attention(
    ops: Backend,
    qkv: Tensor,
    heads: Heads,
    dropped: Dropout,
    window: int | None = None,
    starts: Tensor | None = None,
) -> Tensor:
    """Attend from each token to the tokens before it, qkv -> (s, b, n d).

    window: token i attends to tokens j with i - window < j <= i.
    starts: see `Documents`.
    """
    if ops.is_native("attention"):
        mask = {"window": window, "starts": starts}
        return _NativeAttention.apply(ops.kernels, qkv, heads, dropped, mask)
    drop = partial(dropout, ops, dropped=dropped) if dropped.p else None
    return _torch_attention(qkv, heads, window, drop, starts)


class _NativeAttention(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Any, kernels: Any, qkv: Tensor, heads: Heads, dropped: Dropout, mask: dict[str, Any]
    ) -> Tensor:
        qkv = qkv.contiguous()
        s, b, _ = qkv.shape
        out = qkv.new_empty(s, b, heads.heads * heads.head_size)
        lse = qkv.new_empty(b, heads.heads, s, dtype=torch.float32)
        ctx.kernels = kernels
        ctx.mask = mask
        key = dropped.key
        ctx.dropped = (dropped.p, key.seed, key.stream, key.first_sample, key.row0 // s)
        kernels.attention_forward(qkv, out, lse, *ctx.dropped, **mask)
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        qkv, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        ctx.kernels.attention_backward(
            qkv, out, lse, dout.contiguous(), dqkv, *ctx.dropped, **ctx.mask
        )
        return None, dqkv, None, None, None


def _visible_keys(s: int, window: int | None, starts: Tensor | None) -> Tensor | None:
    """Return a bool mask (s, s) or (b, 1, s, s), or None."""
    if starts is None and (window is None or window >= s):
        return None
    visible = torch.ones(s, s, dtype=torch.bool).tril().triu(1 - min(window or s, s))
    if starts is None:
        return visible
    return (visible & (torch.arange(s) >= starts.unsqueeze(-1))).unsqueeze(1)


def _torch_attention(
    qkv: Tensor,
    heads: Heads,
    window: int | None,
    drop: Callable[[Tensor], Tensor] | None,
    starts: Tensor | None,
) -> Tensor:
    s, b, _ = qkv.shape
    d = heads.head_size
    queries, keys, values = (
        x.permute(1, 2, 3, 0, 4).flatten(1, 2) for x in heads.split(qkv)
    )  # (b, n or g, s, d)
    visible = _visible_keys(s, window, starts)
    if drop is None:
        context = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=visible,
            is_causal=visible is None,
            enable_gqa=heads.groups < heads.heads,
        )  # (b, n, s, d)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1) if visible is None else ~visible
    # The queries of a group are stacked, (b, g, n/g s, d), so that no key or value is repeated.
    stacked = queries.unflatten(1, (heads.groups, -1)).flatten(2, 3)
    scores = torch.matmul(stacked, keys.transpose(-1, -2)).reshape(b, heads.heads, s, s) * d**-0.5
    probabilities = drop(torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1))
    context = torch.matmul(probabilities.view(b, heads.groups, -1, s), values)
    return context.reshape(b, heads.heads, s, d).permute(2, 0, 1, 3).reshape(s, b, -1)


def cached_attention(
    ops: Backend,
    qkv: Tensor,
    cache: LayerCache,
    rows: CachedRows,
    softcap: float | None = None,
    sinks: Sinks | None = None,
) -> Tensor:
    """Store the keys and values of one new token per sample, and attend, qkv (r, 1, ...) -> (r, 1, n d). Nothing is saved.

    softcap: see --attn-logit-softcapping. sinks: see --softmax-type
    """
    keys = cache.keys
    values = cache.values
    samples, positions = rows
    _, groups, slots, d = keys.shape
    if ops.is_native("attention") and softcap is None and sinks is None:
        out = qkv.new_empty(len(qkv), qkv.shape[-1] - 2 * groups * d)
        ops.kernels.attention_decode(as_rows(qkv), keys, values, samples, positions, out)
        return out.unsqueeze(1)
    context = []
    heads = qkv.view(len(qkv), groups, -1, d)
    for row, sample, position in zip(heads, samples.tolist(), positions.tolist(), strict=True):
        keys[sample, :, position % slots] = row[:, -2]
        values[sample, :, position % slots] = row[:, -1]
        stored = slice(sample, sample + 1), slice(None), slice(min(position + 1, slots))
        # (1, g, n / g, d): a group's queries are the rows of attention, so that nothing is repeated.
        queries = row[None, :, :-2]
        if softcap is None and sinks is None:
            context.append(F.scaled_dot_product_attention(queries, keys[stored], values[stored]))
            continue
        scores = queries.float() @ keys[stored].float().transpose(-1, -2) * d**-0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.values.view(1, groups, -1, 1)), -1)
        probabilities = torch.softmax(scores, -1)[..., : keys[stored].shape[2]]
        context.append((probabilities @ values[stored].float()).to(qkv.dtype))
    return torch.cat(context).view(len(qkv), 1, -1)


# Blocks of queries and keys, for ranks that share a sequence -----------------------------------------------------------------


def attend_block(
    ops: Backend, call: SharedCall, block: Block, qkv: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (context (q, b, n d), log of the softmax sums (b, n, q)) of a block.

    kv: (k, b, 2 g d)
    """
    heads = call.heads
    q, b, _ = qkv.shape
    if ops.is_native("attention") and call.softcap is None:
        out = qkv.new_empty(q, b, heads.heads * heads.head_size)
        lse = qkv.new_empty(b, heads.heads, q, dtype=torch.float32)
        ops.kernels.attention_part_forward(qkv, kv, out, lse, *_block_arguments(call, block))
        return out, lse
    scores, *_, values = _block_scores(call, block, qkv, kv)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = (probabilities * _block_dropout(ops, call, block, len(scores))) @ values
    return out.permute(2, 0, 1, 3).flatten(2).to(qkv.dtype), lse


def add_block_gradients(
    ops: Backend,
    call: SharedCall,
    block: Block,
    gradients: AttentionGradients,
    kv: Tensor,
    dkv: Tensor,
) -> None:
    """Add a block's gradients to `gradients.dqkv` and dkv, in FP32."""
    qkv, out, lse, dout, dqkv = gradients
    if ops.is_native("attention") and call.softcap is None:
        ops.kernels.attention_part_backward(
            qkv, kv, out, lse, dout, dqkv, dkv, *_block_arguments(call, block)
        )
        return
    heads = call.heads
    scores, queries, keys, values = _block_scores(call, block, qkv, kv)
    grad, context = (
        x.float().unflatten(2, (heads.heads, -1)).permute(1, 2, 0, 3) for x in (dout, out)
    )  # (b, n, q, d)
    probabilities = torch.exp(scores - lse.unsqueeze(-1))
    mask = _block_dropout(ops, call, block, len(scores))
    delta = (grad * context).sum(-1, keepdim=True)
    dscores = (
        probabilities * (grad @ values.transpose(-1, -2) * mask - delta) * heads.head_size**-0.5
    )
    if call.softcap is not None:
        capped = scores.masked_fill(probabilities == 0, 0.0) / call.softcap
        dscores *= 1 - capped.square()
    dqueries = (dscores @ keys).unflatten(1, (heads.groups, -1))
    heads.split(dqkv)[0].add_(dqueries.permute(3, 0, 1, 2, 4))  # (q, b, g, n/g, d)
    dkeys = dscores.transpose(-1, -2) @ queries
    dvalues = (probabilities * mask).transpose(-1, -2) @ grad
    both = torch.stack((dkeys, dvalues))  # (2, b, n, k, d)
    dkv.add_(both.unflatten(2, (heads.groups, -1)).sum(3).permute(3, 1, 2, 0, 4).reshape(dkv.shape))


def _block_arguments(call: SharedCall, block: Block) -> tuple[Any, ...]:
    mask = call.mask
    p, key = call.dropped
    return (
        mask.length,
        block.queries.start,
        block.keys.start,
        p,
        key.seed,
        key.stream,
        key.first_sample,
        key.row0 // mask.length,
        mask.window,
        mask.starts,
    )


def _block_scores(
    call: SharedCall, block: Block, qkv: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    heads = call.heads
    mask = call.mask
    queries = heads.split(qkv)[0].permute(1, 2, 3, 0, 4).flatten(1, 2).float()
    shape = (*kv.shape[:2], heads.groups, 2, heads.head_size)
    keys, values = (
        kv.view(shape).permute(3, 1, 2, 0, 4).repeat_interleave(heads.queries_per_group, 2).float()
    )
    query = torch.arange(block.queries.start, block.queries.stop)
    key = torch.arange(block.keys.start, block.keys.stop)
    distance = query.unsqueeze(1) - key
    visible = (distance >= 0) & (distance < (mask.window or mask.length))
    visible = visible.expand(qkv.shape[1], -1, -1)
    if mask.starts is not None:
        visible = visible & (key >= mask.starts[:, query].unsqueeze(-1))
    scores = (queries @ keys.transpose(-1, -2)) * heads.head_size**-0.5
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    return scores.masked_fill(~visible.unsqueeze(1), -torch.inf), queries, keys, values


def _block_dropout(ops: Backend, call: SharedCall, block: Block, samples: int) -> Tensor | float:
    """Return dropout factors (b, n, q, k), numbered as in the whole sequence."""
    p, key = call.dropped
    if not p:
        return 1.0
    ones = torch.ones(samples, len(block.queries), block.keys.stop)
    masks = []
    for head in range(call.heads.heads):
        row0 = key.row0 + head * call.mask.length + block.queries.start
        mask = dropout(ops, ones, Dropout(p, replace(key, row0=row0)))
        masks.append(mask[..., block.keys.start :])
    return torch.stack(masks, 1)
