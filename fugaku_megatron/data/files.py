"""Data files as a user names them: checked before they are opened, and mapped into memory.

Opening a FIFO would wait for ever, and a device never ends."""

from __future__ import annotations

import math
import mmap
import os
import stat
from pathlib import Path

import numpy as np

KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
         stat.S_IFSOCK: "a socket"}  # by stat.S_IFMT


def unreadable(path: str | os.PathLike) -> str | None:
    """Why `path` cannot be read as a regular file, in a few words; None when it can."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        return getattr(error, "strerror", None) or str(error)
    if not stat.S_ISREG(mode):
        return f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}, not a regular file"
    return None if os.access(path, os.R_OK) else "Permission denied"


def read_text(path: str | os.PathLike, flag: str) -> str:
    """The UTF-8 text of the file that `flag` names. ValueError when it cannot be read."""
    reason = unreadable(path)
    if reason:
        raise ValueError(f"{flag} {path}: cannot be read ({reason}); pass the path of an existing file")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error.strerror}); pass the path of an existing file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: not UTF-8 text (byte {error.start}); is it another file?") from None


class MappedFile:
    """One file, opened and mapped once; `array` gives views of it. Raises OSError or ValueError where it cannot be mapped."""

    def __init__(self, path: str | os.PathLike) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._advise("MADV_RANDOM")

    def _advise(self, advice: str, *place: int) -> None:
        if hasattr(mmap, advice):
            self._map.madvise(getattr(mmap, advice), *place)

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return len(self._map)

    def array(self, dtype: np.dtype | str, shape: tuple[int, ...], offset: int = 0) -> np.ndarray:
        """An array of this shape that begins at byte `offset`."""
        return np.frombuffer(self._map, dtype, math.prod(shape), offset).reshape(shape)

    def npy(self) -> np.ndarray:
        """The array of a .npy file. ValueError when it is not one, or not whole."""
        self._map.seek(0)
        np.lib.format.read_magic(self._map)
        shape, _, dtype = np.lib.format.read_array_header_1_0(self._map)
        return self.array(dtype, shape, self._map.tell())

    def expect(self, begin: int, end: int) -> None:
        """Bytes [begin, end) will be read next: where they lie in several pages, the system reads these at once."""
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        if end - first > mmap.PAGESIZE:
            self._advise("MADV_WILLNEED", first, end - first)

    def release(self) -> None:
        """Release the pages that were read; they are mapped again when they are needed."""
        self._advise("MADV_DONTNEED")
