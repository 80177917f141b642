"""Megatron-LM's indexed dataset: tokens in <prefix>.bin, sequence lengths and offsets in
<prefix>.idx.

.idx, little-endian: b"MMIDIDX\\0\\0", version u64 = 1, dtype code u8, n u64 sequences, d u64 document
indices; lengths int32[n] in tokens, pointers int64[n] in bytes into .bin, document indices
int64[d]: each document's first sequence, and n. A trailing int8[n] (Megatron's multimodal modes) is
ignored. Left out: object storage.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ..comm.agreement import on_root
from ..comm.base import Comm
from ..text.named_files import JsonObject, StrPath, unreadable
from ..text.written_files import new_file
from .files import ReadFile, Status, check_status
from .index_arrays import BLOCK

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct(
    "<9sQBQQ"
)  # magic, version, dtype code, sequence count, document index count
ELEMENT_TYPES = {
    1: "u1",
    2: "i1",
    3: "<i2",
    4: "<i4",
    5: "<i8",
    6: "<f8",
    7: "<f4",
    8: "<u2",
}  # dtype code -> numpy's name
ELEMENT_CODES = {np.dtype(name): code for code, name in ELEMENT_TYPES.items()}
UINT16_VOCAB = 65500  # Megatron's bound: vocabularies below it are stored as uint16
PROBE = 4096  # bytes of each of PROBES blocks of .bin that a checkpoint's record looks at
PROBES = 16
REBUILD = "write both files again with fugaku-megatron preprocess, or copy both again"


def best_dtype(vocab_size: int) -> np.dtype:
    """Return Megatron's dtype: uint16 below 65500 tokens, else int32."""
    return np.dtype("<u2" if vocab_size < UINT16_VOCAB else "<i4")


def _file_size(path: str) -> int:
    reason = unreadable(path)
    if reason is None:
        return os.stat(path).st_size
    remedy = f"is --data-path right? If it is, {REBUILD}"
    if path.endswith((".bin.bin", ".idx.idx", ".bin.idx", ".idx.bin")):
        remedy = "pass the prefix without .bin or .idx"
    text = path.removesuffix(".idx").removesuffix(".bin")
    if not os.path.lexists(path) and os.path.exists(text):
        remedy = (
            f"{text} is no prefix of such files: pass the --output-prefix of fugaku-megatron preprocess --input {text} "
            "(of chats, with --chat)"
        )
    raise ValueError(
        f"{path}: cannot be read ({reason}); a dataset is a .bin and an .idx file: {remedy}"
    )


def check_files(prefix: str) -> None:
    for suffix in (".idx", ".bin"):
        _file_size(prefix + suffix)


class Header(NamedTuple):
    """Checked .idx contents; numbers: sequences, tokens; size in bytes.

    The sequence lengths' CRC-32 identifies the sample order.

    begin: bytes of .bin before the first token
    """

    dtype: str
    sequences: int
    tokens: int
    size: int
    lengths_crc32: str
    begin: int = 0


def _check_places(path: str, stream: BinaryIO, sequences: int, itemsize: int) -> tuple[int, str]:
    """Return (tokens, the lengths' CRC-32). Raises ValueError unless sequences are adjacent."""
    crc = 0
    ended = 0
    for start in range(0, sequences, BLOCK):
        count = min(BLOCK, sequences - start)
        lengths = _read_part(stream, "<i4", HEADER.size + 4 * start, count)
        pointers = _read_part(stream, "<i8", HEADER.size + 4 * sequences + 8 * start, count)
        ends = np.cumsum(lengths, dtype=np.int64) * itemsize + ended
        if lengths.min() < 0 or pointers[0] != ended or not np.array_equal(pointers[1:], ends[:-1]):
            raise ValueError(
                f"{path}: its sequence pointers do not follow from its sequence lengths: corrupt; {REBUILD}"
            )
        crc = zlib.crc32(lengths.data, crc)
        ended = int(ends[-1])
    return ended // itemsize, f"{crc:08x}"


def _check_documents(path: str, stream: BinaryIO, sequences: int, documents: int) -> None:
    last = 0
    begin = HEADER.size + 12 * sequences
    for start in range(0, documents, BLOCK):
        part = _read_part(stream, "<i8", begin + 8 * start, min(BLOCK, documents - start))
        if start == 0 and part[0] != 0 or part[0] < last or np.any(np.diff(part) < 0):
            break
        last = int(part[-1])
    else:
        if documents and last == sequences:
            return
    raise ValueError(
        f"{path}: its document indices do not run from 0 to its {sequences} sequences: corrupt; {REBUILD}"
    )


def _read_part(stream: BinaryIO, dtype: str, offset: int, count: int) -> np.ndarray:
    stream.seek(offset)
    return np.fromfile(stream, dtype, count)


def _read_index(prefix: str) -> Header:
    path = prefix + ".idx"
    size = _file_size(path)
    bin_size = _file_size(prefix + ".bin")
    with open(path, "rb") as stream:
        header = stream.read(HEADER.size)
        if not header.startswith(MAGIC):
            raise ValueError(
                f"{path}: begins with {header[:9]!r}, not with {MAGIC!r}: not a Megatron index file; {REBUILD}"
            )
        if len(header) < HEADER.size:
            raise ValueError(
                f"{path}: truncated: {size} bytes, but its header alone takes {HEADER.size}; {REBUILD}"
            )
        _, version, code, sequences, documents = HEADER.unpack(header)
        if version != VERSION or code not in ELEMENT_TYPES:
            raise ValueError(
                f"{path}: version {version}, dtype code {code}; known: version {VERSION}, codes 1 to 8; {REBUILD}"
            )
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size not in (expected, expected + sequences):
            what = "truncated" if size < expected else "too long"
            raise ValueError(
                f"{path}: {what}: {size} bytes, but its header announces {expected}; {REBUILD}"
            )
        dtype = np.dtype(ELEMENT_TYPES[code])
        tokens, crc = _check_places(path, stream, sequences, dtype.itemsize)
        _check_documents(path, stream, sequences, documents)
    _check_bin_size(prefix, bin_size, tokens, dtype)
    return Header(ELEMENT_TYPES[code], sequences, tokens, size, crc)


def _check_bin_size(prefix: str, size: int, tokens: int, dtype: np.dtype) -> None:
    expected = tokens * dtype.itemsize
    if size != expected:
        raise ValueError(
            f"{prefix}.bin: {size} bytes, but {prefix}.idx announces {expected} ({tokens} tokens in {dtype.name}); "
            f"{REBUILD}"
        )


@dataclass(frozen=True)
class StoredTokens:
    """Consecutive .bin tokens. Slicing reads nothing; numpy's asarray reads all."""

    data: IndexedDataset
    place: range

    def __len__(self) -> int:
        return len(self.place)

    def __getitem__(self, part: slice) -> StoredTokens:
        return StoredTokens(self.data, self.place[part])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        tokens = self.data.read_tokens(self.place.start, len(self.place))
        return tokens if dtype is None else tokens.astype(dtype)


class IndexedDataset:
    """Sequence reader; `data[i]` and `data.get(i, offset, length)` are read-only arrays.

    With `comm` only rank 0 reads and checks .idx; ranks open files on first use. Raises ValueError
    on every rank if a file is missing, truncated, invalid or changed, or the two disagree.
    """

    def __init__(self, prefix: StrPath, comm: Comm | None = None):
        self.prefix = os.fspath(prefix)
        self._files: list[ReadFile] = []
        self._statuses: dict[str, Status] = {}  # by path, of the files that must not change
        self.header = on_root(comm, self._start)
        self.dtype = np.dtype(self.header.dtype)
        self.num_tokens = self.header.tokens

    @property
    def path(self) -> str:
        """File with the tokens."""
        return f"{self.prefix}.bin"

    def _start(self) -> Header:
        header = _read_index(self.prefix)
        self._keep(self.prefix + ".idx")
        self._keep(self.prefix + ".bin")
        return header

    def _keep(self, path: str) -> None:
        self._statuses[path] = Status.of(os.stat(path))

    def __len__(self) -> int:
        return self.header.sequences

    def description(self) -> JsonObject:
        """Return the data that determines the sample order, independent of the folder's path."""
        return {
            "class": "GPTDataset",
            "dataset_path": os.path.basename(self.prefix),
            "sequences": len(self),
            "tokens": self.num_tokens,
            "lengths_crc32": self.header.lengths_crc32,
        }

    def record(self) -> JsonObject:
        return {
            "path": self.prefix,
            "documents": len(self),
            "tokens": self.num_tokens,
            "crc32": f"{zlib.crc32(self.probe()):08x}",
        }

    def probe(self) -> bytes:
        """Return bytes that identify these files: the length checksum, and some .bin blocks."""
        size = self._bin.size
        count = min(PROBE, size)
        places = sorted({(size - count) * i // (PROBES - 1) for i in range(PROBES)})
        blocks = [self._bin.read("u1", place, count).tobytes() for place in places]
        return b"".join([self.header.lengths_crc32.encode(), *blocks])

    def _open(self, path: str) -> ReadFile:
        file = ReadFile(path, self._statuses.get(path))
        self._statuses[path] = file.status
        self._files.append(file)
        return file

    @cached_property
    def _index(self) -> ReadFile:
        path = self.prefix + ".idx"
        size = _file_size(path)
        if size != self.header.size:  # this node's copy may differ
            raise ValueError(
                f"{path}: {size} bytes, but {self.header.size} where rank 0 read it; {REBUILD}"
            )
        return self._open(path)

    @property
    def tokens(self) -> StoredTokens:
        return StoredTokens(self, range(self.num_tokens))

    @cached_property
    def _bin(self) -> ReadFile:
        path = self.prefix + ".bin"
        _check_bin_size(
            self.prefix, _file_size(path), self.num_tokens, self.dtype
        )  # this node's copy may differ
        return self._open(path)

    def read_tokens(self, start: int, count: int) -> np.ndarray:
        count = max(0, min(count, self.num_tokens - start))
        return self._bin.read(self.dtype, self.header.begin + start * self.dtype.itemsize, count)

    def read_lengths(self, start: int, stop: int) -> np.ndarray:
        return self._index.read("<i4", HEADER.size + 4 * start, stop - start)

    def read_pointers(self, start: int, stop: int) -> np.ndarray:
        """Return consecutive .bin offsets in bytes, int64 (stop - start,)."""
        return self._index.read("<i8", HEADER.size + 4 * len(self) + 8 * start, stop - start)

    def check_open(self) -> None:
        """Raise ValueError if an open file was written or truncated. Cheap: no path lookup."""
        for file in self._files:
            file.check_open()

    def check(self) -> None:
        """Raise ValueError for a written, truncated, replaced or removed file."""
        for path, status in self._statuses.items():
            check_status(path, status)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return `length` tokens (default: the rest) from token `offset` on."""
        index = int(index)  # numpy's may be too narrow for a place in the file
        whole = int(self.read_lengths(index, index + 1)[0])
        first = int(self.read_pointers(index, index + 1)[0]) // self.dtype.itemsize
        end = whole if length is None else offset + length
        if not (0 <= offset <= end <= whole and 0 <= first <= self.num_tokens - end):
            self.check_open()
            raise AssertionError(f"tokens {offset} to {end} of a sequence of {whole} at {first}")
        tokens = self.read_tokens(first + offset, end - offset)
        tokens.flags.writeable = False
        return tokens

    def __getitem__(self, index: int) -> np.ndarray:
        return self.get(index)


@contextmanager
def writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be written ({error.strerror}); is --output-prefix right, and its disk not full?"
        ) from None


class IndexedDatasetWriter:
    """Writer for <prefix>.bin and .idx, under temporary names until the end.

    folder: for the temporary files, on the same disk (None: the final folder)
    """

    SUFFIXES: tuple[str, ...] = (".bin", ".idx")  # in the order in which the files get their names

    def __init__(
        self,
        prefix: StrPath,
        dtype: np.dtype | str | type,
        folder: StrPath | None = None,
    ):
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype.kind not in "iu" or self.dtype not in ELEMENT_CODES:
            raise ValueError(
                f"{self.prefix}: tokens cannot be stored as {self.dtype}; use uint16 or int32 (best_dtype)"
            )
        self._lengths = array("i")
        self._documents = array("q", [0])
        aside = (
            self.prefix if folder is None else os.path.join(folder, os.path.basename(self.prefix))
        )
        self._temporary = {suffix: f"{aside}{suffix}.tmp{os.getpid()}" for suffix in self.SUFFIXES}
        self._files: dict[str, BinaryIO] = {}
        try:
            with self.writing():
                for suffix, path in self._temporary.items():
                    file = open(path, "wb", opener=new_file)  # closed by finalize or discard
                    self._files[suffix] = file
        except ValueError:
            self.discard()
            raise

    def writing(self) -> AbstractContextManager[None]:
        return writing(f"{self.prefix}.bin")

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        ids = np.asarray(tokens, None if len(tokens) else self.dtype)
        self._append(ids, np.array([len(ids)]), np.ones(1, np.int64))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append one-sequence documents, `lengths` (documents,); length 0 has no sequence."""
        self._append(tokens, lengths[lengths > 0], np.cumsum(lengths > 0))

    def _append(self, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        bounds = np.iinfo(self.dtype)
        if len(tokens) and not bounds.min <= tokens.min() <= tokens.max() <= bounds.max:
            raise ValueError(
                f"{self.prefix}: token ids {tokens.min()} to {tokens.max()} do not fit {self.dtype.name}; use int32"
            )
        with self.writing():
            self._files[".bin"].write(np.ascontiguousarray(tokens, self.dtype).data)
        self._documents.frombytes((len(self._lengths) + ends).astype("q").tobytes())
        self._lengths.frombytes(lengths.astype("i").tobytes())

    @property
    def num_documents(self) -> int:
        """Sequences so far; an empty document has none."""
        return len(self._lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self._lengths)

    def tokens_of(self, documents: range) -> int:
        return sum(self._lengths[documents.start : documents.stop])

    def summary(self) -> str:
        return f"wrote {self.prefix}.bin and .idx: {self.num_documents} documents, {self.num_tokens} tokens"

    def finalize(self) -> None:
        """Write the index, sync all files and rename them to their final names, .idx last."""
        lengths = np.asarray(self._lengths, "<i4")
        pointers = np.zeros(len(lengths), "<i8")
        np.cumsum(lengths[:-1] * np.int64(self.dtype.itemsize), out=pointers[1:])
        index = self._files[".idx"]
        with self.writing():
            index.write(
                HEADER.pack(
                    MAGIC, VERSION, ELEMENT_CODES[self.dtype], len(lengths), len(self._documents)
                )
            )
            for part in (lengths, pointers, np.asarray(self._documents, "<i8")):
                index.write(part.data)
            self.finish_parts()
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
                file.close()
        if os.path.exists(self.prefix + ".idx"):
            # an interruption between the renames then leaves no .idx, instead of one that belongs to another .bin
            os.remove(self.prefix + ".idx")
        for suffix in self.SUFFIXES:
            os.replace(self._temporary[suffix], self.prefix + suffix)

    def finish_parts(self) -> None:
        """Complete a subclass's files; OSErrors are reported as .bin's."""

    def discard(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # its unwritten rest did not fit the disk
                file.close()
        for path in self._temporary.values():
            if os.path.exists(path):
                os.remove(path)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *_: object) -> None:
        try:
            if exception_type is None:
                self.finalize()
        finally:
            self.discard()
