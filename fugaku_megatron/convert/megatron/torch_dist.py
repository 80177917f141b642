"""Files in the format torch_dist: global tensors and pickled objects, by key.

DIR/metadata.json                 name and version of the format
DIR/.metadata                     torch.distributed.checkpoint's Metadata: shapes, and the place of each piece
DIR/__0_0.distcp ...              pieces of tensors, and objects, each as torch.save wrote it
DIR/integrity.json                `integrity.py`: digests of the files, if Megatron-LM was to save them
DIR/common.pt                     everything else; since megatron-core 0.19 the object "common_state" instead

Sources: megatron/core/dist_checkpointing (serialization.py, strategies/torch.py, mapping.py).
"""

from __future__ import annotations

import io
import json
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ...checkpoint.manifest import TORCH_DIST, TORCH_DIST_COMMON, fsync
from ...checkpoint.shards import Box, range_boxes
from ...config.fields import check
from ...text.written_files import write_text
from .integrity import IntegrityManifest
from .pickles import (
    UNREADABLE,
    check_uncompressed,
    load_metadata,
    load_object,
    load_pickled,
    save_pickled,
)

CONFIG = "metadata.json"
COMMON_STATE = "common_state"
Shape = tuple[int, ...]


def object_key(name: str, index: Shape = (0,), shape: Shape = (1,)) -> str:
    return f"{name}/shard_{'.'.join(map(str, index))}_{'.'.join(map(str, shape))}"


def _is_shape(values: Any) -> bool:
    return all(type(n) is int and n >= 0 for n in values)


def _is_tensor(stored: TensorStorageMetadata) -> bool:
    shapes = [stored.size, *(s for chunk in stored.chunks for s in (chunk.offsets, chunk.sizes))]
    ranks = {len(shape) for shape in shapes}
    dtype = stored.properties.dtype
    return len(ranks) == 1 and isinstance(dtype, torch.dtype) and all(map(_is_shape, shapes))


@dataclass(frozen=True)
class _Assembly:
    """Tensor that is assembled from pieces, and its elements that a piece has filled."""

    name: str
    whole: Tensor
    filled: Tensor

    @staticmethod
    def empty(name: str, shape: Shape, dtype: torch.dtype) -> _Assembly:
        filled = torch.zeros(shape, dtype=torch.bool)
        return _Assembly(name, torch.empty(shape, dtype=dtype), filled)

    def add(self, box: Box, values: Tensor) -> None:
        check(
            not self.filled[box.slices].any(),
            f"{self.name} has several pieces with the elements at {list(box.begin)}",
        )
        self.filled[box.slices] = True
        self.whole[box.slices] = values

    def finish(self) -> Tensor:
        count = int(self.filled.sum())
        check(
            count == self.whole.numel(),
            f"the pieces of {self.name} hold {count} of its {self.whole.numel()} elements",
        )
        return self.whole


@dataclass(frozen=True)
class DistFiles:
    """Reader of one iteration.

    places: file, offset and length of every piece and object
    sizes: bytes of each file
    integrity: verifies a file before its first piece is read
    """

    path: Path
    tensors: dict[str, TensorStorageMetadata]
    places: dict[MetadataIndex, Any]
    sizes: dict[str, int]
    integrity: IntegrityManifest
    _has_bytes: set[str] = field(default_factory=set)  # keys whose pieces have enough bytes

    @staticmethod
    def open(path: Path) -> DistFiles:
        """Read the metadata alone, or raise ValueError."""
        integrity = IntegrityManifest.open(path)
        metadata = load_metadata(path / TORCH_DIST)
        try:
            tensors = {
                key: value
                for key, value in metadata.state_dict_metadata.items()
                if isinstance(value, TensorStorageMetadata)
            }
            sound = all(map(_is_tensor, tensors.values())) and all(
                isinstance(index, MetadataIndex)
                and type(place.relative_path) is str
                and _is_shape((place.offset, place.length))
                for index, place in metadata.storage_data.items()
            )
        except UNREADABLE:
            sound = False
        check(sound, f"{path / TORCH_DIST} is damaged: shapes or places of pieces are no numbers")
        sizes = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
        return DistFiles(path, tensors, metadata.storage_data, sizes, integrity)

    def common(self) -> dict[str, Any]:
        """Return the state that is neither tensor nor sharded object."""
        if (self.path / TORCH_DIST_COMMON).exists():
            return load_pickled(self.path / TORCH_DIST_COMMON)
        found = self.object(object_key(COMMON_STATE))
        check(
            found is not None,
            f"{self.path} holds neither {TORCH_DIST_COMMON} nor the object {COMMON_STATE} of megatron-core since 0.19",
        )
        check(
            isinstance(found, dict),
            f"{self.path}: {COMMON_STATE} is {type(found).__name__}, not a dictionary",
        )
        state: dict[str, Any] = found
        return state

    def object(self, key: str) -> Any:
        index = MetadataIndex(key)
        if index not in self.places:
            return None
        data, where = self._read(index)
        contents = load_object(data, str(self.path / self.places[index].relative_path), where)
        check(
            isinstance(contents, list) and len(contents) == 1,
            f"{where}: {key} is {type(contents).__name__}, not a list of one object",
        )
        return contents[0]

    def shape(self, key: str, layer: int | None = None) -> Shape:
        size = tuple(self.tensors[key].size)
        return size if layer is None else size[1:]

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self.tensors[key].properties.dtype
        return dtype

    def tensor(self, key: str, layer: int | None = None) -> Tensor:
        """Return a global tensor, or its row `layer`, assembled from all pieces."""
        assembly = self._assembly(key, self.shape(key, layer))
        for chunk in self.tensors[key].chunks:
            offsets = tuple(chunk.offsets)
            if layer is not None and not offsets[0] <= layer < offsets[0] + chunk.sizes[0]:
                continue
            piece = self._piece(key, chunk)
            if layer is not None:
                piece = piece[layer - offsets[0]]
                offsets = offsets[1:]
            assembly.add(Box(offsets, tuple(piece.shape)), piece)
        return assembly.finish()

    def flattened(self, key: str, shape: Shape, layer: int | None = None) -> Tensor:
        """Return a tensor of `shape`, or one layer, that ranks saved as ranges of their flat blocks.

        megatron-core before 0.14 saved optimizer states so: the stored size is the number of blocks
        in each dimension, then the elements of a block.
        """
        *blocks, length = self.tensors[key].size
        block = tuple(n // max(1, parts) for n, parts in zip(shape, blocks, strict=True))
        assembly = self._assembly(key, shape[1:] if layer is not None else shape)
        check(
            math.prod(block) == length,
            f"{self.path}: {key} has blocks of {length} elements, and its weight of {math.prod(block)}",
        )
        for chunk in self.tensors[key].chunks:
            *number, start = chunk.offsets
            begin = tuple(n * size for n, size in zip(number, block, strict=True))
            if layer is not None and begin[0] != layer:
                continue
            values = self._piece(key, chunk).flatten()
            done = 0
            for offsets, extent in range_boxes(block, start, start + len(values)):
                count = math.prod(extent)
                place = Box(tuple(map(sum, zip(begin, offsets, strict=True))), extent)
                part = values[done : done + count].view(extent)
                done += count
                if layer is not None:
                    place = Box(place.begin[1:], extent[1:])
                    part = part[0]
                assembly.add(place, part)
        return assembly.finish()

    def _assembly(self, key: str, shape: Shape) -> _Assembly:
        """Allocate memory that the stored pieces can fill."""
        if key not in self._has_bytes:
            stored = self.tensors[key]
            needed = math.prod(stored.size) * self.dtype(key).itemsize
            given = sum(
                self._place(MetadataIndex(key, chunk.offsets)).length for chunk in stored.chunks
            )
            check(
                given >= needed,
                f"{self.path / TORCH_DIST}: {key} of shape {list(stored.size)} has {needed} bytes, and its pieces {given}",
            )
            self._has_bytes.add(key)
        return _Assembly.empty(f"{self.path}: {key}", shape, self.dtype(key))

    def _piece(self, key: str, chunk: ChunkStorageMetadata) -> Tensor:
        inside = all(
            0 <= offset and offset + size <= full
            for offset, size, full in zip(
                chunk.offsets, chunk.sizes, self.tensors[key].size, strict=True
            )
        )
        check(
            inside, f"{self.path}: a piece of {key} at {list(chunk.offsets)} is beyond the tensor"
        )
        index = MetadataIndex(key, chunk.offsets)
        self.integrity.verify(self._place(index).relative_path)
        data, where = self._read(index)
        try:
            piece = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            piece = piece.view(tuple(chunk.sizes))
        except UNREADABLE as error:
            raise ValueError(f"{where}, where a piece of {key} should be") from error
        tensor: Tensor = piece
        return tensor

    def _read(self, index: MetadataIndex) -> tuple[bytes, str]:
        """Return the bytes of a piece or object, and the place for a message about damage."""
        place = self._place(index)
        file = self.path / place.relative_path
        damaged = f"{file} is damaged at byte {place.offset}"
        with open(file, "rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        check_uncompressed(io.BytesIO(data), len(data), damaged)
        return data, damaged

    def _place(self, index: MetadataIndex) -> Any:
        """Return the place of a piece or object, or raise ValueError if it is not inside its file."""
        key = f"{index.fqn} at {list(index.offset or ())}"
        check(index in self.places, f"{self.path / TORCH_DIST} has no place of {key}")
        place = self.places[index]
        size = self.sizes.get(place.relative_path)
        end = place.offset + place.length
        file = self.path / place.relative_path
        check(size is not None, f"{file} is missing")
        check(
            end <= (size or 0),
            f"{file} has {size} bytes, and {TORCH_DIST} says that {key} ends at byte {end}",
        )
        return place


class GlobalPiece(NamedTuple):
    """Piece of a global tensor of shape `size`, from `offsets` on."""

    key: str
    size: Shape
    offsets: Shape
    values: Tensor


@dataclass
class DistWriter:
    """Writer of one iteration, one piece after another. Call `finish` at the end."""

    path: Path
    _tensors: dict[str, Any] = field(default_factory=dict)
    _places: dict[MetadataIndex, _StorageInfo] = field(default_factory=dict)

    def add(self, file: int, piece: GlobalPiece) -> None:
        values = piece.values.clone(memory_format=torch.contiguous_format)
        offsets = torch.Size(piece.offsets)
        stored = self._tensors.setdefault(
            piece.key,
            TensorStorageMetadata(
                TensorProperties(dtype=values.dtype), torch.Size(piece.size), chunks=[]
            ),
        )
        stored.chunks.append(ChunkStorageMetadata(offsets, values.shape))
        self._append(file, MetadataIndex(piece.key, offsets), values)

    def add_object(self, key: str, value: Any) -> None:
        self._tensors[key] = BytesStorageMetadata()
        self._append(0, MetadataIndex(key), [value])

    def _append(self, file: int, index: MetadataIndex, value: Any) -> None:
        name = f"__{file}_0.distcp"
        with open(self.path / name, "ab") as stream:
            start = stream.tell()
            save_pickled(value, stream)
            self._places[index] = _StorageInfo(name, start, stream.tell() - start)

    def finish(self) -> None:
        """Sync all pieces, then write their metadata and the checkpoint's format."""
        for name in {place.relative_path for place in self._places.values()}:
            fsync(self.path / name)
        with open(self.path / TORCH_DIST, "wb") as stream:
            pickle.dump(Metadata(self._tensors, storage_data=self._places), stream)
        fsync(self.path / TORCH_DIST)
        config = {
            "sharded_backend": "torch_dist",
            "sharded_backend_version": 1,
            "common_backend": "torch",
            "common_backend_version": 1,
        }
        write_text(self.path / CONFIG, json.dumps(config))
