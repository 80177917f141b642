"""Checkpoint shards: find the files that contain their pieces, and read them.

Pieces are found by global tensor name and position, for any layout that wrote them. Ranges are cut
into boxes in the global tensor, and box intersections are copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .schema import Entry, Record
from .tensor_files import BlockFile, StoredTensor, read_header

Place = tuple[int, ...]  # an index, or an extent, in each dimension
READ_BYTES = 4 << 20  # of a tensor at once
WEIGHT = "weight/"  # beginning of the key of a weight


@dataclass(frozen=True)
class Box:
    """Box in a global tensor: `extent` elements from `begin` on, per dimension."""

    begin: Place
    extent: Place

    @staticmethod
    def whole(shape: Sequence[int]) -> Box:
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return math.prod(self.extent)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(b, b + n) for b, n in zip(self.begin, self.extent, strict=True))

    def meet(self, other: Box) -> Box | None:
        begin = tuple(map(max, self.begin, other.begin))
        extent = tuple(
            min(a + n, b + m) - low
            for a, n, b, m, low in zip(
                self.begin, self.extent, other.begin, other.extent, begin, strict=True
            )
        )
        return Box(begin, extent) if all(length > 0 for length in extent) else None

    def bands(self, rows: int) -> Iterator[Box]:
        """Yield bands of at most `rows` rows; a box without dimensions is one band."""
        if not self.extent:
            yield self
            return
        for first in range(0, self.extent[0], rows):
            yield Box(
                (self.begin[0] + first, *self.begin[1:]),
                (min(rows, self.extent[0] - first), *self.extent[1:]),
            )


@dataclass(frozen=True)
class Piece:
    """Row-major elements [start, start + numel) of the slice of `shape` at `offset` in a global
    tensor.
    """

    offset: Place
    shape: Place
    start: int
    numel: int

    def boxes(self) -> Iterator[Box]:
        """Yield this piece's global boxes in element order, at most 2 x dimensions - 1."""
        for begin, extent in range_boxes(self.shape, self.start, self.start + self.numel):
            yield Box(tuple(map(sum, zip(self.offset, begin, strict=True))), extent)

    def shared(self, other: Piece) -> Iterator[Box]:
        others = list(other.boxes())
        for box in self.boxes():
            yield from filter(None, map(box.meet, others))

    def index(self, place: Place) -> int:
        inside = (i - o for i, o in zip(place, self.offset, strict=True))
        return (
            sum(i * stride for i, stride in zip(inside, strides(self.shape), strict=True))
            - self.start
        )

    def span(self, box: Box) -> tuple[int, int]:
        last = tuple(b + n - 1 for b, n in zip(box.begin, box.extent, strict=True))
        return self.index(box.begin), self.index(last) + 1

    def view(self, values: Tensor, box: Box, first: int = 0) -> Tensor:
        """Return a view, shaped like `box`, of this piece's elements `values` (n,) from number
        `first` on.
        """
        start = values.storage_offset() + self.index(box.begin) - first
        return values.as_strided(box.extent, strides(self.shape), start)


def strides(shape: Place) -> Place:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def range_boxes(shape: Place, start: int, end: int) -> Iterator[tuple[Place, Place]]:
    """Yield (begin, extent) of the boxes that form the row-major range [start, end), in order."""
    if len(shape) <= 1:
        if start < end:
            yield (start,) * len(shape), (end - start,) * len(shape)
        return
    inner = math.prod(shape[1:])
    rest = (0,) * (len(shape) - 1)
    row = start // inner
    whole = end // inner

    def in_row(row: int, start: int, end: int) -> Iterator[tuple[Place, Place]]:
        for begin, extent in range_boxes(shape[1:], start, end):
            yield (row, *begin), (1, *extent)

    if start % inner:
        yield from in_row(row, start % inner, min(end - row * inner, inner))
        row += 1
    if row < whole:
        yield (row, *rest), (whole - row, *shape[1:])
    if row <= whole:
        yield from in_row(whole, 0, end % inner)


@dataclass(frozen=True)
class Shard:
    """Local piece of a global tensor.

    key: kind/name of the global tensor, such as "exp_avg/decoder.layers.3.mlp.linear_fc1.weight"
    tensor: contiguous, any shape; row-major range [flat_start, flat_start + numel) of the
        tensor-parallel slice of `slice_shape` at `offset` in `global_shape`; the whole slice, or a
        ZeRO-1 shard
    alias: key to load if the checkpoint lacks `key`, for a tied copy that the saving run did not
        need
    """

    key: str
    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    slice_shape: tuple[int, ...]
    flat_start: int = 0
    alias: str | None = None

    def __post_init__(self) -> None:
        assert self.tensor.is_contiguous(), self.key
        assert len(self.global_shape) == len(self.offset) == len(self.slice_shape), self.key
        extents = zip(self.offset, self.slice_shape, self.global_shape)
        assert all(0 <= start and start + length <= full for start, length, full in extents), (
            self.key
        )
        assert 0 <= self.flat_start <= math.prod(self.slice_shape) - self.tensor.numel(), self.key

    @classmethod
    def whole(cls, key: str, tensor: Tensor) -> Shard:
        shape = tuple(tensor.shape)
        return cls(key, tensor, global_shape=shape, offset=(0,) * len(shape), slice_shape=shape)

    @property
    def piece(self) -> Piece:
        return Piece(
            tuple(self.offset), tuple(self.slice_shape), self.flat_start, self.tensor.numel()
        )

    def record(self) -> Record:
        return {
            "key": self.key,
            "dtype": str(self.tensor.dtype).replace("torch.", ""),
            "global_shape": list(self.global_shape),
            "offset": list(self.offset),
            "slice_shape": list(self.slice_shape),
            "flat_start": self.flat_start,
            "numel": self.tensor.numel(),
        }


def record_piece(record: Record) -> Piece:
    return Piece(
        tuple(record["offset"]), tuple(record["slice_shape"]), record["flat_start"], record["numel"]
    )


def fill_shards(
    shards: Sequence[Shard], names: Collection[str], read: Callable[[str], Tensor]
) -> None:
    """Fill weight shards from another program's whole tensors, each read once. Elements beyond a
    whole tensor stay.

    read: name -> whole tensor, any shape
    """
    by_name: dict[str, list[Shard]] = {}
    for shard in shards:
        keys = (key.removeprefix(WEIGHT) for key in (shard.key, shard.alias) if key is not None)
        by_name.setdefault(next(name for name in keys if name in names), []).append(shard)
    for name, same in by_name.items():
        whole = read(name)
        for shard in same:
            for box in filter(None, map(Box.whole(whole.shape).meet, shard.piece.boxes())):
                shard.piece.view(shard.tensor, box).copy_(whole[box.slices])


def check_model(saved: dict[str, Any], current: dict[str, Any], path: Path) -> None:
    differing = [name for name in current if name in saved and saved[name] != current[name]]
    if differing:
        both = ", ".join(
            f"--{name.replace('_', '-')} {saved[name]} (this run: {current[name]})"
            for name in differing
        )
        raise ValueError(
            f"{path} holds another model, with {both}; pass its values, or another --load"
        )


@dataclass(frozen=True)
class Source:
    """File and record with stored elements of a tensor. entry: the file's, without shard records"""

    file: str
    entry: Entry
    record: Record
    piece: Piece


@dataclass
class _Found:
    dtype: str
    global_shape: list[int]
    sources: list[Source] = field(default_factory=list)


class Search:
    """Collector of the records that this rank's shards need.

    padded: tensor names with a first dimension rounded up by layout; missing rows stay unchanged
    converts: key prefixes of shards that may have another dtype than the checkpoint
    """

    def __init__(
        self, shards: list[Shard], padded: Collection[str] = (), converts: Collection[str] = ()
    ) -> None:
        self.shards = shards
        self.padded = frozenset(padded)
        self.converts = tuple(converts)
        self._found: dict[str, _Found] = {}
        self._pieces: dict[str, list[Piece]] = {}
        for shard in shards:
            for key in filter(None, (shard.key, shard.alias)):
                self._pieces.setdefault(key, []).append(shard.piece)

    def look(self, name: str, entry: Entry) -> None:
        """Add the records of file `name` that overlap this rank's shards."""
        bare = {field: value for field, value in entry.items() if field != "shards"}
        for record in entry["shards"]:
            wanted = self._pieces.get(record["key"])
            if wanted is None:
                continue
            found = self._found.setdefault(
                record["key"], _Found(record["dtype"], record["global_shape"])
            )
            piece = record_piece(record)
            if any(
                len(piece.shape) == len(other.shape) and next(piece.shared(other), None)
                for other in wanted
            ):
                found.sources.append(Source(name, bare, record, piece))

    @property
    def complete(self) -> bool:
        for shard in self.shards:
            found = self._of(shard)
            if found is None or _held(shard, found) != _needed(shard, found):
                return False
        return True

    def _of(self, shard: Shard) -> _Found | None:
        return self._found.get(shard.key) or self._found.get(shard.alias or "")

    def plan(self, path: Path) -> dict[str, list[tuple[Shard, Source]]]:
        plan: dict[str, list[tuple[Shard, Source]]] = {}
        for shard in self.shards:
            for source in self._checked(shard, path).sources:
                if next(source.piece.shared(shard.piece), None):
                    plan.setdefault(source.file, []).append((shard, source))
        return plan

    def _checked(self, shard: Shard, path: Path) -> _Found:
        found = self._of(shard)
        if found is None:
            raise ValueError(
                f"{path} has no {shard.key}; the model or the optimizer differs from the one that saved it"
            )
        needed = shard.record()
        first = 1 if shard.key.partition("/")[2] in self.padded else 0
        shape = tuple(found.global_shape)
        own = tuple(shard.global_shape)
        if len(shape) != len(own) or shape[first:] != own[first:]:
            raise ValueError(
                f"{shard.key}: global shape is {list(shape)} in {path}, {list(own)} in this run"
            )
        if found.dtype != needed["dtype"] and not shard.key.startswith(self.converts):
            raise ValueError(
                f"{shard.key}: dtype is {found.dtype} in {path}, {needed['dtype']} in this run"
            )
        held = _held(shard, found)
        wanted = _needed(shard, found)
        if held != wanted:
            raise ValueError(
                f"{shard.key}: the files of {path} hold {held} of the {wanted} {_show(needed)}"
            )
        return found


def _held(shard: Shard, found: _Found) -> int:
    return sum(box.numel for source in found.sources for box in source.piece.shared(shard.piece))


def _needed(shard: Shard, found: _Found) -> int:
    """Count the shard's elements in the saved tensor, which may have fewer rows."""
    if len(shard.offset) != len(found.global_shape):
        return -1  # another tensor, of which nothing is held
    whole = Box.whole(found.global_shape)
    return sum(part.numel for part in map(whole.meet, shard.piece.boxes()) if part)


def _show(record: Record) -> str:
    end = record["flat_start"] + record["numel"]
    return f"elements [{record['flat_start']}, {end}) of the slice {record['slice_shape']} at {record['offset']}"


def read_shards(path: Path, work: list[tuple[Shard, Source]]) -> int:
    """Copy one file's pieces into the shards' tensors, in file order; return the bytes read.

    Needs READ_BYTES and some blocks of extra memory.
    """
    with BlockFile(path, work[0][1].entry) as file:
        stored = read_header(file)
        placed = [
            (check_stored(stored, source.record, path), shard, source.piece)
            for shard, source in work
        ]
        for tensor, shard, piece in sorted(placed, key=lambda part: part[0].start):
            _copy(file, tensor, piece, shard)
        return file.read_bytes


def check_stored(stored: dict[str, StoredTensor], record: Record, path: Path) -> StoredTensor:
    tensor = stored.get(record["key"])
    if tensor is None or (str(tensor.dtype), tensor.numel) != (
        f"torch.{record['dtype']}",
        record["numel"],
    ):
        raise ValueError(
            f"{path} does not hold {record['key']} as the manifest describes it: {_show(record)}"
        )
    return tensor


def _copy(file: BlockFile, tensor: StoredTensor, piece: Piece, shard: Shard) -> None:
    target = shard.tensor.detach().view(-1)
    size = tensor.dtype.itemsize
    row = max(1, math.prod(piece.shape[1:])) * size
    for box in piece.shared(shard.piece):
        for band in box.bands(max(1, READ_BYTES // row)):
            first, last = piece.span(band)
            data = file.read(tensor.start + first * size, tensor.start + last * size)
            values = torch.frombuffer(data, dtype=tensor.dtype)
            shard.piece.view(target, band).copy_(piece.view(values, band, first))
