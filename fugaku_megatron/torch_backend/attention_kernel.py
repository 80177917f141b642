"""Attention of queries (b, n, s, d) to keys and values (b, g, k, d) in g groups.

The kernels take heads packed as rows (s, b, g, n / g + 2, d): the queries of a group, its key, its value. If queries and keys have
different positions, keys and values are apart as pairs (k, b, g, 2, d).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..host import kernels
from .kernel_operators import KernelOperator, given, launch, none

Heads = tuple[Tensor, Tensor, Tensor]  # queries, keys, values


class Visible(NamedTuple):
    """Keys that queries attend to, for the kernels.

    first_query: position of the first query; the first key has 0. A query sees no key after its position.
    starts: int32 (b, first_query + s), each position's first position of its document, before which a query sees no key; None: 0.
    window: query i sees only keys after i - window; None: all.
    """

    first_query: int
    starts: Tensor | None = None
    window: int | None = None


def _call(name: str, tensors: Sequence[Tensor], starts: Tensor, numbers: Sequence[float]) -> None:
    """Call a kernel, or its form for pairs if these have elements. tensors: rows, pairs and the others"""
    first_query, window, dropout, seed, _ = numbers
    rows, pairs, *others = (each.flatten(2) if each.dim() > 3 else each for each in tensors)
    options: dict[str, Any] = {"p": dropout, "seed": int(seed), "starts": given(starts)}
    options["window"] = int(window) or None
    if len(pairs):
        positions = (int(first_query) + len(rows), int(first_query), 0)
        launch(f"attention_part_{name}", rows, pairs, *others, *positions, **options)
    else:
        launch(f"attention_{name}", rows, *(each for each in others if len(each)), **options)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    sinks: Tensor,
    numbers: Sequence[float],
) -> list[Tensor]:
    """Return the context (s, b, n, d), the log of sums (b, n, s), rows and pairs."""
    b, n, s, d = query.shape
    g, k = key.shape[1:3]
    rows = query.new_empty(s, b, g, n // g + 2, d)
    pairs = query.new_empty(k if numbers[0] or s != k else 0, b, g, 2, d)
    queries = query.unflatten(1, (g, -1)).permute(3, 0, 1, 2, 4)
    rows[..., :-2, :] = queries if numbers[-1] == 1 else queries * numbers[-1]
    keys = pairs if len(pairs) else rows[..., -2:, :]
    keys[..., 0, :] = key.permute(2, 0, 1, 3)
    keys[..., 1, :] = value.permute(2, 0, 1, 3)
    out = query.new_empty(s, b, n, d)
    lse = query.new_empty(b, n, s, dtype=torch.float32)
    _call("forward", (rows, pairs, out, lse), starts, numbers)
    if len(sinks):
        total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
        out.mul_((lse - total).exp_().permute(2, 0, 1).unsqueeze(-1))
        lse = total
    return [out, lse, rows, pairs]


def _backward(
    tensors: list[Tensor],
    results: list[Tensor],
    gradients: list[Tensor],
    numbers: Sequence[float],
) -> list[Tensor]:
    """Return gradients laid out as (b, s, n, d)."""
    starts, sinks = tensors[3:]
    out, lse, rows, pairs = results
    dout = gradients[0]
    drows = torch.zeros_like(rows, dtype=torch.float32 if len(pairs) else rows.dtype)
    dpairs = torch.zeros_like(pairs, dtype=torch.float32)
    _call("backward", (rows, pairs, out, lse, dout, drows, dpairs), starts, numbers)
    dqueries = drows[..., :-2, :].transpose(0, 1) * numbers[-1]
    dkeys = (dpairs if len(pairs) else drows[..., -2:, :]).transpose(0, 1)
    by_heads = (dqueries.flatten(2, 3), dkeys[..., 0, :], dkeys[..., 1, :])
    dsinks = none()
    if len(sinks):
        along = (dout.float() * out.float()).sum(-1).permute(1, 2, 0)
        dsinks = -(torch.exp(sinks.float().unsqueeze(1) - lse) * along).sum((0, 2)).to(sinks.dtype)
    return [*(x.to(rows.dtype).contiguous().transpose(1, 2) for x in by_heads), none(), dsinks]


ATTENTION = KernelOperator("attention", _forward, _backward)


def attend(
    heads: Heads,
    visible: Visible,
    scale: float,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the context (b, s, n, d). sinks: (n,), a score of each head without a key"""
    seed = int(torch.randint(2**50, ())) if dropout else 0
    # The kernels' own scale is d**-0.5.
    factor = scale * math.sqrt(heads[0].shape[-1])
    numbers = (visible.first_query, visible.window or 0, dropout, seed, factor)
    return ATTENTION(*heads, visible.starts, sinks, numbers=numbers)[0].transpose(0, 1)


def attend_cached(heads: Heads, positions: Tensor, scale: float) -> Tensor:
    """Return the context (b, 1, n, d) of each sample's only query, which sees all keys up to its position. There is no gradient.

    positions: int64 (b,)
    """
    query, keys, values = heads
    b, n, _, d = query.shape
    samples = torch.arange(b)
    queries = query.reshape(b, keys.shape[1], -1, d) * (scale * math.sqrt(d))
    # The kernel stores the last key and value, which are already there.
    last = (each[samples, :, positions].unsqueeze(2) for each in (keys, values))
    rows = torch.cat((queries, *last), 2).view(b, -1)
    out = query.new_empty(b, n * d)
    kernels.attention_decode(rows, keys, values, samples, positions, out)
    return out.view(b, 1, n, d)
