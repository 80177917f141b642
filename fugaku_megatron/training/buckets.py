"""Data-parallel communication of a rank, bucket by bucket: sums of gradients and, under ZeRO-1, gathers of weights.

Left out: which parameters form a bucket (`run.buckets`, `flat`), the update (`optim`). Test: pytest tests/test_buckets.py
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.grid import Groups
from ..nn.model import Stage
from ..run.config import RunConfig
from .flat import Bucket, FlatParameters


class BucketComm:
    """Sums the gradients in `flat` over data-parallel ranks, and those of the tied embedding over its two copies before."""

    def __init__(self, stage: Stage, flat: FlatParameters, run: RunConfig, groups: Groups) -> None:
        self.flat, self.tp, self.dp, self.embedding = flat, groups.tp, groups.dp, groups.embedding
        self.sharded = run.parallel.zero_stage == 1
        self.tied_grad = stage.tied_weight.main_grad if stage.is_first != stage.is_last else None

    def part(self, bucket: Bucket) -> tuple[int, int]:
        """[start, end) in the flat buffer of what this rank updates of a bucket."""
        if not self.sharded:
            return bucket.start, bucket.end
        numel = (bucket.end - bucket.start) // self.dp.size
        return bucket.start + self.dp.rank * numel, bucket.start + (self.dp.rank + 1) * numel

    def begin(self, microbatches: int) -> None:
        """Before the backwards of an iteration."""

    def reduce(self) -> list[Tensor]:
        """The summed gradients of every bucket: this rank's part (`part`) of each."""
        if self.tied_grad is not None:
            self.embedding.all_reduce(self.tied_grad)
        return [self._reduce(bucket) for bucket in self.flat.buckets]

    def _reduce(self, bucket: Bucket) -> Tensor:
        self._sum_partial_gradients(bucket)
        grads, (start, end) = self.flat.grads[bucket.start : bucket.end], self.part(bucket)
        if not self.sharded or self.dp.size == 1:
            return self.dp.all_reduce(grads)
        return self.dp.reduce_scatter(torch.empty(end - start), grads)

    def _sum_partial_gradients(self, bucket: Bucket) -> None:
        """Sum over tensor-parallel ranks what each computed from its part of the sequence, as Megatron's allreduce_layernorm_grads.

        One call for all of a bucket: they are small and many.
        """
        partial = [p.main_grad for p, start in zip(self.flat.parameters, self.flat.starts, strict=True)
                   if p.spec.sequence_parallel and bucket.start <= start < bucket.end]
        if partial:
            summed = self.tp.all_reduce(torch.cat([grad.flatten() for grad in partial]))
            for grad, part in zip(partial, summed.split([grad.numel() for grad in partial]), strict=True):
                grad.copy_(part.view_as(grad))

    def gather(self, index: int) -> None:
        """Bring the new weights of bucket `index` to this rank from those that have updated them."""
        if self.sharded:
            bucket = self.flat.buckets[index]
            start, end = self.part(bucket)
            self.dp.all_gather(self.flat.values[bucket.start : bucket.end], self.flat.values[start:end].clone())

    def await_weights(self) -> None:
        """Return when every gather is complete."""
