"""Context parallelism: ranks that share each sequence.

Rank i of c has segments i and 2c - 1 - i of 2c, as in Megatron-LM. Ranks exchange keys and values (`shared_attention`), or heads:
each rank gets the whole sequence for 1/c of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509). If ranks
outnumber query groups, each has some queries of one group and a copy of its key and value.
c ranks, r = s / c rows of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...comm.all_to_all import AllToAll
from ...comm.autograd import apply_conjugates
from ...comm.base import Comm
from ...costs.context_parallel import rank_segments, segment_numbers
from .heads import Heads


def own_segments(r: int, cp: Comm) -> list[range]:
    return rank_segments(cp.rank, cp.size, r * cp.size)


def positions(segments: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(each.start, each.stop) for each in segments])


def _order(ranks: int) -> list[int]:
    return [number for rank in range(ranks) for number in segment_numbers(rank, ranks)]


def to_sequence_order(x: Tensor, ranks: int) -> Tensor:
    """Permute x (s, ...) from rank order to sequence order."""
    segments = x.contiguous().view(2 * ranks, -1, *x.shape[1:])
    whole = torch.empty_like(segments)
    whole[_order(ranks)] = segments
    return whole.view(x.shape)


def to_rank_order(x: Tensor, ranks: int) -> Tensor:
    """Invert `to_sequence_order`."""
    return x.contiguous().view(2 * ranks, -1, *x.shape[1:])[_order(ranks)].view(x.shape)


def _exchanged(x: Tensor, cp: Comm) -> Tensor:
    """Exchange r rows of x (c r, b, w) with each rank."""
    rows = [len(x) // cp.size for _ in range(cp.size)]
    return AllToAll(cp, rows, rows).send(x)


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
    """Repeat each query group's key and value, and split its queries; key and value gradients are summed over copies.

    qkv -> (r, b, g copies (n/g/copies + 2) d)
    """
    if copies == 1:
        return qkv
    queries, *others = heads.split(qkv)
    copied = [x.unsqueeze(3).expand(*x.shape[:3], copies, *x.shape[3:]) for x in others]
    return torch.cat((queries.unflatten(3, (copies, -1)), *copied), 4).flatten(2)


def to_heads(x: Tensor, cp: Comm) -> Tensor:
    """Exchange rows of all heads (r, b, w) for the whole sequence of own heads (s, b, w / c)."""
    if cp.size == 1:
        return x
    return apply_conjugates(lambda rows: _to_heads(rows, cp), lambda grad: _to_rows(grad, cp), x)


def to_rows(x: Tensor, cp: Comm) -> Tensor:
    """Invert `to_heads`: (s, b, w / c) -> (r, b, w)."""
    if cp.size == 1:
        return x
    return apply_conjugates(lambda rows: _to_rows(rows, cp), lambda grad: _to_heads(grad, cp), x)
