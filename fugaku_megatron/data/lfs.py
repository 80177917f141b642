"""Git LFS pointers: three lines of text in a repository instead of a large file that was not downloaded.

A pointer begins with "version" and the address of its format. Left out: downloading the file, which `git lfs pull` does.
"""

from __future__ import annotations

import os

FIRST_BYTES = b"version https://git-lfs.github.com/spec/"
POINTER = "it is a Git LFS pointer: run git lfs pull"


def is_pointer(path: str | os.PathLike) -> bool:
    """True for a regular file that is a pointer. Raises OSError if the file cannot be read."""
    with open(path, "rb") as file:
        return file.read(len(FIRST_BYTES)) == FIRST_BYTES
