"""Attention of ranks that share each sequence, by its keys and values: each rank computes the rows of its own queries.

    allgather   every rank gathers the keys and values of all; the gradients of both are reduce-scattered
    p2p         in step t a rank gets them from the rank t before it, and sends its own to the rank t after it, while it computes
                attention to those of step t - 1; partial results are merged by the logarithms of their sums (Liu et al. 2023, "Ring
                Attention", arXiv:2310.01889). In backward the gradients of keys and values go back to the rank that has them.

Keys that no query of a rank sees, because they come later, or lie outside a window or in another document, are not computed. In p2p
they are not sent either: for that reason keys go straight to each rank, and not around a ring. Left out: the exchange of heads
(`sequence_ranks`), and the kernels, which are the backend's.
Legend: s sequence, c ranks, r = s / c rows of a rank, b micro-batch, g key heads and n query heads of this rank, d head size,
q queries and k keys of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.base import DONE, Comm, Handle
from ..config.parallel import ALLGATHER
from ..costs.activations import rank_segments, span, visible_keys
from .dropout_key import DropoutKey
from .heads import Heads
from .sequence_ranks import to_rank_order, to_sequence_order

# Message tags for a rank's first segment; the second segment's are one more.
KEYS = 0
GRADIENTS = 2


@dataclass(frozen=True)
class AttentionMask:
    """Visible pairs of a causal sequence. starts: int32 (b, s), first position of each token's document; None: one document."""

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
    """Arguments shared by all blocks of an attention call. dropout: probability."""

    heads: Heads
    mask: AttentionMask
    dropout: float
    key: DropoutKey


class Part(NamedTuple):
    """A block of queries and keys. rows: rows of the queries on this rank."""

    rows: slice
    queries: range
    keys: range


def parts(mask: AttentionMask, queries: list[range], keys: range) -> Iterator[Part]:
    """Yield the blocks with visible pairs of a rank's segments of queries and the keys."""
    row = 0
    for run in queries:
        if seen := mask.visible(run, keys):
            first = row + seen[0].start - run.start
            yield Part(slice(first, first + len(seen[0])), *seen)
        row += len(run)


def needed(mask: AttentionMask, queries: list[range], keys: range) -> range:
    """Return the keys that a rank with these queries needs."""
    return span(part.keys for part in parts(mask, queries, keys))


class Result:
    """Attention of r queries to the keys so far: total (r, b, n, d) in FP32, log of the softmax sums lse (b, n, r)."""

    def __init__(self, r: int, b: int, heads: Heads) -> None:
        self.total = torch.zeros(r, b, heads.heads, heads.head_size)
        self.lse = torch.full((b, heads.heads, r), -torch.inf)

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of `rows` to further keys: out (q, b, n d), lse (b, n, q)."""
        before = self.lse[..., rows]
        total = self.total[rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == -torch.inf, 0.0)  # of queries that have seen nothing
        old, new = (
            torch.exp(x - base).permute(2, 0, 1).unsqueeze(-1) for x in (before, lse)
        )  # (q, b, n, 1)
        total.mul_(old).add_(out.view_as(total) * new)
        before.copy_(after)


class _Gradients:
    """Query gradients of this rank, accumulated over blocks in dqkv (r, b, g (n/g + 2) d)."""

    def __init__(
        self, ops: Any, call: SharedCall, qkv: Tensor, out: Tensor, lse: Tensor, dout: Tensor
    ) -> None:
        self._ops = ops
        self._call = call
        self._tensors = (qkv, out, dout)
        self._lse = lse
        self.dqkv = torch.zeros(qkv.shape)

    def add(self, part: Part, kv: Tensor, dkv: Tensor) -> None:
        """Add a block's gradients. kv and dkv (k, b, 2 g d): keys and values of the block."""
        qkv, out, dout = (tensor[part.rows] for tensor in self._tensors)
        lse = self._lse[..., part.rows].contiguous()
        self._ops.add_block_gradients(
            self._call, part, qkv, kv, out, lse, dout, self.dqkv[part.rows], dkv
        )


def keys_of(qkv: Tensor, heads: Heads) -> Tensor:
    """Return a view of the keys and values (r, b, g, 2, d) in qkv (r, b, g (n/g + 2) d)."""
    return qkv.view(*qkv.shape[:2], heads.groups, -1, heads.head_size)[:, :, :, -2:]


def _places(part: Part, first: int) -> slice:
    """Return the index of the block's keys in a tensor that begins with key `first`."""
    return slice(part.keys.start - first, part.keys.stop - first)


class _Gathered:
    """allgather: kv (r, b, 2 g d) of every rank at once."""

    def __init__(self, cp: Comm, call: SharedCall, kv: Tensor) -> None:
        self._cp = cp
        self._keys = range(call.mask.length)
        self._own = kv
        whole = cp.all_gather(kv.new_empty(cp.size, *kv.shape), kv)
        self._whole = to_sequence_order(whole.flatten(0, 1), cp.size)
        self._parts = list(
            parts(call.mask, rank_segments(cp.rank, cp.size, call.mask.length), self._keys)
        )

    def __iter__(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield each block, and its keys and values (k, b, 2 g d)."""
        for part in self._parts:
            yield part, self._whole[_places(part, 0)]

    def gradients(self, made: _Gradients) -> Tensor:
        """Return the gradient of kv (r, b, 2 g d) in FP32."""
        dkv = torch.zeros(self._whole.shape)
        for part, kv in self:
            made.add(part, kv, dkv[_places(part, 0)])
        return self._cp.reduce_scatter(
            torch.empty(self._own.shape), to_rank_order(dkv, self._cp.size)
        )


class _InFlight(NamedTuple):
    """Keys in flight, with their keys and values (k, b, 2 g d), valid after `handle.wait()`."""

    keys: range
    kv: Tensor
    handle: Handle


class _Passed:
    """p2p: kv (r, b, 2 g d) of one rank after the other."""

    def __init__(self, cp: Comm, call: SharedCall, kv: Tensor) -> None:
        self._cp = cp
        self._call = call
        self._own = kv
        self._sent = list[Handle]()
        self._runs = [rank_segments(rank, cp.size, call.mask.length) for rank in range(cp.size)]

    def _needed(self, rank: int, source: int) -> list[range]:
        """Return the keys of each segment of rank `source` that `rank` needs."""
        return [needed(self._call.mask, self._runs[rank], run) for run in self._runs[source]]

    def _rows(self, part: int, keys: range) -> slice:
        """Return the rows of keys in one of this rank's segments."""
        run = self._runs[self._cp.rank][part]
        first = part * len(run) + keys.start - run.start
        return slice(first, first + len(keys))

    def _step(self, step: int) -> list[_InFlight]:
        """Start the sends and receives of a step."""
        cp = self._cp
        size = self._cp.size
        if step == 0:
            return [
                _InFlight(run, self._own[self._rows(part, run)], DONE)
                for part, run in enumerate(self._runs[cp.rank])
            ]
        source = (cp.rank - step) % size
        target = (cp.rank + step) % size
        coming = []
        for part, keys in enumerate(self._needed(cp.rank, source)):
            tensor = self._own.new_empty(len(keys), *self._own.shape[1:])
            coming.append(
                _InFlight(keys, tensor, cp.irecv(tensor, source, KEYS + part) if keys else DONE)
            )
        for part, each in enumerate(self._needed(target, cp.rank)):
            if each:
                self._sent.append(cp.isend(self._own[self._rows(part, each)], target, KEYS + part))
        return coming

    def _steps(self) -> Iterator[tuple[int, list[_InFlight]]]:
        """Yield each step and its keys, after starting the exchange of the next step."""
        after = self._step(0)
        for step in range(self._cp.size):
            coming = after
            if step + 1 < self._cp.size:
                after = self._step(step + 1)
            yield step, coming

    def _parts(self, keys: range) -> Iterator[Part]:
        return parts(self._call.mask, self._runs[self._cp.rank], keys) if keys else iter(())

    def _all_sent(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent.clear()

    def __iter__(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield each block, and its keys and values (k, b, 2 g d), in the order of arrival."""
        for _, coming in self._steps():
            for keys, kv, handle in coming:
                handle.wait()
                for part in self._parts(keys):
                    yield part, kv[_places(part, keys.start)]
        self._all_sent()

    def gradients(self, made: _Gradients) -> Tensor:
        """The gradient of kv (r, b, 2 g d) in FP32. What other ranks have made of it is added in the order of steps.

        Of this rank's own keys those that its other run sees are last, while the last gradients are on their way.
        """
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
                    returning.append(
                        (
                            self._rows(number, keys),
                            tensor,
                            cp.irecv(tensor, target, GRADIENTS + number),
                        )
                    )
            for number, (keys, kv, handle) in enumerate(coming):
                handle.wait()
                dkv = torch.zeros(kv.shape) if step else total[self._rows(number, keys)]
                for part in self._parts(keys):
                    places = _places(part, keys.start)
                    add = partial(made.add, part, kv[places], dkv[places])
                    if step or part.queries.start < keys.stop:
                        add()
                    else:
                        last.append(add)
                if step and keys:
                    self._sent.append(cp.isend(dkv, source, GRADIENTS + number))
        for add in last:
            add()
        for rows, tensor, handle in returning:
            handle.wait()
            total[rows] += tensor
        self._all_sent()
        return total


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Any, qkv: Tensor, call: SharedCall, cp: Comm, way: str) -> Tensor:
        qkv = qkv.contiguous()
        ctx.ops = ops
        ctx.call = call
        ctx.cp = cp
        ctx.kind = _Gathered if way == ALLGATHER else _Passed
        result = Result(len(qkv), qkv.shape[1], call.heads)
        for part, kv in ctx.kind(cp, call, keys_of(qkv, call.heads).flatten(2).contiguous()):
            result.merge(part.rows, *ops.attend_block(call, part, qkv[part.rows], kv))
        out = result.total.flatten(2).to(qkv.dtype)
        ctx.save_for_backward(qkv, out, result.lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        qkv, out, lse = ctx.saved_tensors
        heads = ctx.call.heads
        made = _Gradients(ctx.ops, ctx.call, qkv, out, lse, dout.contiguous())
        dkv = ctx.kind(ctx.cp, ctx.call, keys_of(qkv, heads).flatten(2).contiguous()).gradients(
            made
        )
        keys_of(made.dqkv, heads).copy_(dkv.view(*dkv.shape[:2], heads.groups, 2, heads.head_size))
        return None, made.dqkv.to(qkv.dtype), None, None, None


def shared_attention(ops: Any, qkv: Tensor, call: SharedCall, cp: Comm, way: str) -> Tensor:
    """Return causal attention of this rank's rows. qkv (r, b, g (n/g + 2) d) -> (r, b, n d). way: "p2p" or "allgather"."""
    return _SharedAttention.apply(ops, qkv, call, cp, way)
