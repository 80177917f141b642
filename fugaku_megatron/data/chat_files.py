"""Chats in files: PREFIX.bin and .idx of indexed.py with a sequence for each chat, and PREFIX.mask, which tokens are trained.

.mask, little-endian: b"FMMASK\\0\\0", version u64 = 1, tokens u64, CRC-32 u32 of the sequence lengths, of the first HEAD bytes of
.bin and of the bits that follow; then a bit for each token in the order of .bin, the lowest bit of a byte first, 1 where the token
is trained. The two first CRCs tie the file to its .bin and .idx. In memory a trained token is written as its complement, ~id, so
that one array holds a chat (`signed`, `unsigned`).
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..comm.agreement import on_root
from .files import unreadable
from .indexed import IndexedDataset, IndexedDatasetWriter

if TYPE_CHECKING:
    from ..comm.base import Comm

SUFFIX = ".mask"
MAGIC, VERSION = b"FMMASK\0\0", 1
HEADER = struct.Struct("<8sQQIII")  # magic, version, tokens, CRC-32 of the lengths, of the head of .bin, of the bits
HEAD = 2**26  # bytes of .bin that its CRC-32 covers
BLOCK = 2**20  # bytes of .mask that are read at a time
REMEDY = "write the three files again with fugaku-megatron preprocess --chat, or copy them again"


def signed(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    """int32 (n,): token ids, the complement of those that are trained."""
    return np.where(trained, ~ids, ids).astype(np.int32)


def unsigned(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(token ids, which are trained) of what `signed` made, (n,) each."""
    return np.where(tokens < 0, ~tokens, tokens), tokens < 0


class ChatWriter(IndexedDatasetWriter):
    """Writes .bin, .idx and .mask of chats. It takes what `signed` makes; .idx gets its name last."""

    SUFFIXES = (SUFFIX, *IndexedDatasetWriter.SUFFIXES)

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype | str | type, folder: str | os.PathLike | None = None):
        super().__init__(prefix, dtype, folder)
        self.trained = self.longest = 0
        self._rest = np.empty(0, bool)  # of the bits, those that fill no byte
        self._crc_bits = self._crc_head = self._head = 0
        try:
            with self.writing():
                self._mask = open(self._temporary[SUFFIX], "wb")  # noqa: SIM115 - closed by finalize or discard
        except ValueError:
            super().discard()
            raise
        self._mask.write(bytes(HEADER.size))

    def _append(self, tokens: np.ndarray, lengths: np.ndarray, ends: np.ndarray) -> None:
        ids, trained = unsigned(tokens)
        super()._append(ids, lengths, ends)
        head = np.ascontiguousarray(ids, self.dtype).tobytes()[: HEAD - self._head]
        self._head, self._crc_head = self._head + len(head), zlib.crc32(head, self._crc_head)
        bits = np.concatenate([self._rest, trained])
        whole = len(bits) // 8 * 8
        self._write_bits(bits[:whole])
        self._rest = bits[whole:]
        self.trained, self.longest = self.trained + int(trained.sum()), max([self.longest, *lengths.tolist()])

    def _write_bits(self, bits: np.ndarray) -> None:
        packed = np.packbits(bits, bitorder="little").tobytes()
        self._crc_bits = zlib.crc32(packed, self._crc_bits)
        with self.writing():
            self._mask.write(packed)

    def summary(self) -> str:
        """What was written, in a line."""
        return (f"wrote {self.prefix}.bin, .idx and .mask: {self.num_documents} chats, {self.num_tokens} tokens, {self.trained} of "
                f"them trained ({self.trained / self.num_tokens:.1%}); the longest chat has {self.longest} tokens")

    def finish_parts(self) -> None:
        """The rest of the bits, and the header."""
        self._write_bits(self._rest)
        lengths = zlib.crc32(np.asarray(self._lengths, "<i4").data)
        self._mask.seek(0)
        self._mask.write(HEADER.pack(MAGIC, VERSION, self.num_tokens, lengths, self._crc_head, self._crc_bits))
        self._close(self._mask)

    def discard(self) -> None:
        """Remove the temporary files."""
        with suppress(OSError):  # its unwritten rest did not fit the disk
            self._mask.close()
        super().discard()


class ChatFiles(IndexedDataset):
    """Reader of chats: `get` and the rest as of `IndexedDataset`, and which tokens are trained.

    With `comm` only rank 0 reads and checks the files. Raises ValueError, on every rank, also where .mask is missing, damaged or
    belongs to other files.
    """

    def __init__(self, prefix: str | os.PathLike, comm: Comm | None = None):
        super().__init__(prefix, comm)
        on_root(comm, self._check)

    @property
    def _path(self) -> str:
        return self.prefix + SUFFIX

    def _check(self) -> None:
        check_mask_file(self.prefix)
        with open(self._path, "rb") as file:
            header = file.read(HEADER.size)
            if len(header) < HEADER.size or not header.startswith(MAGIC):
                raise ValueError(f"{self._path}: begins with {header[:8]!r}, not with {MAGIC!r}: not a mask of chats; {REMEDY}")
            _, version, tokens, lengths, head, bits = HEADER.unpack(header)
            if version != VERSION:
                raise ValueError(f"{self._path}: version {version}, and version {VERSION} is known; {REMEDY}")
            if tokens != self.num_tokens:
                raise ValueError(f"{self._path}: it is the mask of {tokens} tokens, and {self.prefix}.bin has {self.num_tokens}; "
                                 f"{REMEDY}")
            own = zlib.crc32(self.tokens[: HEAD // self.dtype.itemsize].view(np.uint8).data)
            if f"{lengths:08x}" != self.header.lengths_crc32 or head != own:
                raise ValueError(f"{self._path}: it belongs to another {self.prefix}.bin of as many tokens; {REMEDY}")
            size, crc = 0, 0
            while block := file.read(BLOCK):
                size, crc = size + len(block), zlib.crc32(block, crc)
        if size != -(-tokens // 8) or crc != bits:
            raise ValueError(f"{self._path}: {size} bytes of bits with CRC-32 {crc:08x}, but its header announces "
                             f"{-(-tokens // 8)} with {bits:08x}: damaged; {REMEDY}")

    @cached_property
    def _bits(self) -> np.ndarray:
        check_mask_file(self.prefix)  # this node's copy may be missing, or another one
        file, size = self._map(self._path), -(-self.num_tokens // 8)
        if file.size != HEADER.size + size:
            raise ValueError(f"{self._path}: {file.size} bytes, but {HEADER.size + size} where rank 0 read it; {REMEDY}")
        return file.array("u1", (size,), HEADER.size)

    def trained(self, index: int, length: int) -> np.ndarray:
        """bool (length,): which of the first tokens of chat `index` are trained."""
        start = int(self.sequence_pointers[index]) // self.dtype.itemsize
        return self._unpacked(start, start + length).astype(bool)

    def count_trained(self, index: int, lengths: np.ndarray) -> int:
        """Trained tokens of consecutive chats from `index` on, of each the first `lengths` (n,) without the very first one."""
        starts = self.sequence_pointers[index : index + len(lengths)] // self.dtype.itemsize
        before = np.cumsum(np.append(0, self._unpacked(int(starts[0]), int(starts[-1]) + int(lengths[-1]))))
        starts = starts - starts[0]
        return int((before[starts + lengths] - before[starts + 1]).sum())

    def _unpacked(self, start: int, stop: int) -> np.ndarray:
        packed = self._bits[start // 8 : -(-stop // 8)]
        return np.unpackbits(packed, bitorder="little")[start % 8 : start % 8 + stop - start]


def check_mask_file(prefix: str) -> None:
    """Raises ValueError where PREFIX.mask cannot be read; its contents are not."""
    if reason := unreadable(prefix + SUFFIX):
        raise ValueError(f"{prefix}{SUFFIX}: cannot be read ({reason}); chats are a .bin, an .idx and a .mask file, which "
                         "fugaku-megatron preprocess --chat writes")


def check_not_chats(prefix: str) -> None:
    """Raises ValueError where PREFIX.mask exists, for a run that would train all tokens."""
    if os.path.exists(prefix + SUFFIX):
        raise ValueError(f"{prefix}{SUFFIX} says which tokens of these chats are trained, and a run without --sft trains all of "
                         "them: pass --sft, or move this file away")
