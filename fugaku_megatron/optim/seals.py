"""Bit sums of state that no other rank has, from an update to the next one: a flipped bit in between is found before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .bits import block_elements, block_sums
from .buckets import BucketShard
from .flat import FlatParameters
from .optimizer import Optimizer

ALIGNMENT = 64  # elements


def portion(n: int, part: int, parts: int) -> slice:
    """Return part `part` of `parts` of n elements."""
    bounds = [n * each // parts // ALIGNMENT * ALIGNMENT for each in (part, part + 1)]
    return slice(bounds[0], n if part + 1 == parts else bounds[1])


class _State(NamedTuple):
    """State of one bucket. start: the first element in the flat buffer; None: not by element"""

    kind: str
    tensor: Tensor
    start: int | None

    def name(self, flat: FlatParameters, index: int, length: int) -> str:
        """Name the parameters of elements [index, index + length)."""
        if self.start is None:
            return self.kind
        first = self.start + index
        overlaps = flat.overlaps(first, first + length)
        names = [parameter.spec.name for parameter, *_ in overlaps]
        return f"{self.kind} of {' or '.join(names)}"


class Seals:
    """Bit sums of master weights and moments of this rank alone, of one of `parts` parts after each update."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states = list(_states_without_copies(optimizer))
        self._sealed: list[tuple[_State, slice, Tensor]] = []
        self._loads = optimizer.loads

    @property
    def nbytes(self) -> int:
        return sum(state.tensor.nbytes for state in self._states)

    def seal(self, parts: int) -> None:
        part = self._optimizer.steps % parts
        self._loads = self._optimizer.loads
        self._sealed = []
        for state in self._states:
            at = portion(len(state.tensor), part, parts)
            self._sealed.append((state, at, block_sums(state.tensor[at])))

    def broken(self) -> str | None:
        """Name the first state that changed since `seal`, or return None."""
        if self._loads != self._optimizer.loads:
            return None
        for state, at, sums in self._sealed:
            changed = (block_sums(state.tensor[at]) != sums).nonzero()
            if len(changed):
                length = block_elements(state.tensor)
                return state.name(self._optimizer.flat, at.start + int(changed[0]) * length, length)
        return None


def _states_without_copies(optimizer: Optimizer) -> Iterator[_State]:
    for bucket, shard in zip(optimizer.flat.buckets, optimizer.shards, strict=True):
        if optimizer.sharded or optimizer.buckets.replicas(bucket).size == 1:
            yield from _states(shard)


def _states(shard: BucketShard) -> Iterator[_State]:
    yield _State(
        "weight" if shard.model_weights is None else "master weight", shard.master, shard.start
    )
    yield _State("exp_avg", shard.exp_avg, shard.start)
    yield _State("exp_avg_sq", shard.exp_avg_sq, shard.start + shard.orthogonal)
    for kind, moment in zip(("exp_avg", "exp_avg_sq"), shard.eight_bit or (), strict=False):
        yield _State(kind, moment.codes, shard.start)
        yield _State(f"scales of {kind}", moment.scales, None)


def weight_sums(optimizer: Optimizer, part: int, parts: int) -> Tensor:
    """Return the bit sums (2,) of part `part` of the model's trained weights: dense, experts."""
    totals = torch.zeros(2, dtype=torch.int64)
    for bucket in optimizer.flat.buckets:
        weights = optimizer.flat.values[bucket.start : bucket.end]
        totals[int(bucket.expert)] += block_sums(weights[portion(len(weights), part, parts)]).sum()
    return totals
