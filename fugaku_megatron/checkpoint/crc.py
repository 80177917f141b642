"""CRC-32 of what passes by: of every block of a file, and of the whole put together from those, so that nothing is read again.

A CRC detects accidents, not attacks. CRC-32 is the fastest that the standard library has: 6.4 GB/s where SHA-256 ran at 1.9 and
Adler-32 at 3.8 (one core of an AMD EPYC of family 26, zlib 1.2.13).
"""

from __future__ import annotations

import zlib
from functools import cache
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20  # what is read at least to verify a byte; a manifest has 8 digits for each
DIGITS = 8
_POLYNOMIAL, _ONE, _BYTE = 0xEDB88320, 1 << 31, 1 << 23  # reflected: the highest bit is x^0; x^8


class BlockChecksums:
    """The CRC-32 of each block of the bytes that are added; the last block may be shorter."""

    def __init__(self) -> None:
        self.size, self._open = 0, 0
        self._closed: list[int] = []

    def add(self, data: memoryview) -> None:
        """Bytes that follow those added before."""
        done = 0
        while done < len(data):
            part = data[done : done + BLOCK_BYTES - self.size % BLOCK_BYTES]
            self._open = zlib.crc32(part, self._open)
            done, self.size = done + len(part), self.size + len(part)
            if self.size % BLOCK_BYTES == 0:
                self._closed.append(self._open)
                self._open = 0

    def record(self) -> dict[str, str | int]:
        """Size and checksums as a manifest has them: "crc32" of all, "blocks" of one block after the other."""
        rest = self.size % BLOCK_BYTES
        whole = 0
        for crc in self._closed:
            whole = combine(whole, crc, BLOCK_BYTES)
        blocks = [*self._closed, *([self._open] if rest else [])]
        whole = combine(whole, self._open, rest) if rest else whole
        return {"size": self.size, "crc32": digits(whole), "block_size": BLOCK_BYTES, "blocks": "".join(map(digits, blocks))}


def digits(crc: int) -> str:
    return f"{crc:0{DIGITS}x}"


def combine(first: int, second: int, length: int) -> int:
    """The CRC-32 of some bytes and `length` more, from that of each (zlib's crc32_combine, which Python's zlib leaves out)."""
    return _multiply(_zeros(length), first) ^ second


@cache
def _zeros(length: int) -> int:
    """x^(8 length) modulo the polynomial: what `length` zero bytes multiply a checksum by."""
    power, square = _ONE, _BYTE
    while length:
        if length & 1:
            power = _multiply(square, power)
        square, length = _multiply(square, square), length >> 1
    return power


def _multiply(a: int, b: int) -> int:
    """a b modulo the polynomial of CRC-32, all reflected."""
    result, bit = 0, _ONE
    while bit:
        if a & bit:
            result ^= b
        b = (b >> 1) ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return result


def check_size(path: Path, entry: dict[str, Any]) -> None:
    """Raise ValueError unless a file is there with the size of its entry."""
    if not path.exists():
        raise ValueError(f"{path} is missing")
    size = path.stat().st_size
    if size != entry["size"]:
        raise ValueError(f"{path} is {size} bytes, manifest says {entry['size']}")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")


def verify_file(path: Path, entry: dict[str, Any]) -> None:
    """Raise ValueError unless a file is there with the size and checksum of its entry."""
    check_size(path, entry)
    crc = crc32(path)
    if crc != entry["crc32"]:
        raise ValueError(f"{path} has CRC-32 {crc}, manifest says {entry['crc32']}: its contents were altered")


def crc32(path: Path) -> str:
    """CRC-32 of a file, in hexadecimal."""
    crc, buffer = 0, memoryview(bytearray(BLOCK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return digits(crc)
