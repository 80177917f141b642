"""The bucket shard that this rank updates, and the blocks in which AdamW updates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from .flat import Place, Range
from .int8 import BLOCKS_LENGTH, Blocks, EightBitMoment

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
