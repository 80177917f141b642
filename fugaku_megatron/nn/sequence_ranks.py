"""Context parallelism: ranks that share each sequence.

Rank i of c has the parts i and 2c - 1 - i of the 2c equal parts of a sequence, as in Megatron-LM, where causal attention then takes
all ranks the same time. For attention they exchange keys and values (`shared_attention`), or heads: each gets the whole sequence of
1/c of the heads, in its order, and sends the result back. Then attention is that of one rank, with its windows, documents and
dropout. Where ranks outnumber query groups, each has a part of one group's queries, and a copy of its key and value. Source: Jacobs
et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
Legend: s sequence, c ranks, r = s / c rows of a rank, b micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..comm.base import Comm
from ..comm.exchange import Exchange, map_rows
from ..costs.activations import rank_segments, segment_numbers
from .heads import Heads


def own_runs(r: int, cp: Comm) -> list[range]:
    """Return the segments of this rank, which has r rows."""
    return rank_segments(cp.rank, cp.size, r * cp.size)


def positions(runs: Sequence[range]) -> Tensor:
    """Return the positions (r,) of all segments."""
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def _order(ranks: int) -> list[int]:
    """Return the segments of the sequence in rank order."""
    return [part for rank in range(ranks) for part in segment_numbers(rank, ranks)]


def to_sequence_order(x: Tensor, ranks: int) -> Tensor:
    """Permute x (s, ...) from rank order to sequence order."""
    parts = x.contiguous().view(2 * ranks, -1, *x.shape[1:])
    whole = torch.empty_like(parts)
    whole[_order(ranks)] = parts
    return whole.view(x.shape)


def to_rank_order(x: Tensor, ranks: int) -> Tensor:
    """Permute x (s, ...) from sequence order to rank order."""
    return x.contiguous().view(2 * ranks, -1, *x.shape[1:])[_order(ranks)].view(x.shape)


def _exchanged(x: Tensor, cp: Comm) -> Tensor:
    """Send r rows of x (c r, b, w) to each rank, and return r rows from each."""
    rows = [len(x) // cp.size] * cp.size
    return Exchange(cp, rows, rows).send(x)


def _to_heads(x: Tensor, cp: Comm) -> Tensor:
    r, b, width = x.shape
    sent = (
        x.reshape(r, b, cp.size, width // cp.size).permute(2, 0, 1, 3).reshape(cp.size * r, b, -1)
    )
    return to_sequence_order(_exchanged(sent, cp), cp.size)


def _to_rows(x: Tensor, cp: Comm) -> Tensor:
    s, b, width = x.shape
    received = _exchanged(to_rank_order(x, cp.size), cp).view(cp.size, s // cp.size, b, width)
    return received.permute(1, 2, 0, 3).reshape(s // cp.size, b, cp.size * width)


def copy_groups(qkv: Tensor, heads: Heads, copies: int) -> Tensor:
    """qkv (r, b, g (n/g + 2) d) -> (r, b, g copies (n/g/copies + 2) d): each group `copies` times with a part of its queries.

    The gradients of a key and a value are the sums over their copies.
    """
    if copies == 1:
        return qkv
    queries, *others = heads.split(qkv)
    parts = (
        queries.unflatten(3, (copies, -1)),
        *(x.unsqueeze(3).expand(*x.shape[:3], copies, *x.shape[3:]) for x in others),
    )
    return torch.cat(parts, 4).flatten(2)


def to_heads(x: Tensor, cp: Comm) -> Tensor:
    """Exchange this rank's rows of all heads (r, b, w) for the whole sequence of its heads (s, b, w / c)."""
    return (
        x
        if cp.size == 1
        else map_rows(x, lambda rows: _to_heads(rows, cp), lambda grad: _to_rows(grad, cp))
    )


def to_rows(x: Tensor, cp: Comm) -> Tensor:
    """Exchange the whole sequence of this rank's heads (s, b, w / c) for its rows of all heads (r, b, w)."""
    return (
        x
        if cp.size == 1
        else map_rows(x, lambda rows: _to_rows(rows, cp), lambda grad: _to_heads(grad, cp))
    )
