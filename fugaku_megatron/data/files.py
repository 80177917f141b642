"""Data files: mapped into memory or read, and a check that they do not change meanwhile."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from ..text.named_files import StrPath


class MappedFile:
    """Array of a .npy file, opened and mapped once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        mapped = np.lib.format.open_memmap(path, mode="r")
        self.array = np.asarray(mapped)
        self._map = cast(mmap.mmap, mapped.base)
        self._map.madvise(mmap.MADV_RANDOM)

    def check(self) -> None:
        """Raise ValueError if the file was truncated: reading beyond its end would raise SIGBUS."""
        size = self._map.size()
        if size < len(self._map):
            raise ValueError(
                f"{self._path}: {size} bytes, and {len(self._map)} when it was opened: it was cut while it was read; "
                "start again, and leave the file alone"
            )

    def release(self) -> None:
        self._map.madvise(mmap.MADV_DONTNEED)


class Status(NamedTuple):
    """File state that a write changes: size, mtime in ns, and inode."""

    size: int
    written: int
    inode: tuple[int, int]

    @staticmethod
    def of(status: os.stat_result) -> Status:
        return Status(status.st_size, status.st_mtime_ns, (status.st_dev, status.st_ino))

    def change(self, now: Status) -> str:
        if now.size != self.size:
            return f"it has {now.size} bytes and had {self.size}"
        if now.inode != self.inode:
            return "it was replaced by another file of this name"
        if now.written != self.written:
            return f"it was written at {_clock(now.written)}, last before at {_clock(self.written)}"
        return ""


def _clock(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(nanoseconds // 10**9))


def check_status(path: str, before: Status) -> None:
    try:
        change = before.change(Status.of(os.stat(path)))
    except OSError as error:
        change = f"it is not there any more ({error.strerror})"
    if change:
        raise changed(path, change)


def changed(path: str, change: str) -> ValueError:
    return ValueError(
        f"{path} changed while it was in use: {change}. Nothing is saved from here on; put the file back and start again, "
        "and training continues from its last checkpoint"
    )


class ReadFile:
    """File read at random positions, which must not change while open.

    Not mapped: truncating a mapped file ends the process by SIGBUS, without a message.
    """

    def __init__(self, path: StrPath, expected: Status | None) -> None:
        self.path = os.fspath(path)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self.status = expected or self._now()
        self.check_open()

    def _now(self) -> Status:
        return Status.of(os.fstat(self._descriptor))

    @property
    def size(self) -> int:
        return self.status.size

    def read(self, dtype: np.dtype | str, offset: int, count: int) -> np.ndarray:
        """Return `count` elements from byte `offset` on. Raises ValueError beyond the end."""
        array = np.empty(count, dtype)
        missing = memoryview(array.view("u1").data)
        while missing:
            try:
                got = os.preadv(self._descriptor, [missing], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, self.path) from None
            if not got:
                change = self.status.change(self._now()) or f"it ends before byte {offset}"
                raise changed(self.path, change)
            missing = missing[got:]
            offset += got
        return array

    def check_open(self) -> None:
        """Raise ValueError if the open file was written or truncated; does not detect a replacement
        under its name.
        """
        if change := self.status.change(self._now()):
            raise changed(self.path, change)
