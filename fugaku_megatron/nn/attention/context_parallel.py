"""Context parallelism: ranks that share each sequence.

Rank i of c has segments i and 2c - 1 - i of 2c, as in Megatron-LM. Ranks exchange heads, and each rank gets the whole sequence
for 1/c of the heads (Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509), or keys and values. If ranks outnumber query
groups, each has some queries of one group and a copy of its key and value.
c ranks, r = s / c rows of a rank, g key heads and n query heads of this rank, q queries and k keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.all_to_all import AllToAll
from ...comm.autograd import SavedResult, apply_conjugates, apply_saving
from ...comm.base import DONE, Comm, Handle
from ...config.parallel import ALLGATHER
from ...costs.context_parallel import rank_segments, segment_numbers, span, visible_keys
from ..dropout_key import Dropout
from .heads import Heads
from .sinks import Sinks


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


# Attention by exchange of keys and values; each rank computes its own queries.
#
#     allgather   all ranks gather all keys and values; their gradients are reduce-scattered
#     p2p         step t: receive from rank - t and send to rank + t while computing step t - 1; partial results are merged by
#                 log-sum-exp (Liu et al. 2023, "Ring Attention", arXiv:2310.01889); key and value gradients are sent back
#
# Invisible keys are neither computed nor, in p2p, sent; keys therefore go to each rank directly, not in a ring.

# Message tags for a rank's first segment; the second segment's are one more.
KEYS = 0
GRADIENTS = 2


@dataclass(frozen=True)
class AttentionMask:
    """Visible pairs of a causal sequence. starts: see `PackedDocuments`."""

    length: int
    window: int | None = None
    starts: Tensor | None = None

    def visible(self, queries: range, keys: range) -> tuple[range, range] | None:
        """Return the smallest ranges of queries and keys that contain every visible pair, or None."""
        seen = visible_keys(queries, keys, self.window)
        first = seen.start
        end = seen.stop
        if self.starts is not None:
            first = max(first, int(self.starts[:, queries.start].min()))
        if first >= end:
            return None
        last = min(queries.stop, end - 1 + (self.window or self.length))
        if self.starts is not None:  # the queries of the documents that begin before the last key
            starts = self.starts[:, queries.start : last].contiguous()
            last = queries.start + int(
                torch.searchsorted(
                    starts, starts.new_full((len(starts), 1), end - 1), right=True
                ).max()
            )
        return range(max(queries.start, first), last), range(first, end)


class SharedCall(NamedTuple):
    """Arguments of attention that all blocks of a context-parallel call share."""

    heads: Heads
    mask: AttentionMask
    dropped: Dropout
    softcap: float | None = None
    sinks: Sinks | None = None


class Block(NamedTuple):
    """A block of queries and keys. rows: rows of the queries on this rank."""

    rows: slice
    queries: range
    keys: range


def visible_blocks(mask: AttentionMask, queries: list[range], keys: range) -> Iterator[Block]:
    row = 0
    for segment in queries:
        if visible := mask.visible(segment, keys):
            first = row + visible[0].start - segment.start
            yield Block(slice(first, first + len(visible[0])), *visible)
        row += len(segment)


class Result:
    """Attention of r queries to the keys so far: total (r, b, n, v) in FP32, log of the softmax sums lse (b, n, r)."""

    def __init__(self, r: int, b: int, call: SharedCall) -> None:
        heads = call.heads
        self.total = torch.zeros(r, b, heads.heads, heads.value_size)
        self.lse = torch.full((b, heads.heads, r), -torch.inf)
        if call.sinks is not None:
            self.lse.copy_(call.sinks.values.unsqueeze(1))

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of `rows` to further keys: out (q, b, n v), lse (b, n, q)."""
        before = self.lse[..., rows]
        total = self.total[rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == -torch.inf, 0.0)  # of queries that have seen nothing
        old, new = (
            torch.exp(x - base).permute(2, 0, 1).unsqueeze(-1) for x in (before, lse)
        )  # (q, b, n, 1)
        total.mul_(old).add_(out.view_as(total) * new)
        before.copy_(after)


class AttentionGradients(NamedTuple):
    """Attention of queries to all keys, out and lse as from `attend_block`, and its gradients.

    dqkv: in FP32, accumulated over blocks.
    """

    qkv: Tensor
    out: Tensor
    lse: Tensor
    dout: Tensor
    dqkv: Tensor

    def of_rows(self, rows: slice) -> AttentionGradients:
        lse = self.lse[..., rows].contiguous()
        return AttentionGradients(
            self.qkv[rows], self.out[rows], lse, self.dout[rows], self.dqkv[rows]
        )


AddGradients = Callable[[Block, Tensor, Tensor], None]  # block, kv, dkv


def keys_of(qkv: Tensor, heads: Heads) -> Tensor:
    """Return a view (r, b, g, d + v) of the keys and values in qkv."""
    slots = qkv.view(*qkv.shape[:2], heads.groups, -1)
    return slots[..., -heads.head_size - heads.value_size :]


def _places(block: Block, first: int) -> slice:
    return slice(block.keys.start - first, block.keys.stop - first)


class _Gathered:
    """Allgather: kv (r, b, g (d + v)) of all ranks at once."""

    def __init__(self, cp: Comm, call: SharedCall, kv: Tensor) -> None:
        self._cp = cp
        self._own = kv
        whole = cp.all_gather(kv.new_empty(cp.size, *kv.shape), kv)
        self._whole = to_sequence_order(whole.flatten(0, 1), cp.size)
        length = call.mask.length
        segments = rank_segments(cp.rank, cp.size, length)
        self._blocks = list(visible_blocks(call.mask, segments, range(length)))

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        for block in self._blocks:
            yield block, self._whole[_places(block, 0)]

    def gradients(self, add: AddGradients) -> Tensor:
        dkv = torch.zeros(self._whole.shape)
        for block, kv in self:
            add(block, kv, dkv[_places(block, 0)])
        return self._cp.reduce_scatter(
            torch.empty(self._own.shape), to_rank_order(dkv, self._cp.size)
        )


class _InFlight(NamedTuple):
    """Keys in flight; kv (k, b, g (d + v)) is valid after `handle.wait()`."""

    keys: range
    kv: Tensor
    handle: Handle


class _Passed:
    """P2P: kv (r, b, g (d + v)) of one rank after another."""

    def __init__(self, cp: Comm, call: SharedCall, kv: Tensor) -> None:
        self._cp = cp
        self._call = call
        self._own = kv
        self._sent = list[Handle]()
        self._segments = [rank_segments(rank, cp.size, call.mask.length) for rank in range(cp.size)]

    def _needed(self, rank: int, source: int) -> list[range]:
        """Return the keys of each of a source's segments that a rank's queries see."""
        mask = self._call.mask
        queries = self._segments[rank]
        return [
            span(block.keys for block in visible_blocks(mask, queries, keys))
            for keys in self._segments[source]
        ]

    def _rows(self, segment: int, keys: range) -> slice:
        own = self._segments[self._cp.rank][segment]
        first = segment * len(own) + keys.start - own.start
        return slice(first, first + len(keys))

    def _step(self, step: int) -> list[_InFlight]:
        cp = self._cp
        size = self._cp.size
        if step == 0:
            return [
                _InFlight(segment, self._own[self._rows(number, segment)], DONE)
                for number, segment in enumerate(self._segments[cp.rank])
            ]
        source = (cp.rank - step) % size
        target = (cp.rank + step) % size
        coming = []
        for number, keys in enumerate(self._needed(cp.rank, source)):
            tensor = self._own.new_empty(len(keys), *self._own.shape[1:])
            handle = cp.irecv(tensor, source, KEYS + number) if keys else DONE
            coming.append(_InFlight(keys, tensor, handle))
        for number, keys in enumerate(self._needed(target, cp.rank)):
            if keys:
                rows = self._rows(number, keys)
                self._sent.append(cp.isend(self._own[rows], target, KEYS + number))
        return coming

    def _steps(self) -> Iterator[tuple[int, list[_InFlight]]]:
        """Yield each step's keys, after starting the next exchange."""
        after = self._step(0)
        for step in range(self._cp.size):
            coming = after
            if step + 1 < self._cp.size:
                after = self._step(step + 1)
            yield step, coming

    def _visible_blocks(self, keys: range) -> Iterator[Block]:
        return visible_blocks(self._call.mask, self._segments[self._cp.rank], keys)

    def _all_sent(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent.clear()

    def __iter__(self) -> Iterator[tuple[Block, Tensor]]:
        """Yield blocks with keys and values (k, b, g (d + v)) as they arrive."""
        for _, coming in self._steps():
            for keys, kv, handle in coming:
                handle.wait()
                for block in self._visible_blocks(keys):
                    yield block, kv[_places(block, keys.start)]
        self._all_sent()

    def gradients(self, add: AddGradients) -> Tensor:
        """Return the FP32 gradient of kv (r, b, g (d + v)), in step order; blocks of own keys seen by the other own segment are last."""
        cp = self._cp
        total = torch.zeros(self._own.shape)
        returning: list[tuple[slice, Tensor, Handle]] = []
        last: list[partial[None]] = []
        for step, coming in self._steps():
            source = (cp.rank - step) % cp.size
            target = (cp.rank + step) % cp.size
            for number, keys in enumerate(self._needed(target, cp.rank) if step else ()):
                if keys:
                    tensor = torch.empty(len(keys), *total.shape[1:])
                    handle = cp.irecv(tensor, target, GRADIENTS + number)
                    returning.append((self._rows(number, keys), tensor, handle))
            for number, (keys, kv, handle) in enumerate(coming):
                handle.wait()
                dkv = torch.zeros(kv.shape) if step else total[self._rows(number, keys)]
                for block in self._visible_blocks(keys):
                    places = _places(block, keys.start)
                    work = partial(add, block, kv[places], dkv[places])
                    if step or block.queries.start < keys.stop:
                        work()
                    else:
                        last.append(work)
                if step and keys:
                    self._sent.append(cp.isend(dkv, source, GRADIENTS + number))
        for work in last:
            work()
        for rows, tensor, handle in returning:
            handle.wait()
            total[rows] += tensor
        self._all_sent()
        return total


def shared_attention(
    ops: Any, qkv: Tensor, call: SharedCall, cp: Comm, cp_comm_type: str
) -> Tensor:
    """Return causal attention of this rank's rows, qkv -> (r, b, n v). cp_comm_type: p2p or allgather."""
    heads = call.heads
    exchange = _Gathered if cp_comm_type == ALLGATHER else _Passed

    def forward() -> SavedResult:
        rows = qkv.contiguous()
        result = Result(len(rows), rows.shape[1], call)
        for block, kv in exchange(cp, call, keys_of(rows, heads).flatten(2).contiguous()):
            result.merge(block.rows, *ops.attend_block(call, block, rows[block.rows], kv))
        out = result.total.flatten(2).to(rows.dtype)
        return out, (rows, out, result.lse)

    def backward(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        if call.sinks is not None:
            call.sinks.backward(out, lse, dout)
        whole = AttentionGradients(qkv, out, lse, dout.contiguous(), torch.zeros(qkv.shape))

        def add(block: Block, kv: Tensor, dkv: Tensor) -> None:
            ops.add_block_gradients(call, block, whole.of_rows(block.rows), kv, dkv)

        dkv = exchange(cp, call, keys_of(qkv, heads).flatten(2).contiguous()).gradients(add)
        keys_of(whole.dqkv, heads).copy_(dkv.unflatten(2, (heads.groups, -1)))
        return whole.dqkv.to(qkv.dtype)

    return apply_saving(forward, backward, qkv)
