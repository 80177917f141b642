r"""Tokenized chats in files: PREFIX.bin and .idx with one sequence a chat, PREFIX.mask with trained tokens.

.mask, little-endian: b"FMMASK\0\0", version u64 = 1, tokens u64, CRC-32 u32 of the sequence
lengths, the first HEAD bytes of .bin, and the bits; then a bit a token, lowest bit first, 1 if
trained. Shapes: n tokens.
"""

from __future__ import annotations

import os
import struct
import zlib
from functools import cached_property

import numpy as np

from ...comm.agreement import on_root
from ...comm.base import Comm
from ...text.named_files import StrPath, unreadable
from ..files import ReadFile
from ..indexed import IndexedDataset, IndexedDatasetWriter
from ..token_arrays import TokenArrays

SUFFIX = ".mask"
MAGIC = b"FMMASK\0\0"
VERSION = 1
HEADER = struct.Struct(
    "<8sQQIII"
)  # magic, version, tokens, CRC-32 of the lengths, of the head of .bin, of the bits

HEAD = 2**26  # bytes of .bin that its CRC-32 covers
BLOCK = 2**20  # bytes of .mask that are read at a time
REMEDY = "write the three files again with fugaku-megatron preprocess --chat, or copy them again"


def signed(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """Return int32 (n,): token ids, complemented if trained."""
    return np.where(trained, ~ids, ids).astype(np.int32)


def unsigned(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert `signed`: (token ids, trained), each (n,)."""
    return np.where(tokens < 0, ~tokens, tokens), tokens < 0


class ChatWriter(IndexedDatasetWriter):
    """Writer for .bin, .idx and .mask, fed by `signed`; .idx is renamed last."""

    SUFFIXES = (SUFFIX, *IndexedDatasetWriter.SUFFIXES)

    def __init__(
        self,
        prefix: StrPath,
        dtype: np.dtype | str | type,
        folder: StrPath | None = None,
    ):
        super().__init__(prefix, dtype, folder)
        self.trained = 0
        self.longest = 0
        self._rest = np.empty(0, bool)  # of the bits, those that fill no byte
        self._crc_bits = 0
        self._crc_head = 0
        self._head = 0
        self._files[SUFFIX].write(bytes(HEADER.size))

    def _append(self, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        ids, trained = unsigned(tokens)
        super()._append(ids, lengths, ends)
        head = np.ascontiguousarray(ids, self.dtype).tobytes()[: HEAD - self._head]
        self._head += len(head)
        self._crc_head = zlib.crc32(head, self._crc_head)
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._write_bits(bits[:whole])
        self._rest = bits[whole:]
        self.trained += int(trained.sum())
        self.longest = max([self.longest, *lengths.tolist()])

    def _write_bits(self, bits: np.ndarray) -> None:
        packed = np.packbits(bits, bitorder="little").tobytes()
        self._crc_bits = zlib.crc32(packed, self._crc_bits)
        with self.writing():
            self._files[SUFFIX].write(packed)

    def summary(self) -> str:
        return (
            f"wrote {self.prefix}.bin, .idx and .mask: {self.num_documents} chats, {self.num_tokens} tokens, {self.trained} of "
            f"them trained ({self.trained / self.num_tokens:.1%}); the longest chat has {self.longest} tokens"
        )

    def finish_parts(self) -> None:
        self._write_bits(self._rest)
        lengths = zlib.crc32(np.asarray(self._lengths, "<i4").data)
        mask = self._files[SUFFIX]
        mask.seek(0)
        mask.write(
            HEADER.pack(MAGIC, VERSION, self.num_tokens, lengths, self._crc_head, self._crc_bits)
        )


class ChatFiles(IndexedDataset):
    """`IndexedDataset` with trained tokens.

    Raises ValueError on every rank, also if .mask is missing, damaged or belongs to other files.
    """

    def __init__(self, prefix: StrPath, comm: Comm | None = None):
        super().__init__(prefix, comm)
        on_root(comm, self._check)

    @property
    def _path(self) -> str:
        return self.prefix + SUFFIX

    def _check(self) -> None:
        check_mask_file(self.prefix)
        self._keep(self._path)
        with open(self._path, "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise ValueError(
                    f"{self._path}: begins with {header[:8]!r}, not with {MAGIC!r}: not a mask of chats; {REMEDY}"
                )
            _, version, tokens, lengths, head, bits = HEADER.unpack(header)
            if version != VERSION:
                raise ValueError(
                    f"{self._path}: version {version}, and version {VERSION} is known; {REMEDY}"
                )
            if tokens != self.num_tokens:
                raise ValueError(
                    f"{self._path}: it is the mask of {tokens} tokens, and {self.prefix}.bin has {self.num_tokens}; "
                    f"{REMEDY}"
                )
            own = 0
            for start in range(0, HEAD // self.dtype.itemsize, BLOCK):
                own = zlib.crc32(self.read_tokens(start, BLOCK).data, own)
            if f"{lengths:08x}" != self.header.lengths_crc32 or head != own:
                raise ValueError(
                    f"{self._path}: it belongs to another {self.prefix}.bin of as many tokens; {REMEDY}"
                )
            size = 0
            crc = 0
            while block := file.read(BLOCK):
                size += len(block)
                crc = zlib.crc32(block, crc)
        if size != -(-tokens // 8) or crc != bits:
            raise ValueError(
                f"{self._path}: {size} bytes of bits with CRC-32 {crc:08x}, but its header announces "
                f"{-(-tokens // 8)} with {bits:08x}: damaged; {REMEDY}"
            )

    @cached_property
    def _bits(self) -> ReadFile:
        check_mask_file(self.prefix)  # this node's copy may be missing, or another one
        file = self._open(self._path)
        size = -(-self.num_tokens // 8)
        if file.size != HEADER.size + size:
            raise ValueError(
                f"{self._path}: {file.size} bytes, but {HEADER.size + size} where rank 0 read it; {REMEDY}"
            )
        return file

    def probe(self) -> bytes:
        return super().probe() + self._bits.read("u1", 0, HEADER.size).tobytes()

    def trained(self, index: int, length: int) -> np.ndarray:
        """Return bool (length,): True for trained tokens among chat `index`'s first ones."""
        index = int(index)
        start = int(self.read_pointers(index, index + 1)[0]) // self.dtype.itemsize
        return self._unpacked(start, start + length).astype(bool)

    def count_trained(self, index: int, lengths: np.ndarray) -> np.ndarray:
        """Count trained tokens, int64 (n,), in chats from `index` on, among the first `lengths`
        without token 0.
        """
        starts = self.read_pointers(index, index + len(lengths)) // self.dtype.itemsize
        before = np.cumsum(
            np.append(0, self._unpacked(int(starts[0]), int(starts[-1]) + int(lengths[-1])))
        )
        starts = starts - starts[0]
        counts: np.ndarray = before[starts + lengths] - before[starts + 1]
        return counts

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        first = start // 8
        end = -(-stop // 8)
        packed = self._bits.read("u1", HEADER.size + first, end - first)
        return np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + stop - start]


class ChatArrays(TokenArrays):
    """In-memory chats with `ChatFiles`'s interface. documents: `signed`, (n,)"""

    def get(self, index: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return unsigned(super().get(index, offset, length))[0]

    def trained(self, index: int, length: int) -> np.ndarray:
        return unsigned(super().get(index, 0, length))[1]

    def count_trained(self, index: int, lengths: np.ndarray) -> np.ndarray:
        counts = [self.trained(index + i, int(n))[1:].sum() for i, n in enumerate(lengths)]
        return np.array(counts, np.int64)


def check_mask_file(prefix: str) -> None:
    """Raise ValueError if PREFIX.mask is unreadable, without checking its contents."""
    if reason := unreadable(prefix + SUFFIX):
        raise ValueError(
            f"{prefix}{SUFFIX}: cannot be read ({reason}); chats are a .bin, an .idx and a .mask file, which "
            "fugaku-megatron preprocess --chat writes"
        )


def check_not_chats(prefix: str) -> None:
    if os.path.exists(prefix + SUFFIX):
        raise ValueError(
            f"{prefix}{SUFFIX} says which tokens of these chats are trained, and a run without --sft trains all of "
            "them: pass --sft, or move this file away"
        )
