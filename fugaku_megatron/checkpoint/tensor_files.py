"""Safetensors files, written once with checksums and read by range, each block verified.

    8 bytes: header length | header: JSON, name -> dtype, shape, data_offsets | tensor values

The manifest entry has the size, and the CRC-32 of the file and every block. Without block
checksums, as in older entries, the whole file is verified first.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.agreement import describe
from ..text.written_files import new_file
from .schema import BLOCK_BYTES, DIGITS, BlockChecksums, Entry, check_size, digits, verify_file

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
# Formats that the safetensors library knows in addition, and which are not read here.
_OTHERS = (
    "F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ F4 F6_E2M3 F6_E3M2 C64 I8 I16 U16 U32 U64".split()
)
_LENGTH_BYTES = 8
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
# Parsed, a header takes up to 27 times its bytes: a large one is at most an eighth of its file.
_SMALL_HEADER = 4 << 20
_HEADER_SHARE = 8


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], values: Callable[[str], Tensor] | None = None
) -> Entry:
    """Write contiguous tensors, of any shape; return the file's entry without shards.

    values: produces one tensor at a time, to save memory; `tensors` may then be on the meta device
    """
    ordered = _in_order(tensors)
    checksums = BlockChecksums()
    try:
        with open(path, "wb", buffering=0, opener=new_file) as file:
            _write(file, memoryview(_header(ordered)), checksums)
            for name, tensor in ordered:
                _write(file, as_bytes(tensor if values is None else values(name)), checksums)
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"{path}: {describe(error)}") from error
    return checksums.record()


def _in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """Sort tensors so that every tensor is aligned in a file."""
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))


class FilePlan(NamedTuple):
    """Bytes of the file that `write_tensors` would write. starts: first byte of each tensor"""

    header: bytes
    starts: dict[str, int]
    size: int


def plan_file(tensors: Mapping[str, Tensor]) -> FilePlan:
    ordered = _in_order(tensors)
    header = _header(ordered)
    starts = {}
    end = len(header)
    for name, tensor in ordered:
        starts[name] = end
        end += tensor.numel() * tensor.element_size()
    return FilePlan(header, starts, end)


def as_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _header(tensors: Iterable[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors:
        start = end
        end = end + tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _write(file: Any, data: memoryview, checksums: BlockChecksums) -> None:
    """Write block by block, so that data is still cached when its checksum is computed."""
    for start in range(0, len(data), BLOCK_BYTES):
        part = data[start : start + BLOCK_BYTES]
        checksums.add(part)
        while part:
            part = part[file.write(part) :]


def copy_verified(source: Path, entry: Entry, path: Path) -> None:
    try:
        with (
            BlockFile(source, entry) as original,
            open(path, "wb", buffering=0, opener=new_file) as file,
        ):
            for index in range(-(-entry["size"] // original.block_size)):
                _write(file, original.block(index), BlockChecksums())
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"{path}: {describe(error)}") from error


class Readable(Protocol):
    """File of known size, read by ranges [start, end) of bytes."""

    path: Path
    size: int

    def read(self, start: int, end: int) -> bytearray: ...


class BlockFile:
    """Context manager that reads a file by byte range and verifies every block read.

    read_bytes: bytes read from disk so far

    Raises ValueError if the file contradicts `entry`.
    """

    def __init__(self, path: Path, entry: Entry) -> None:
        self.path = path
        self.entry = entry
        self.size = entry["size"]
        self.read_bytes = 0
        check_size(path, entry)
        self.block_size = entry.get("block_size", BLOCK_BYTES)
        self._checksums = entry.get("blocks")
        self._last = -1
        self._block = memoryview(b"")

    def __enter__(self) -> BlockFile:
        if self._checksums is None:
            verify_file(self.path, self.entry)
        self._file = open(self.path, "rb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, start: int, end: int) -> bytearray:
        """Return bytes [start, end). Adjacent ranges in order read each block once."""
        data = bytearray(end - start)
        size = self.block_size
        for index in range(start // size, -(-end // size)):
            first = index * size
            low = max(start, first)
            high = min(end, first + size)
            data[low - start : high - start] = self.block(index)[low - first : high - first]
        return data

    def block(self, index: int) -> memoryview:
        if index != self._last:
            first = index * self.block_size
            data = memoryview(bytearray(min(self.block_size, self.size - first)))
            read_into(data, self._file, first)
            self.read_bytes += len(data)
            self._verify(index, data)
            self._last = index
            self._block = data
        return self._block

    def _verify(self, index: int, data: memoryview) -> None:
        if self._checksums is None:
            return
        expected = self._checksums[DIGITS * index : DIGITS * (index + 1)]
        actual = digits(zlib.crc32(data))
        if actual != expected:
            first = index * self.block_size
            raise ValueError(
                f"{self.path} has CRC-32 {actual} in its bytes {first} to {first + len(data)}, the manifest "
                f"says {expected}: its contents were altered"
            )


@dataclass
class PlainFile:
    """A file without checksums, read by range."""

    path: Path
    size: int

    def read(self, start: int, end: int) -> bytearray:
        data = bytearray(end - start)
        self.read_into(memoryview(data), start)
        return data

    def read_into(self, data: memoryview, start: int) -> None:
        with open(self.path, "rb", buffering=0) as file:
            read_into(data, file, start)

    def read_tensor(self, stored: StoredTensor) -> Tensor:
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self.read_into(as_bytes(tensor), stored.start)
        return tensor


def read_into(data: memoryview, file: Any, start: int) -> None:
    """Fill `data` with an unbuffered file's bytes from `start` on."""
    file.seek(start)
    done = 0
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise ValueError(
                f"{file.name} ends within its bytes {start} to {start + len(data)}: it was truncated"
            )
        done += count


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor's location: numel values from byte `start` on."""

    dtype: torch.dtype
    numel: int
    start: int
    shape: tuple[int, ...]


class UnsupportedFormat(ValueError):
    """Tensor dtype outside DTYPES, such as FP8."""


def read_header(file: Readable) -> dict[str, StoredTensor]:
    """Return a file's tensors by name.

    Raises ValueError for invalid headers, as the safetensors library does: not JSON, or tensors not
    adjacent up to the end of the file. Raises UnsupportedFormat for an unknown dtype.
    """
    size = file.size
    length = int.from_bytes(file.read(0, _LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else -1
    if (
        not 0
        <= length
        <= min(size - _LENGTH_BYTES, _MAX_HEADER, max(_SMALL_HEADER, size // _HEADER_SHARE))
    ):
        raise ValueError(
            f"{file.path} is not a valid safetensors file: its header of {length} bytes does not fit into {size}"
        )
    begin = _LENGTH_BYTES + length
    try:
        entries = json.loads(file.read(_LENGTH_BYTES, begin))
        stored = {
            name: _stored(name, entry, begin, size)
            for name, entry in entries.items()
            if name != "__metadata__"
        }
        _check_places(stored.values(), begin, size)
        return stored
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{file.path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{file.path} is not a valid safetensors file: its header is damaged ({describe(error)})"
        ) from error


def _check_places(stored: Iterable[StoredTensor], begin: int, size: int) -> None:
    end = begin
    for tensor in sorted(stored, key=lambda tensor: (tensor.start, tensor.numel)):
        if tensor.start != end:
            raise ValueError(
                f"a tensor begins at byte {tensor.start - begin}, and the one before it ends at {end - begin}"
            )
        end += tensor.numel * tensor.dtype.itemsize
    if end != size:
        raise ValueError(f"the tensors end at byte {end - begin} of {size - begin}")


def _stored(name: str, entry: Any, begin: int, size: int) -> StoredTensor:
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    shape = entry["shape"]
    if entry["dtype"] in _OTHERS:
        raise UnsupportedFormat(
            f"{name:.200} has the format {entry['dtype']}, which is not supported"
        )
    if entry["dtype"] not in dtypes:
        raise ValueError(
            f"a tensor has dtype {entry['dtype']!r:.40}, not one of {', '.join(dtypes)}"
        )
    dtype = dtypes[entry["dtype"]]
    (first, last) = entry["data_offsets"]
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError("a shape or an offset is not a whole number")
    numel = math.prod(shape)
    if not first <= last <= size - begin or last - first != numel * dtype.itemsize:
        raise ValueError(
            f"a tensor of shape {shape!s:.80} has bytes {first:.6g} to {last:.6g} of {size - begin}"
        )
    return StoredTensor(dtype, numel, begin + first, tuple(shape))
