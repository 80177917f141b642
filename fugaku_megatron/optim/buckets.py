"""Data-parallel communication of a rank, bucket by bucket: gradients are reduced during backward, weights gathered during forward.

    begin(micro-batches)                        of an iteration
    hooks on a unit of the stage: forward       waits for the gathers of its weights
                                  backward      counts; after the last micro-batch's the bucket's reduction starts
    reduce()                                    starts the rest and waits for all sums
    gather(bucket), bucket by bucket            after their update

Every data-parallel rank starts the same operations in the same order: buckets are reduced in the order in which they lie. The sum
of the tied embedding over its two copies starts when this stage's copy is complete; only the bucket that holds it waits for that
sum, after the reductions of all others have started.

Left out: which parameters form a bucket (`costs.memory`, `flat`), the update (`optim`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.base import DONE, Comm, Handle
from ..comm.grid import Groups
from ..config.run_config import RunConfig
from ..nn.model import Stage
from .flat import Bucket, FlatParameter, FlatParameters, unit_modules


@dataclass(frozen=True)
class _Sum:
    """A started sum. sent: what the ranks add up, (n,). result: FP32 gradients (n,), the same memory unless that is BF16."""

    handle: Handle
    sent: Tensor
    result: Tensor

    def wait(self) -> Tensor:
        self.handle.wait()
        return self.result if self.sent.dtype == self.result.dtype else self.result.copy_(self.sent)


class BucketComm:
    """Sums the gradients in `flat` over data-parallel ranks, and those of the tied embedding over its two copies before.

    Without --overlap-grad-reduce `reduce` does everything; without --overlap-param-gather `gather` returns when it is done. What
    somebody waits for at once goes through blocking verbs, in which inside a node all of a rank's threads add up.
    """

    def __init__(self, stage: Stage, flat: FlatParameters, run: RunConfig, groups: Groups) -> None:
        self.flat, self.sharded = flat, run.parallel.zero_stage == 1
        self.tp, self.dp, self.edp, self.embedding = (
            groups.tp,
            groups.dp,
            groups.edp,
            groups.embedding,
        )
        self.sent_dtype = torch.bfloat16 if run.parallel.grad_reduce_in_bf16 else torch.float32
        self._tied = next((p for p in flat.parameters if p is stage.tied_copy), None)
        self._tied_unit = (
            0 if stage.last else None
        )  # after it the tied gradient is complete; on the first stage nothing tells
        self._weight_gradients = stage.ops.weight_gradients
        self.overlap_gather = run.parallel.overlap_param_gather
        self._gathers: dict[int, Handle] = {}
        self.before_sum: Callable[[int, Tensor], None] | None = (
            None  # is shown each bucket's own gradients; -1: the tied ones
        )
        if run.parallel.overlap_grad_reduce:
            self._watch(stage)
        self.begin(0)

    def part(self, bucket: Bucket) -> tuple[int, int]:
        """[start, end) in the flat buffer of what this rank updates of a bucket."""
        if not self.sharded:
            return bucket.start, bucket.end
        replicas = self.replicas(bucket)
        numel = (bucket.end - bucket.start) // replicas.size
        return bucket.start + replicas.rank * numel, bucket.start + (replicas.rank + 1) * numel

    def replicas(self, bucket: Bucket) -> Comm:
        """The ranks that hold the same parameters: fewer of divided experts, whose gradients have the tokens of the other ranks."""
        return self.edp if bucket.expert else self.dp

    # Hooks ----------------------------------------------------------------------------------------------------------------------

    def _watch(self, stage: Stage) -> None:
        """Hooks on the stage's units, numbered as in `flat.stage_units`; the last one also knows the tied embedding's bucket."""
        modules = unit_modules(stage)
        needed = {
            unit: [index for index, bucket in enumerate(self.flat.buckets) if unit in bucket.units]
            for bucket in self.flat.buckets
            for unit in bucket.units
        }
        if self._tied is not None:
            needed[0 if stage.last else len(modules) - 1].append(len(self.flat.buckets) - 1)
        for unit, module in enumerate(modules):
            module.register_forward_pre_hook(partial(self._enter, unit, needed[unit]))

    def _enter(
        self, unit: int, buckets: list[int], module: nn.Module, args: tuple[Any, ...]
    ) -> None:
        """Before a unit's forward. Its input's gradient is the last thing that its backward makes."""
        for index in buckets:
            if index in self._gathers:
                self._gathers.pop(index).wait()
        if torch.is_grad_enabled() and args[0].requires_grad:
            args[0].register_hook(partial(self._leave, unit))

    def _leave(self, unit: int, grad: Tensor) -> None:
        """After a unit's backward of one micro-batch, or the half of it that computes gradients of inputs."""
        self._weight_gradients.add(partial(self._count, unit))

    def _count(self, unit: int) -> None:
        """A unit's gradients hold one micro-batch more."""
        self._left[unit] = self._left.get(unit, 0) + 1
        if self._left[unit] == self._microbatches:
            self._complete(unit)

    # Sums -----------------------------------------------------------------------------------------------------------------------

    def begin(self, microbatches: int) -> None:
        """Before the first forward of an iteration of so many micro-batches."""
        self._microbatches = microbatches
        self._left: dict[int, int] = {}  # unit -> micro-batches whose backward has left it
        self._completed: set[int] = set()
        self._sums: list[_Sum] = []  # of the first buckets, in order
        self._tied_sum: _Sum | None = None  # once it has started

    def _complete(self, unit: int) -> None:
        """Start what waited for this unit alone."""
        self._completed.add(unit)
        if unit == self._tied_unit and self._tied is not None:
            self._tied_sum = self._sum_tied(self._tied, overlap=True)
        while len(self._sums) < self._untied and self._completed.issuperset(
            self.flat.buckets[len(self._sums)].units
        ):
            self._sum_next(overlap=True)

    def _sum_tied(self, tied: FlatParameter, overlap: bool) -> _Sum:
        """Sum the tied embedding's gradient over its two copies. overlap: only start that."""
        if self.before_sum:
            self.before_sum(-1, tied.main_grad)
        return self._all_reduce(self.embedding, tied.main_grad, overlap)

    @property
    def _untied(self) -> int:
        """How many buckets, the first ones, do not wait for the tied embedding's other copy."""
        return len(self.flat.buckets) - (self._tied is not None)

    def _sum_next(self, overlap: bool) -> None:
        """Sum the next bucket. overlap: only start that."""
        bucket, grads = self.flat.buckets[len(self._sums)], self.flat.gradients.of(len(self._sums))
        if self.before_sum:
            self.before_sum(len(self._sums), grads)
        self._sum_partial_gradients(bucket)
        (start, end), replicas = self.part(bucket), self.replicas(bucket)
        if not self.sharded or replicas.size == 1:
            return self._sums.append(self._all_reduce(replicas, grads, overlap))
        own, sent, handle = (
            slice(start - bucket.start, end - bucket.start),
            grads.to(self.sent_dtype),
            DONE,
        )
        if overlap:
            handle = replicas.ireduce_scatter(sent[own], sent)
        else:
            replicas.reduce_scatter(sent[own], sent)
        self._sums.append(_Sum(handle, sent[own], grads[own]))

    def _sum_partial_gradients(self, bucket: Bucket) -> None:
        """Sum over tensor-parallel ranks what each computed from its part of the sequence, as Megatron's allreduce_layernorm_grads.

        One call for all of a bucket: they are small and many.
        """
        partial = [
            p.main_grad
            for p, start in zip(self.flat.parameters, self.flat.starts, strict=True)
            if p.spec.sequence_parallel and bucket.start <= start < bucket.end
        ]
        if partial:
            summed = self.tp.all_reduce(torch.cat([grad.flatten() for grad in partial]))
            for grad, part in zip(
                partial, summed.split([grad.numel() for grad in partial]), strict=True
            ):
                grad.copy_(part.view_as(grad))

    def _all_reduce(self, comm: Comm, grads: Tensor, overlap: bool) -> _Sum:
        sent, handle = (
            grads if comm.size == 1 else grads.to(self.sent_dtype),
            DONE,
        )  # itself where it is sent in FP32
        if overlap:
            handle = comm.iall_reduce(sent)
        else:
            comm.all_reduce(sent)
        return _Sum(handle, sent, grads)

    def reduce(self) -> list[Tensor]:
        """The summed gradients of this rank's part of every bucket, as views of them. Once between two calls of `begin`."""
        if self._tied is not None and self._tied_sum is None:
            self._tied_sum = self._sum_tied(self._tied, overlap=self._untied > 0)
        while len(self._sums) < self._untied:
            self._sum_next(overlap=False)
        if self._tied_sum and len(self._sums) < len(self.flat.buckets):
            self._tied_sum.wait()
            self._sum_next(overlap=False)
        return [each.wait() for each in self._sums]

    # Gathers --------------------------------------------------------------------------------------------------------------------

    def gather(self, index: int) -> None:
        """Bring the new weights of bucket `index` to this rank from those that have updated them, or start to."""
        bucket = self.flat.buckets[index]
        start, end = self.part(bucket)
        whole, own = self.flat.values[bucket.start : bucket.end], self.flat.values[start:end]
        if self.sharded and self.overlap_gather:
            self._gathers[index] = self.replicas(bucket).iall_gather(whole, own)
        elif self.sharded:
            self.replicas(bucket).all_gather(whole, own)

    def await_weights(self) -> None:
        """Return when every gather is complete."""
        for index in list(self._gathers):
            self._gathers.pop(index).wait()
