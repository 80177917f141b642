"""Text of a file, decompressed if needed, in blocks and lines."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ...text.input_errors import reading
from ...text.optional_packages import optional_package

BLOCK = 2**16  # bytes that are read at a time
MAX_WINDOW = 2**31  # of Zstandard: zstd --long=31 writes such files
# number from 1, content, bytes of the file that were read up to its end
Record = tuple[int, bytes, int]


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
    start: Callable[[], Any] = partial(zlib.decompressobj, zlib.MAX_WBITS | 16)
    if packed == ".zst":
        zstandard = optional_package("zstandard", "data", f"--input {path}")
        start = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj
    with reading(path), open(path, "rb") as file:
        frame = start()
        begun = False
        while data := file.read(BLOCK):
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


def lines(path: str, packed: str) -> Iterator[Record]:
    if not packed:
        read = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                read += len(line)
                yield number, line, read
        return
    number = 0
    rest = [b""]
    read = 0
    for block, read in decompressed_blocks(path, packed):
        first, *others = block.split(b"\n")
        rest.append(first)
        for line in others:
            number += 1
            yield number, b"".join(rest), read
            rest = [line]
    yield number + 1, b"".join(rest), read
