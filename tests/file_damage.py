"""Damage to files, for the tests of damaged and of wrong input."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
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
    """Damage a content at position i, and j for a swap. noise: bytes to insert, or as many to remove"""
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


def changed(contents: Any, path: str, value: Any) -> Any:
    """Return a copy of JSON contents with `value` at a path, or without the entry there if it is MISSING.

    path: keys and indices of arrays, such as shards/0/offset
    """
    contents = copy.deepcopy(contents)
    owner = contents
    steps = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in steps[:-1]:
        owner = owner[step]
    if value is MISSING:
        del owner[steps[-1]]
    else:
        owner[steps[-1]] = value
    return contents


def replace(path: Path, kind: str) -> None:
    """Replace a file by something of another kind."""
    remove(path)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else path.name)


def remove(path: Path) -> None:
    """Remove a file, a link or an empty directory, if there is any."""
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
