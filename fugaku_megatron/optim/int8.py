"""AdamW's moments in 8 bits (--exp-avg-dtype int8): a code per element and an FP32 scale per block of at most 256 elements.

Codes are non-linear (compare Dettmers et al. 2021, arXiv:2110.02861): first moment scale sign(q) (q / 127)^2, rounded to nearest;
second moment scale (q / 255)^4, rounded stochastically, with q >= 1 for positive elements because it divides. Blocks and random
numbers depend on the global position, so every layout has the same bits. Checkpoints contain FP32.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..comm.base import Comm
from ..config.model import ModelConfig
from ..costs.optimizer_states import block_length, undivided_rows
from ..nn.model import VOCABULARY
from ..nn.parameter import ParameterSpec
from .flat import Bucket, FlatParameters, Place, place_of
from .rounding import random_numbers

SIGNED = 127.0
UNSIGNED = 255.0
BLOCKS_LENGTH = 1 << 17  # elements of one `Blocks`, at most


@dataclass(frozen=True)
class Blocks:
    """Consecutive elements in one parameter: `segments` times `length`, in blocks of at most `block`.

    start: counted in the rank's shard
    shared: the only block's index among the blocks that several ZeRO-1 shards share
    """

    start: int
    segments: int
    length: int
    block: int
    first_scale: int
    place: Place
    shared: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.segments * self.length

    @property
    def scales(self) -> int:
        return self.segments * math.ceil(self.length / self.block)

    def views(self, values: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield views (segments, blocks, elements) of values (n,), each with a slice of a segment's scales."""
        rows = values.view(self.segments, self.length)
        whole = self.length // self.block
        if whole:
            yield rows[:, : whole * self.block].unflatten(1, (whole, self.block)), slice(0, whole)
        if self.length % self.block:
            yield rows[:, whole * self.block :].unsqueeze(1), slice(whole, whole + 1)

    def numbers(self) -> Tensor:
        firsts = self.place.first + self.length * torch.arange(self.segments)
        return (self.place.numbers_of(firsts)[:, None] + torch.arange(self.length)).view(-1)


def segment_length(spec: ParameterSpec, model: ModelConfig) -> int:
    """Return the consecutive elements that no layout divides, see `costs.optimizer_states`."""
    dim = spec.partition_dim
    if dim is None:
        return math.prod(spec.shape[1:] if ".experts." in spec.name else spec.shape)
    rows = undivided_rows(model, spec.shape[dim], vocabulary=spec.name in VOCABULARY)
    return rows * math.prod(spec.shape[dim + 1 :])


def _cut(first: int, end: int, segment: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first element, segments, length) for `Blocks` in elements [first, end); a cut block is alone."""
    block = block_length(segment)
    while first < end:
        inside = first % segment
        if inside == 0 and segment <= min(BLOCKS_LENGTH, end - first):
            count = min(BLOCKS_LENGTH, end - first) // segment
            yield first, count, segment
            first += count * segment
            continue
        stop = min(end, first - inside + segment)
        if inside % block:
            stop = min(stop, first + block - inside % block)
        elif stop - first > block:
            whole = (stop - first) // block
            complete = stop == first - inside + segment and stop - first <= BLOCKS_LENGTH
            stop = stop if complete else first + min(whole, BLOCKS_LENGTH // block) * block
        yield first, 1, stop - first
        first = stop


def blocks_of_shard(
    flat: FlatParameters, model: ModelConfig, shard: tuple[int, int], cut: list[int]
) -> list[Blocks]:
    """Return the moment blocks of the ZeRO-1 shard (start, end).

    cut: ascending starts of blocks that several shards share
    """
    start, end = shard
    made: list[Blocks] = []
    scale = 0
    for parameter, begin, first, last in flat.overlaps(start, end):
        segment = segment_length(parameter.spec, model)
        place = place_of(parameter, first)
        for element, segments, length in _cut(first, last, segment):
            block = block_length(segment)
            block_start = begin + element - element % segment % block
            number = bisect_left(cut, block_start)
            shared = number < len(cut) and cut[number] == block_start
            blocks = Blocks(
                start=begin + element - start,
                segments=segments,
                length=length,
                block=min(block, length),
                first_scale=scale,
                place=replace(place, first=element),
                shared=number if shared else None,
            )
            made.append(blocks)
            scale += blocks.scales
    return made


def cut_blocks(flat: FlatParameters, model: ModelConfig, bucket: Bucket, shards: int) -> list[int]:
    """Return the flat-buffer starts of the blocks that shard boundaries cut, in order."""
    size = (bucket.end - bucket.start) // shards
    cut: list[int] = []
    for boundary in range(bucket.start + size, bucket.end, size):
        for parameter, begin, first, _ in flat.overlaps(boundary, boundary + 1):
            segment = segment_length(parameter.spec, model)
            inside = first % segment % block_length(segment)
            start = begin + first - inside
            if inside and (not cut or cut[-1] != start):
                cut.append(start)
    return cut


class EightBitMoment:
    """One moment of n elements, initially zero. signed: first moment"""

    def __init__(self, n: int, scales: int, signed: bool) -> None:
        self.signed = signed
        self.codes = torch.zeros(n, dtype=torch.int8 if signed else torch.uint8)
        self.scales = torch.zeros(scales)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def read(self, chunk: Sequence[Blocks]) -> Tensor:
        """Return the elements of consecutive blocks in FP32, (n,)."""
        values = self.codes[chunk[0].start : chunk[-1].end].float()
        if self.signed:
            values.mul_(values.abs()).div_(SIGNED**2)
        else:
            values.div_(UNSIGNED).square_().square_()
        for blocks in chunk:
            for view, scales in self._views(values, chunk, blocks):
                view.mul_(scales)
        return values

    def scale_of_elements(self, chunk: Sequence[Blocks]) -> Tensor:
        """Return each element's scale in consecutive blocks, (n,)."""
        values = torch.empty(chunk[-1].end - chunk[0].start)
        for blocks in chunk:
            for view, scales in self._views(values, chunk, blocks):
                view.copy_(scales.expand_as(view))
        return values

    def write(
        self,
        chunk: Sequence[Blocks],
        values: Tensor,
        shared: Tensor | None = None,
        at_random: tuple[int, int] | None = None,
    ) -> None:
        """Round values (n,) into consecutive blocks.

        shared: (m,), largest elements in blocks that several ZeRO-1 shards share
        at_random: seed and step for stochastic rounding; None: to nearest
        """
        x = values.clone()
        for blocks in chunk:
            for view, scales in self._views(x, chunk, blocks):
                if blocks.shared is None or shared is None:
                    scales.copy_(largest(view).unsqueeze(-1))
                else:
                    scales.fill_(shared[blocks.shared])
                view.div_(scales.clamp(min=torch.finfo(torch.float32).tiny))
        if self.signed:
            codes = x.abs().sqrt_().mul_(SIGNED).round_().mul_(x.sign())
        else:
            codes = _squares_code(x, chunk, at_random)
        self.codes[chunk[0].start : chunk[-1].end] = codes

    def _views(
        self, values: Tensor, chunk: Sequence[Blocks], blocks: Blocks
    ) -> Iterator[tuple[Tensor, Tensor]]:
        scales = self.scales[blocks.first_scale : blocks.first_scale + blocks.scales]
        rows = scales.view(blocks.segments, -1)
        own = values[blocks.start - chunk[0].start : blocks.end - chunk[0].start]
        for view, which in blocks.views(own):
            yield view, rows[:, which].unsqueeze(-1)


def largest(values: Tensor) -> Tensor:
    """Return the largest absolute value over the last dimension, (..., n) -> (...)."""
    return values.abs().amax(-1)


def _squares_code(x: Tensor, chunk: Sequence[Blocks], at_random: tuple[int, int] | None) -> Tensor:
    root = x.sqrt().sqrt_().mul_(UNSIGNED)
    if at_random is None:
        return torch.where(x > 0, root.round_().clamp_(1.0, UNSIGNED), 0.0)
    low = root.floor_().clamp_(0.0, UNSIGNED - 1)
    below, above = ((low + more).div_(UNSIGNED).square_().square_() for more in (0, 1))
    uniform = torch.cat(
        [random_numbers(each.numbers(), each.place.stream, *at_random) for each in chunk]
    )
    up = uniform.mul_(above.sub_(below)) < x - below
    return torch.where((low == 0) & (x > 0), low + 1, low + up)


def share_scales(
    shards: Sequence[tuple[Comm, int, Sequence[Blocks]]],
    moments_of: Callable[[int, Blocks], tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """Return, per bucket, the largest elements (2, m) of both moments in the m blocks that ZeRO-1 shards cut. Collective.

    shards: per bucket, its ranks, m, and this rank's blocks
    moments_of: (bucket index, blocks) -> new moments
    """
    found = [torch.zeros(2, count) for _, count, _ in shards]
    for index, (_, _, blocks) in enumerate(shards):
        for each in blocks:
            if each.shared is not None:
                for row, moment in enumerate(moments_of(index, each)):
                    found[index][row, each.shared] = largest(moment)
    for comm in dict.fromkeys(comm for comm, _, _ in shards):
        own = [index for index, shard in enumerate(shards) if shard[0] is comm]
        together = torch.cat([found[index].view(-1) for index in own])
        if together.numel():
            comm.all_reduce(together, "max")
            pieces = together.split([found[index].numel() for index in own])
            for index, piece in zip(own, pieces, strict=True):
                found[index].copy_(piece.view_as(found[index]))
    return found
