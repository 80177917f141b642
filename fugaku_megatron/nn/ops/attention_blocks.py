"""Attention of a block of queries to a block of keys, for ranks that share a sequence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..attention.context_parallel import AttentionGradients, Block, Result, SharedCall
from ..dropout_key import Dropout
from .backend import Backend
from .dropout import dropout


def attend_block(
    ops: Backend, call: SharedCall, block: Block, qkv: Tensor, kv: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (context (q, b, n v), log of the softmax sums (b, n, q)) of a block.

    kv: (k, b, g (d + v))
    """
    heads = call.heads
    q, b, _ = qkv.shape
    if ops.is_native("attention") and call.softcap is None:
        out = qkv.new_empty(q, b, heads.context_width)
        lse = qkv.new_empty(b, heads.heads, q, dtype=torch.float32)
        arguments = _block_arguments(call, block)
        ops.kernels.attention_part_forward(qkv, kv, out, lse, *arguments, **heads.options)
        return out, lse
    scores, *_, values = _block_scores(call, block, qkv, kv)
    lse = torch.logsumexp(scores, -1)
    probabilities = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
    out = (probabilities * _block_dropout(ops, call, block, len(scores))) @ values
    return out.permute(2, 0, 1, 3).flatten(2).to(qkv.dtype), lse


def attend_to_earlier(ops: Backend, qkv: Tensor, kv: Tensor, call: SharedCall) -> Tensor:
    """Attend from the last tokens of a sequence to all its tokens, qkv (s, b, ...) -> (s, b, n v). Nothing is saved.

    kv: keys and values of the whole sequence, (k, b, g (d + v))
    """
    length = len(kv)
    rows = slice(0, len(qkv))
    call = call._replace(mask=replace(call.mask, length=length))
    block = Block(rows, range(length - len(qkv), length), range(length))
    result = Result(len(qkv), qkv.shape[1], call)
    result.merge(rows, *attend_block(ops, call, block, qkv, kv))
    return result.total.flatten(2).to(qkv.dtype)


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
        tensors = qkv, kv, out, lse, dout, dqkv, dkv
        arguments = _block_arguments(call, block)
        ops.kernels.attention_part_backward(*tensors, *arguments, **call.heads.options)
        return
    heads = call.heads
    scores, queries, keys, values = _block_scores(call, block, qkv, kv)
    grad, context = (
        x.float().unflatten(2, (heads.heads, -1)).permute(1, 2, 0, 3) for x in (dout, out)
    )  # (b, n, q, v)
    probabilities = torch.exp(scores - lse.unsqueeze(-1))
    mask = _block_dropout(ops, call, block, len(scores))
    delta = (grad * context).sum(-1, keepdim=True)
    dscores = probabilities * (grad @ values.mT * mask - delta) * heads.score_scale
    if call.softcap is not None:
        capped = scores.masked_fill(probabilities == 0, 0.0) / call.softcap
        dscores *= 1 - capped.square()
    dqueries = (dscores @ keys).unflatten(1, (heads.groups, -1))
    heads.split(dqkv)[0].add_(dqueries.permute(3, 0, 1, 2, 4))  # (q, b, g, n/g, d)
    dkeys = dscores.mT @ queries
    dvalues = (probabilities * mask).mT @ grad
    for total, part in zip(heads.split_keys(dkv), (dkeys, dvalues), strict=True):
        total.add_(
            part.unflatten(1, (heads.groups, -1)).sum(2).permute(2, 0, 1, 3)
        )  # (k, b, g, ...)


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
    keys, values = (
        part.permute(1, 2, 0, 3).repeat_interleave(heads.queries_per_group, 1).float()
        for part in heads.split_keys(kv)
    )  # (b, n, k, d or v)
    query = torch.arange(block.queries.start, block.queries.stop)
    key = torch.arange(block.keys.start, block.keys.stop)
    distance = query.unsqueeze(1) - key
    visible = (distance >= 0) & (distance < (mask.window or mask.length))
    visible = visible.expand(qkv.shape[1], -1, -1)
    if mask.starts is not None:
        visible = visible & (key >= mask.starts[:, query].unsqueeze(-1))
    scores = (queries @ keys.mT) * heads.score_scale
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
