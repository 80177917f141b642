"""Queries, keys and values of latent attention in the layout of attention's kernels, rotated.

n heads of this rank, d elements of a query or key, of which the last r are rotated, v elements of a value.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...comm.autograd import Gradients, apply_conjugates
from ..attention.heads import Heads
from .backend import Backend
from .rotary import Rotary, rotate


def rotate_parts(
    ops: Backend, call: Rotary, by_head: Tensor, shared: Tensor, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the last elements of queries (s, b, n, r) and the shared key (s, b, r), or back."""
    if call.angles is None:
        return by_head, shared
    unrotated = shared.unsqueeze(2)  # the kernels expect a value, too
    stacked = torch.cat((by_head, unrotated, unrotated), 2)
    rotated = rotate(ops, stacked.flatten(2), call, inverse).view_as(stacked)
    heads = by_head.shape[2]
    return rotated[:, :, :heads], rotated[:, :, heads]


def latent_qkv(
    ops: Backend,
    queries: Tensor,
    keys_values: Tensor,
    shared_key: Tensor,
    heads: Heads,
    call: Rotary,
) -> Tensor:
    """Return qkv (s, b, n (2 d + v)) as `Heads` describes it.

    queries: (s, b, n d)
    keys_values: (s, b, n (d - r + v)), for each head the elements of its key that are not rotated, and its value
    shared_key: (s, b, r), the rotated elements of every head's key
    call: the rotation of n queries and a key of r elements
    """
    s, b, r = shared_key.shape
    n = heads.heads
    fixed = heads.head_size - r
    turn = partial(rotate_parts, ops, call)

    def forward(queries: Tensor, keys_values: Tensor, shared_key: Tensor) -> Tensor:
        qkv = queries.new_empty(s, b, heads.qkv_width)
        query, key, value = (part.squeeze(3) for part in heads.split(qkv))
        of_queries = queries.view(s, b, n, -1)
        rotated, shared = turn(of_queries[..., fixed:], shared_key, inverse=False)
        query[..., :fixed] = of_queries[..., :fixed]
        query[..., fixed:] = rotated
        of_keys, of_values = keys_values.view(s, b, n, -1).split((fixed, heads.value_size), 3)
        key[..., :fixed] = of_keys
        key[..., fixed:] = shared.unsqueeze(2)
        value.copy_(of_values)
        return qkv

    def backward(dqkv: Tensor) -> Gradients:
        query, key, value = (part.squeeze(3) for part in heads.split(dqkv))
        rotated, shared = turn(query[..., fixed:], key[..., fixed:].sum(2), inverse=True)
        dqueries = torch.cat((query[..., :fixed], rotated), 3)
        dkeys_values = torch.cat((key[..., :fixed], value), 3)
        return dqueries.flatten(2), dkeys_values.flatten(2), shared.contiguous()

    return apply_conjugates(forward, backward, queries, keys_values, shared_key)
