"""Damage to files, for the tests of damaged and of wrong input."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

EXTREMES = (
    b"\xff" * 8,
    b"\0" * 8,
    b"\x7f" + b"\xff" * 7,
    b"\xff" * 7 + b"\x7f",
    b"\x01" + b"\0" * 7,
)
MISSING = "(removed)"
DAMAGES = ("bit", "cut", "append", "insert", "extreme", "remove", "swap")
OTHER_KINDS = (
    "a FIFO",
    "a folder",
    "a device",
    "Too many levels of symbolic links",
)  # with the words of their refusal


def damaged(content: bytes, kind: str, i: int, j: int, noise: bytes) -> bytes:
    """The content with one of DAMAGES at position i, and j for a swap. noise: bytes that come in; as many are taken out."""
    data = bytearray(content)
    if kind == "bit":
        data[i] ^= 1 << j % 8
    elif kind == "cut":
        del data[i:]
    elif kind == "append":
        data += noise
    elif kind == "insert":
        data[i:i] = noise
    elif kind == "extreme":
        data[i : i + 8] = EXTREMES[j % len(EXTREMES)]
    elif kind == "remove":
        del data[i : i + len(noise)]
    else:
        data[i], data[j] = data[j], data[i]
    return bytes(data)


def damages(content: bytes, count: int) -> Iterator[bytes]:
    """Yield as many damaged contents, the same ones each time."""
    rng = random.Random(0)
    for _ in range(count):
        places = (rng.randrange(len(content)), rng.randrange(len(content)))
        yield damaged(content, rng.choice(DAMAGES), *places, rng.randbytes(rng.randrange(1, 40)))


def changed(contents: Any, where: Sequence[Any], value: Any) -> Any:
    """Return a copy of JSON contents with `value` at a path, or without the entry there if it is MISSING."""
    contents = copy.deepcopy(contents)
    owner = contents
    for step in where[:-1]:
        owner = owner[step]
    if value is MISSING:
        del owner[where[-1]]
    else:
        owner[where[-1]] = value
    return contents


def replace(path: Path, kind: str) -> None:
    """Put something of another kind in the place of a file."""
    remove(path)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else path.name)


def remove(path: Path) -> None:
    """Whatever is there."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
