"""Causal attention (groups: Ainslie et al. 2023, arXiv:2305.13245; window: Beltagy et al. 2020, arXiv:2004.05150).

n heads of this rank in g query groups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import SavedResult, apply_saving
from ...config.rows import HEAD_MULTIPLE
from ..attention.context_parallel import SharedCall
from ..attention.heads import Heads
from ..attention.kv_cache import LayerCache
from ..dropout_key import Dropout
from ..forward_context import Rows
from ..parameter import as_rows
from .backend import Backend
from .dropout import dropout


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
    starts: see `PackedDocuments`.
    """
    if not ops.is_native("attention"):
        masked = partial(dropout, ops, dropped=dropped) if dropped.p else None
        return _torch_attention(qkv, heads, window, masked, starts)
    kernels = ops.kernels
    options = {"window": window, "starts": starts, **heads.options}
    s, b, _ = qkv.shape
    key = dropped.key
    drop = (dropped.p, key.seed, key.stream, key.first_sample, key.row0 // s)

    def forward() -> SavedResult:
        rows = qkv.contiguous()
        out = rows.new_empty(s, b, heads.context_width)
        lse = rows.new_empty(b, heads.heads, s, dtype=torch.float32)
        kernels.attention_forward(rows, out, lse, *drop, **options)
        return out, (rows, out, lse)

    def backward(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        dqkv = torch.empty_like(qkv)
        kernels.attention_backward(qkv, out, lse, dout.contiguous(), dqkv, *drop, **options)
        return dqkv

    return apply_saving(forward, backward, qkv)


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
    queries, keys, values = (
        x.permute(1, 2, 3, 0, 4).flatten(1, 2) for x in heads.split(qkv)
    )  # (b, n or g, s, d or v)
    visible = _visible_keys(s, window, starts)
    if drop is None:
        context = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=visible,
            is_causal=visible is None,
            scale=heads.scale,
            enable_gqa=heads.groups < heads.heads,
        )  # (b, n, s, v)
        return context.permute(2, 0, 1, 3).reshape(s, b, -1)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1) if visible is None else ~visible
    # The queries of a group are stacked, (b, g, n/g s, d), so that no key or value is repeated.
    stacked = queries.unflatten(1, (heads.groups, -1)).flatten(2, 3)
    scores = torch.matmul(stacked, keys.mT).reshape(b, heads.heads, s, s)
    scores = scores * heads.score_scale
    probabilities = drop(torch.softmax(scores.masked_fill(hidden, -torch.inf), dim=-1))
    context = torch.matmul(probabilities.view(b, heads.groups, -1, s), values)
    return context.reshape(b, heads.heads, s, -1).permute(2, 0, 1, 3).reshape(s, b, -1)


def cached_attention(
    ops: Backend, qkv: Tensor, cache: LayerCache, rows: Rows, call: SharedCall
) -> Tensor:
    """Store the keys and values of one new token per sample, and attend, qkv (r, 1, ...) -> (r, 1, n v). Nothing is saved.

    qkv: without values if the cache has latents
    """
    heads, _, _, softcap, sinks = call
    keys = cache.keys
    values = cache.values
    samples = rows.samples
    positions = rows.positions
    groups = heads.groups
    slots = cache.slots
    fits = heads.head_size % HEAD_MULTIPLE == heads.value_size % HEAD_MULTIPLE == 0
    if ops.is_native("attention") and fits and softcap is None and sinks is None:
        out = qkv.new_empty(len(qkv), heads.context_width)
        tensors = as_rows(qkv), keys, values, samples, positions, out
        ops.kernels.attention_decode(*tensors, heads.scale)
        return out.unsqueeze(1)
    context = []
    by_group = qkv.view(len(qkv), groups, -1)
    of_queries = heads.queries_per_group * heads.head_size
    for new, sample, position in zip(by_group, samples.tolist(), positions.tolist(), strict=True):
        query = new[:, :of_queries].unflatten(1, (-1, heads.head_size))  # (g, n / g, d)
        keys[sample, :, position % slots] = new[:, of_queries:][:, : heads.head_size]
        if not cache.has_latents:
            values[sample, :, position % slots] = new[:, -heads.value_size :]
        stored = slice(sample, sample + 1), slice(None), slice(min(position + 1, slots))
        # (1, g, n / g, d): a group's queries are the rows of attention, so that nothing is repeated.
        queries = query.unsqueeze(0)
        if softcap is None and sinks is None:
            context.append(
                F.scaled_dot_product_attention(
                    queries, keys[stored], values[stored], scale=heads.scale
                )
            )
            continue
        scores = queries.float() @ keys[stored].float().mT * heads.score_scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if sinks is not None:
            scores = torch.cat((scores, sinks.values.view(1, groups, -1, 1)), -1)
        probabilities = torch.softmax(scores, -1)[..., : keys[stored].shape[2]]
        context.append((probabilities @ values[stored].float()).to(qkv.dtype))
    return torch.cat(context).view(len(qkv), 1, -1)
