"""Data-parallel communication by bucket: gradients are reduced during backward, weights gathered during forward.

Hooks on the stage's units wait for weight gathers before forward, and start a bucket's reduction after its last backward, in
memory order on all ranks. Each rank updates a shard of every bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.base import DONE, Comm, Handle
from ..comm.grid import Groups
from ..config.run_config import RunConfig
from ..nn.model import Stage
from .flat import Bucket, FlatParameter, FlatParameters, Place, Range, unit_modules
from .int8 import BLOCKS_LENGTH, Blocks, EightBitMoment


@dataclass(frozen=True)
class _Sum:
    """A started sum. sent: (n,), the reduced tensor. result: FP32 gradients (n,), the same memory unless `sent` is BF16."""

    handle: Handle
    sent: Tensor
    result: Tensor

    def wait(self) -> Tensor:
        self.handle.wait()
        if self.sent.dtype != self.result.dtype:
            self.result.copy_(self.sent)
        return self.result


class BucketComm:
    """Gradient sums and weight gathers over data-parallel ranks.

    Without --overlap-grad-reduce, `reduce` starts every sum; without --overlap-param-gather, `gather` blocks. Blocking calls sum with
    all threads of a rank inside a node.
    """

    def __init__(self, stage: Stage, flat: FlatParameters, run: RunConfig, groups: Groups) -> None:
        self.flat = flat
        self.sharded = run.parallel.zero_stage == 1
        self.groups = groups
        self.sent_dtype = torch.bfloat16 if run.parallel.grad_reduce_in_bf16 else torch.float32
        self._tied = next((p for p in flat.parameters if p is stage.tied_copy), None)
        # The unit whose backward completes the tied gradient; none on the first stage.
        self._tied_unit = 0 if stage.last else None
        self._weight_gradients = stage.ops.weight_gradients
        self.overlap_gather = run.parallel.overlap_param_gather
        self._gathers: dict[int, Handle] = {}
        # Called with a bucket's index and local gradients before their sum; index -1: the tied embedding.
        self.before_sum: Callable[[int, Tensor], None] | None = None
        if run.parallel.overlap_grad_reduce:
            self._watch(stage)
        self.begin(0)

    def shard(self, bucket: Bucket) -> tuple[int, int]:
        """Return the elements [start, end) of a bucket that this rank updates."""
        if not self.sharded:
            return bucket.start, bucket.end
        replicas = self.replicas(bucket)
        numel = (bucket.end - bucket.start) // replicas.size
        return bucket.start + replicas.rank * numel, bucket.start + (replicas.rank + 1) * numel

    def replicas(self, bucket: Bucket) -> Comm:
        return self.groups.edp if bucket.expert else self.groups.dp

    # Hooks

    def _watch(self, stage: Stage) -> None:
        modules = unit_modules(stage)
        needed = {
            unit: [index for index, bucket in enumerate(self.flat.buckets) if unit in bucket.units]
            for bucket in self.flat.buckets
            for unit in bucket.units
        }
        if self._tied is not None:
            needed[0 if stage.last else len(modules) - 1].append(len(self.flat.buckets) - 1)
        for unit, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._enter, unit, needed.get(unit, [])))

    def _enter(
        self, unit: int, buckets: list[int], module: nn.Module, args: tuple[Any, ...]
    ) -> None:
        """Wait for the unit's weights, and watch its input gradient, which its backward computes last."""
        for index in buckets:
            if index in self._gathers:
                self._gathers.pop(index).wait()
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(partial(self._leave, unit))

    def _leave(self, unit: int, grad: Tensor) -> None:
        self._weight_gradients.add(partial(self._count, unit))

    def _count(self, unit: int) -> None:
        self._left[unit] = self._left.get(unit, 0) + 1
        if self._left[unit] == self._microbatches:
            self._complete(unit)

    # Sums

    def begin(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._left: dict[int, int] = {}  # unit -> micro-batches with finished backward
        self._completed: set[int] = set()
        self._sums: list[_Sum] = []  # started, in bucket order
        self._tied_sum: _Sum | None = None  # once started

    def _complete(self, unit: int) -> None:
        self._completed.add(unit)
        if unit == self._tied_unit and self._tied is not None:
            self._tied_sum = self._sum_tied(self._tied, overlap=True)
        while len(self._sums) < self._untied and self._completed.issuperset(
            self.flat.buckets[len(self._sums)].units
        ):
            self._sum_next(overlap=True)

    def _sum_tied(self, tied: FlatParameter, overlap: bool) -> _Sum:
        if self.before_sum:
            self.before_sum(-1, tied.main_grad)
        return self._all_reduce(self.groups.embedding, tied.main_grad, overlap)

    @property
    def _untied(self) -> int:
        buckets = len(self.flat.buckets)
        return buckets if self._tied is None else buckets - 1

    def _sum_next(self, overlap: bool) -> None:
        index = len(self._sums)
        bucket = self.flat.buckets[index]
        grads = self.flat.gradients.of(index)
        if self.before_sum:
            self.before_sum(index, grads)
        self._sum_partial_gradients(bucket)
        replicas = self.replicas(bucket)
        if not self.sharded or replicas.size == 1:
            self._sums.append(self._all_reduce(replicas, grads, overlap))
            return
        start, end = self.shard(bucket)
        own = slice(start - bucket.start, end - bucket.start)
        sent = grads.to(self.sent_dtype)
        handle = DONE
        if overlap:
            handle = replicas.ireduce_scatter(sent[own], sent)
        else:
            replicas.reduce_scatter(sent[own], sent)
        self._sums.append(_Sum(handle, sent[own], grads[own]))

    def _sum_partial_gradients(self, bucket: Bucket) -> None:
        """Sum gradients of replicated parameters under sequence parallelism, as Megatron's allreduce_layernorm_grads.

        Those of experts are summed over the ranks that share an expert.
        """
        partial = [
            p.main_grad
            for p, start in zip(self.flat.parameters, self.flat.starts, strict=True)
            if p.spec.sequence_parallel and bucket.start <= start < bucket.end
        ]
        if partial:
            sharing = self.groups.etp if bucket.expert else self.groups.tp
            summed = sharing.all_reduce(torch.cat([grad.flatten() for grad in partial]))
            sums = summed.split([grad.numel() for grad in partial])
            for grad, total in zip(partial, sums, strict=True):
                grad.copy_(total.view_as(grad))

    def _all_reduce(self, comm: Comm, grads: Tensor, overlap: bool) -> _Sum:
        sent = grads if comm.size == 1 else grads.to(self.sent_dtype)
        handle = DONE
        if overlap:
            handle = comm.iall_reduce(sent)
        else:
            comm.all_reduce(sent)
        return _Sum(handle, sent, grads)

    def reduce(self) -> list[Tensor]:
        """Return this rank's summed shard gradients, as views. Call once per `begin`."""
        if self._tied is not None and self._tied_sum is None:
            self._tied_sum = self._sum_tied(self._tied, overlap=self._untied > 0)
        while len(self._sums) < self._untied:
            self._sum_next(overlap=False)
        if self._tied_sum and len(self._sums) < len(self.flat.buckets):
            self._tied_sum.wait()
            self._sum_next(overlap=False)
        return [each.wait() for each in self._sums]

    # Gathers

    def gather(self, index: int) -> None:
        """Gather a bucket's updated weights, without waiting under --overlap-param-gather."""
        if not self.sharded:
            return
        bucket = self.flat.buckets[index]
        start, end = self.shard(bucket)
        weights = self.flat.values[bucket.start : bucket.end]
        own = self.flat.values[start:end]
        replicas = self.replicas(bucket)
        if self.overlap_gather:
            self._gathers[index] = replicas.iall_gather(weights, own)
        else:
            replicas.all_gather(weights, own)

    def await_weights(self) -> None:
        for index in list(self._gathers):
            self._gathers.pop(index).wait()


Updates = list[tuple[Range, Place | None]]


class StepFactors(NamedTuple):
    """An optimizer step's factors. decoupled_lr: learning rate under --decoupled-lr"""

    lr: float
    decoupled_lr: float
    weight_decay: float
    grad_scale: float


@dataclass(frozen=True)
class AdamWBlock:
    """Elements [start, end) of a shard that AdamW updates in one pass through the cache. updates: counted from `start`"""

    start: int
    end: int
    updates: Updates
    blocks: Sequence[Blocks]


@dataclass(frozen=True)
class BucketShard:
    """This rank's ZeRO-1 shard of a bucket, or the whole bucket: n elements, from `start` in the flat buffer.

    master: (n,), FP32, or BF16 under --main-params-dtype bf16
    model_weights: (n,), in the model's dtype; None if `master` is the model's memory
    exp_avg: (n,) in --exp-avg-dtype; empty with `eight_bit`, and if the optimizer's row has no such state
    exp_avg_sq: (n - orthogonal,) in --exp-avg-sq-dtype; empty likewise
    orthogonal: leading elements without a second moment
    ranges: counted from `start`
    updates: one per kernel call
    adamw_blocks: empty if weights and moments are in FP32
    """

    start: int
    master: Tensor
    model_weights: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    eight_bit: tuple[EightBitMoment, EightBitMoment] | None
    orthogonal: int
    ranges: list[Range]
    updates: Updates
    adamw_blocks: Sequence[AdamWBlock] = ()

    @property
    def in_bf16(self) -> bool:
        return self.master.dtype == torch.bfloat16

    def shared_blocks(self) -> list[Blocks]:
        blocks = chain.from_iterable(block.blocks for block in self.adamw_blocks)
        return [each for each in blocks if each.shared is not None]

    def moment(self, which: int) -> Tensor:
        """Return the first (0) or second (1) moment, a copy in FP32 if it is stored in eight bits."""
        if self.eight_bit is None:
            return (self.exp_avg, self.exp_avg_sq)[which]
        values = torch.zeros(len(self.master))
        for block in self.adamw_blocks:
            values[block.start : block.end] = self.eight_bit[which].read(block.blocks)
        return values

    def round_weights(self, at: slice) -> None:
        if self.model_weights is not None:
            self.model_weights[at].copy_(self.master[at])


def updates_inside(updates: Updates, start: int, end: int) -> Updates:
    """Clip `updates` to elements [start, end), counted from `start`."""
    clipped: Updates = []
    for r, place in updates:
        first = max(r.start, start)
        last = min(r.end, end)
        if first < last:
            if place:
                place = replace(place, first=place.first + first - r.start)
            clipped.append((replace(r, start=first - start, end=last - start), place))
    return clipped


def adamw_blocks(n: int, updates: Updates) -> list[AdamWBlock]:
    bounds = [(start, min(start + BLOCKS_LENGTH, n)) for start in range(0, n, BLOCKS_LENGTH)]
    return [
        AdamWBlock(start, end, updates_inside(updates, start, end), ()) for start, end in bounds
    ]


def adamw_blocks_of_eight_bit(updates: Updates, blocks: Sequence[Blocks]) -> list[AdamWBlock]:
    grouped = []
    first = 0
    for number, last in enumerate(blocks, 1):
        start = blocks[first].start
        if number == len(blocks) or blocks[number].end - start > BLOCKS_LENGTH:
            inside = updates_inside(updates, start, last.end)
            grouped.append(AdamWBlock(start, last.end, inside, blocks[first:number]))
            first = number
    return grouped
