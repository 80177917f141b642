"""Text of a file, decompressed if needed, in blocks and lines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...text.input_errors import reading
from ...text.optional_packages import optional_package

BLOCK = 2**16  # bytes that are read at a time
# bytes that are decompressed at a time: gzip makes at most 66 MB of them, Zstandard 67 MB
PACKED_BLOCK = {".gz": 2**16, ".zst": 2**11}
LARGEST_DOCUMENT = 2**27  # bytes; a compressed file of a few KB can have lines of many GB
LARGEST_FLAG = "--max-document-bytes"
MAX_WINDOW = 2**31  # of Zstandard: zstd --long=31 writes such files
# number from 1, content, bytes of the file that were read up to its end
Record = tuple[int, bytes, int]


def check_size(path: str, where: str, size: int, largest: int) -> None:
    """Raise ValueError if a document is longer than `largest`. where: the document in the file, or "" """
    if size > largest:
        raise ValueError(
            f"--input {path}: {where}longer than {largest} bytes: is it text? If so, split it, or raise "
            f"{LARGEST_FLAG} of preprocess and vocabulary"
        )


def head_of(path: str, packed: str, size: int = BLOCK) -> tuple[bytes, bool]:
    """Return at least the first `size` bytes, or all, and True if there are more."""
    head = b""
    for block, _ in text_blocks(path, packed):
        head += block
        if len(head) >= size:
            return head, True
    return head, False


def text_blocks(path: str, packed: str) -> Iterator[tuple[bytes, int]]:
    """Yield text, decompressed if needed, and the file bytes read."""
    if packed:
        yield from decompressed_blocks(path, packed)
        return
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block, file.tell()


def decompressed_blocks(path: str, packed: str) -> Iterator[tuple[bytes, int]]:
    """Yield (block, compressed bytes read). Raises EOFError for a truncated file. packed: .gz or .zst"""
    start: Callable[[], Any] = partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
    if packed == ".zst":
        zstandard = optional_package("zstandard", "data", f"--input {path}")
        start = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj
    with reading(path), open(path, "rb") as file:
        frame = start()
        begun = False
        while data := file.read(PACKED_BLOCK[packed]):
            while data:
                block = frame.decompress(data)
                begun = True
                yield block, file.tell()
                data = frame.unused_data if frame.eof else b""
                if frame.eof:
                    # gzip may pad with zeros
                    frame = start()
                    begun = False
                    data = data.lstrip(b"\0")
        if begun:
            raise EOFError("its compressed data has no end")


def lines(path: str, packed: str, largest: int) -> Iterator[Record]:
    """Yield (number, line, file bytes read). Raises ValueError for a line above `largest` bytes."""
    number = 1
    rest = [b""]
    size = 0
    read = 0
    for block, read in text_blocks(path, packed):
        first, *others = block.split(b"\n")
        rest.append(first)
        size += len(first)
        check_size(path, f"line {number} is ", size, largest)
        for line in others:
            yield number, b"".join(rest), read
            number += 1
            rest = [line]
            size = len(line)
            check_size(path, f"line {number} is ", size, largest)
    yield number, b"".join(rest), read


def whole(path: str, packed: str, largest: int) -> bytes:
    blocks = []
    size = 0
    for block, _ in text_blocks(path, packed):
        size += len(block)
        check_size(path, "is ", size, largest)
        blocks.append(block)
    return b"".join(blocks)
