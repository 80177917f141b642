"""Parts of a tensor as boxes: what two pieces of it share, and copying that from one piece's memory to the other's.

A piece is a row-major range of a slice: all of a tensor-parallel slice, or the part of it that a ZeRO-1 shard holds. It is cut into
boxes of the global tensor, of which two meet in a box again, so every piece can be put together from any others. Left out: files
(tensor_files.py), which piece lies where (shards.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

Place = tuple[int, ...]  # an index, or an extent, in each dimension


@dataclass(frozen=True)
class Box:
    """The elements of a global tensor from `begin` on, `extent` of them in each dimension."""

    begin: Place
    extent: Place

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    def meet(self, other: Box) -> Box | None:
        """What both hold; None where that is nothing."""
        begin = tuple(map(max, self.begin, other.begin))
        extent = tuple(min(a + n, b + m) - low for a, n, b, m, low in
                       zip(self.begin, self.extent, other.begin, other.extent, begin, strict=True))
        return Box(begin, extent) if all(length > 0 for length in extent) else None

    def bands(self, rows: int) -> Iterator[Box]:
        """The box in parts of at most so many elements of its first dimension; a box without dimensions is one part."""
        if not self.extent:
            yield self
            return
        for first in range(0, self.extent[0], rows):
            yield Box((self.begin[0] + first, *self.begin[1:]), (min(rows, self.extent[0] - first), *self.extent[1:]))


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel), in row-major order, of the slice of `shape` that begins at `offset` in a global tensor."""

    offset: Place
    shape: Place
    start: int
    numel: int

    def boxes(self) -> Iterator[Box]:
        """The boxes of the global tensor that it holds, at most 2 x dimensions - 1, in the order of its elements."""
        for begin, extent in range_boxes(self.shape, self.start, self.start + self.numel):
            yield Box(tuple(map(sum, zip(self.offset, begin, strict=True))), extent)

    def shared(self, other: Piece) -> Iterator[Box]:
        """The boxes that two pieces of one tensor have in common."""
        others = list(other.boxes())
        for box in self.boxes():
            yield from filter(None, map(box.meet, others))

    def index(self, place: Place) -> int:
        """Where an element of the global tensor lies among this piece's elements."""
        inside = (i - o for i, o in zip(place, self.offset, strict=True))
        return sum(i * stride for i, stride in zip(inside, strides(self.shape), strict=True)) - self.start

    def span(self, box: Box) -> tuple[int, int]:
        """[first, last) of this piece's elements: the shortest range that holds a box of them."""
        last = tuple(b + n - 1 for b, n in zip(box.begin, box.extent, strict=True))
        return self.index(box.begin), self.index(last) + 1

    def view(self, values: Tensor, box: Box, first: int = 0) -> Tensor:
        """The elements of a box, of its extent, in `values` (n,), which holds this piece's elements from number `first` on."""
        start = values.storage_offset() + self.index(box.begin) - first
        return values.as_strided(box.extent, strides(self.shape), start)


def strides(shape: Place) -> Place:
    """Elements from one index to the next in each dimension of a row-major tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def range_boxes(shape: Place, start: int, end: int) -> Iterator[tuple[Place, Place]]:
    """(begin, extent) of boxes that are the row-major range [start, end) of a tensor of this shape, in order."""
    if len(shape) <= 1:
        if start < end:
            yield (start,) * len(shape), (end - start,) * len(shape)
        return
    inner, rest = math.prod(shape[1:]), (0,) * (len(shape) - 1)
    row, whole = start // inner, end // inner
    if start % inner:
        stop = min(end, (row + 1) * inner)
        yield from (((row, *begin), (1, *extent)) for begin, extent in range_boxes(shape[1:], start % inner, stop - row * inner))
        row += 1
    if row < whole:
        yield (row, *rest), (whole - row, *shape[1:])
    if row <= whole and end % inner:
        yield from (((whole, *begin), (1, *extent)) for begin, extent in range_boxes(shape[1:], 0, end % inner))
