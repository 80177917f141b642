"""Checks and reads of small files named by a user; large data is read by data/files.py.

Opening a FIFO would block forever, a device never ends, and a Git LFS pointer is a stub for a file that was not downloaded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

StrPath = str | os.PathLike[str]
JsonObject = dict[str, Any]
FIRST_BYTES = b"version https://git-lfs.github.com/spec/"

POINTER = "it is a Git LFS pointer: run git lfs pull"
LARGEST = 2**30  # bytes of a file that is read as a whole

# Names of file types, by stat.S_IFMT.
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def about(place: str) -> Iterator[None]:
    """Begin the messages of the block's ValueErrors with a place."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def unreadable(path: StrPath) -> str | None:
    """Return the reason why `path` cannot be read as a regular file, or None."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        return getattr(error, "strerror", None) or str(error)
    if not stat.S_ISREG(mode):
        return f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file"
    if not os.access(path, os.R_OK):
        return "Permission denied"
    with open(path, "rb") as file:
        return POINTER if file.read(len(FIRST_BYTES)) == FIRST_BYTES else None


def read_text(
    path: StrPath,
    flag: str,
    remedy: str = "pass the path of an existing file",
    largest: int = LARGEST,
) -> str:
    """Return the UTF-8 text of the file that `flag` names. Raises ValueError, one line that ends with `remedy`.

    largest: limit in bytes
    """
    where = f"{flag} {path}".strip()
    reason = unreadable(path)
    if reason:
        raise ValueError(f"{where}: cannot be read ({reason}); {remedy}")
    try:
        with open(path, "rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            raise ValueError(f"{where}: larger than {largest} bytes; is it another file?")
        return content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except OSError as error:
        raise ValueError(f"{where}: cannot be read ({error.strerror}); {remedy}") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 text (byte {error.start}); is it another file?"
        ) from None


def unique_keys(pairs: Iterable[tuple[str, Any]]) -> JsonObject:
    """Build a JSON object, as an object_pairs_hook. Raises ValueError for a duplicate key."""
    values: JsonObject = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {key!r:.60} stands in an object twice: leave one out")
        values[key] = value
    return values
