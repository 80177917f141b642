"""Repetition of the previous rank's AdamW update on copies of its inputs, for state that no other rank has (`--audit-interval`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.base import Comm
from ..config.optimizer import MOMENTS
from ..host.other_cores import other_cores
from .bits import block_elements, block_sums
from .buckets import BucketShard, StepFactors
from .optimizer import Optimizer
from .seals import portion

PARTS = 16  # audits that repeat the update of every element


class _Segment(NamedTuple):
    """Elements `at` of a rank's shard of a bucket. start: of the segment in the flat buffer"""

    bucket: int
    start: int
    at: slice

    @property
    def length(self) -> int:
        return int(self.at.stop - self.at.start)


class _Copy(NamedTuple):
    """State and gradients of the previous rank's segment before its update."""

    shard: BucketShard
    grads: Tensor


class Finding(NamedTuple):
    """An update with different results on two ranks. expert: of divided experts"""

    text: str
    expert: bool


class UpdateAudit:
    """One of PARTS parts of an update, computed twice.

    part: in the next update; None: no part
    found: a difference in the last audited update of this rank
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.part: int | None = None
        self.found: Finding | None = None
        optimizer.around_update = self._begin

    def _begin(self, grads: list[Tensor], factors: StepFactors) -> Callable[[], None]:
        """Exchange an update's inputs, and return the work for after the update. Both are collective."""
        part = self.part
        if part is None:
            return _nothing
        self.part = None
        own = [self._segment(index, part, before=0) for index in self._audited()]
        copies = [self._exchange(each, grads[each.bucket], part) for each in own]

        def finish() -> None:
            self.found = None
            for segment, copy in zip(own, copies, strict=True):
                self._compare(segment, copy, factors)

        return finish

    def _audited(self) -> Iterator[int]:
        """Yield the buckets with state on this rank alone, unless it is in eight bits or has BF16 weights."""
        optimizer = self._optimizer
        for index, shard in enumerate(optimizer.shards):
            alone = optimizer.sharded or self._replicas(index).size == 1
            if alone and not shard.adamw_blocks:
                yield index

    def _replicas(self, index: int) -> Comm:
        return self._optimizer.buckets.replicas(self._optimizer.flat.buckets[index])

    def _segment(self, index: int, part: int, before: int) -> _Segment:
        """Return the part of the shard of the rank `before` ranks before this one."""
        flat = self._optimizer.flat
        bucket = flat.buckets[index]
        replicas = self._replicas(index)
        length = (bucket.end - bucket.start) // replicas.size
        start = bucket.start + (replicas.rank - before) % replicas.size * length
        ranges = flat.ranges(start, start + length)
        orthogonal = max((r.end for r in ranges if r.orthogonal), default=0)
        inside = portion(length - orthogonal, part, PARTS)
        at = slice(orthogonal + inside.start, orthogonal + inside.stop)
        return _Segment(index, start + at.start, at)

    def _exchange(self, segment: _Segment, grads: Tensor, part: int) -> _Copy:
        """Send a segment's state and gradients to the next rank; return the previous rank's."""
        optimizer = self._optimizer
        shard = optimizer.shards[segment.bucket]
        replicas = self._replicas(segment.bucket)
        received = self._segment(segment.bucket, part, before=1)
        sent = [grads[segment.at], *_state(shard, segment.at).values()]
        states = [True, True, *(moment in optimizer.config.states for moment in MOMENTS)]
        copies = [
            x.new_empty(received.length if exists else 0)
            for x, exists in zip(sent, states, strict=True)
        ]
        for x, copy in zip(sent, copies, strict=True):
            _pass_on(replicas, x, copy, to=1)
        copied_grads, master, exp_avg, exp_avg_sq = copies
        model_weights = None
        if shard.model_weights is not None:
            model_weights = shard.model_weights.new_zeros(received.length)  # padding, too
        end = received.start + received.length
        copied = BucketShard(
            received.start,
            master=master,
            model_weights=model_weights,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            eight_bit=None,
            orthogonal=0,
            ranges=optimizer.flat.ranges(received.start, end),
            updates=optimizer.updates_of(received.start, end),
        )
        return _Copy(copied, copied_grads)

    def _compare(self, segment: _Segment, copy: _Copy, factors: StepFactors) -> None:
        """Repeat the copy's update, and compare this rank's update with the next rank's repetition."""
        optimizer = self._optimizer
        replicas = self._replicas(segment.bucket)
        with other_cores(replicas.size == 1):
            optimizer.update_elements(copy.shard, copy.grads, factors)
        whole = slice(0, len(copy.shard.master))
        repeated = torch.cat([block_sums(x) for x in _updated(copy.shard, whole).values()])
        updated = _updated(optimizer.shards[segment.bucket], segment.at)
        own = torch.cat([block_sums(x) for x in updated.values()])
        others = torch.empty_like(own)
        _pass_on(replicas, repeated, others, to=-1)
        if self.found is None and not torch.equal(own, others):
            text = self._describe(segment, updated, others)
            self.found = Finding(text, optimizer.flat.buckets[segment.bucket].expert)

    def _describe(self, segment: _Segment, updated: dict[str, Tensor], others: Tensor) -> str:
        """Name the first state that differs, and the parameters in the block."""
        for kind, x in updated.items():
            own = block_sums(x)
            changed = (own != others[: len(own)]).nonzero()
            others = others[len(own) :]
            if len(changed):
                first = segment.start + int(changed[0]) * block_elements(x)
                overlaps = self._optimizer.flat.overlaps(first, first + block_elements(x))
                names = [parameter.spec.name for parameter, *_ in overlaps]
                return f"the updated {kind} of {' or '.join(names)}"
        raise AssertionError("a difference was found")


def _nothing() -> None:
    pass


def _pass_on(comm: Comm, tensor: Tensor, received: Tensor, to: int) -> None:
    """Send `tensor` to the rank `to` ranks after this one, and receive from the one as far before it."""
    if comm.size == 1:
        received.copy_(tensor)
        return
    sending = comm.isend(tensor.contiguous(), (comm.rank + to) % comm.size)
    comm.recv(received, (comm.rank - to) % comm.size)
    sending.wait()


def _state(shard: BucketShard, at: slice) -> dict[str, Tensor]:
    """Return views of master weights and moments of elements `at`, behind the matrices of Muon."""
    after = slice(at.start - shard.orthogonal, at.stop - shard.orthogonal)
    return {
        "master weight": shard.master[at],
        "exp_avg": shard.exp_avg[at],
        "exp_avg_sq": shard.exp_avg_sq[after],
    }


def _updated(shard: BucketShard, at: slice) -> dict[str, Tensor]:
    """Return views of all that an update writes."""
    updated = _state(shard, at)
    if shard.model_weights is not None:
        updated["weight"] = shard.model_weights[at]
    return updated
