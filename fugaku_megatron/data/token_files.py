"""Token files of llm.c, modded-nanogpt and nanoGPT as --data-path, read in place.

A file of llm.c or modded-nanogpt has a header of 256 int32 (magic, version, number of tokens): 20240520 with version 1 and
uint16 tokens, 20240801 with version 7 and uint32. A file of nanoGPT is uint16 tokens alone. Sources: dev/data/data_common.py of
llm.c, data/openwebtext/prepare.py of nanoGPT.

None of them says where a document begins: pieces of PIECE tokens stand for documents in --split and in the order of samples.
"""

from __future__ import annotations

import os
import zlib
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..comm.base import Comm
from ..text.named_files import StrPath, unreadable
from .files import ReadFile
from .indexed import Header, IndexedDataset

SUFFIX = ".bin"
PIECE = 2**20  # tokens
HEADER_BYTES = 256 * 4
REMEDY = "write it again with the data script of llm.c, modded-nanogpt or nanoGPT, or copy it again"


class _Format(NamedTuple):
    """A format. dtype: of a token"""

    magic: int
    version: int
    dtype: str


FORMATS = (_Format(20240520, 1, "<u2"), _Format(20240801, 7, "<u4"))
PLAIN = "<u2"  # of a file without a header


def is_token_file(path: StrPath) -> bool:
    """Return whether --data-path names a token file: a .bin file without the .idx file of an indexed dataset."""
    name = os.fspath(path)
    index = f"{name.removesuffix(SUFFIX)}.idx"
    return name.endswith(SUFFIX) and os.path.isfile(name) and not os.path.exists(index)


def open_tokens(path: StrPath, comm: Comm | None = None) -> IndexedDataset:
    """Open a token file or the prefix of an indexed dataset. Raises ValueError on every rank."""
    return TokenFile(path, comm) if is_token_file(path) else IndexedDataset(path, comm)


def read_header(path: str) -> Header:
    """Return a token file's contents, with pieces as sequences. Raises ValueError if it is not one."""
    if reason := unreadable(path):
        raise ValueError(f"{path}: cannot be read ({reason}): is --data-path right?")
    size = os.stat(path).st_size
    words = [int(word) for word in np.fromfile(path, "<i4", 3)]
    known = next((each for each in FORMATS if words[:1] == [each.magic]), None)
    begin = HEADER_BYTES if known else 0
    dtype = np.dtype(known.dtype if known else PLAIN)
    tokens, rest = divmod(size - begin, dtype.itemsize)
    if known and words[1:2] != [known.version]:
        raise ValueError(
            f"{path}: magic {known.magic} with version {words[1:2]}; known: version {known.version}: {REMEDY}"
        )
    if known and (rest or words[2:] != [tokens]):
        raise ValueError(
            f"{path}: {size} bytes, but its header announces {words[2:]} tokens of {dtype.itemsize} bytes: {REMEDY}"
        )
    if rest or not tokens:
        raise ValueError(
            f"{path}: its {size} bytes are no tokens of {dtype.itemsize} bytes: {REMEDY}"
        )
    pieces = -(-tokens // PIECE)
    crc = zlib.crc32(_lengths(tokens, 0, pieces).data)
    return Header(dtype.str, pieces, tokens, size, f"{crc:08x}", begin)


def _lengths(tokens: int, start: int, stop: int) -> np.ndarray:
    """Return the tokens of consecutive pieces, int32 (stop - start,)."""
    begins = PIECE * np.arange(start, stop, dtype=np.int64)
    return np.minimum(tokens - begins, PIECE).astype(np.int32)


class TokenFile(IndexedDataset):
    """Pieces of a token file, with the interface of sequences. Only rank 0 reads the header."""

    @property
    def path(self) -> str:
        return self.prefix

    def _start(self) -> Header:
        header = read_header(self.prefix)
        self._keep(self.prefix)
        return header

    @cached_property
    def _bin(self) -> ReadFile:
        size = os.stat(self.prefix).st_size
        if size != self.header.size:  # this node's copy may differ
            raise ValueError(
                f"{self.prefix}: {size} bytes, but {self.header.size} where rank 0 read it: copy it again"
            )
        return self._open(self.prefix)

    def read_lengths(self, start: int, stop: int) -> np.ndarray:
        return _lengths(self.num_tokens, start, stop)

    def read_pointers(self, start: int, stop: int) -> np.ndarray:
        """Return the offsets of consecutive pieces in bytes from the first token, int64 (stop - start,)."""
        return PIECE * self.dtype.itemsize * np.arange(start, stop, dtype=np.int64)
