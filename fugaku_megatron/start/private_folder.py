"""Private folders and files in a directory that other users can write, such as /dev/shm or /tmp.

Another user can create any name there first, as a folder or link. Therefore a folder must belong to this user and be
closed to others, and a file is never opened through a link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def is_private(folder: Path) -> bool:
    """Return True for an existing folder, not a link, that only this user owns and may enter."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and is_closed


def make_private(folder: Path) -> None:
    """Create a private folder, or accept an existing one. Raises PermissionError otherwise."""
    try:
        os.mkdir(folder, mode=0o700)
    except FileExistsError:
        if not is_private(folder):
            raise PermissionError(
                f"{folder} is not a folder that only this user (number {os.geteuid()}) may enter: "
                "another user made it, or its permissions were changed; remove it"
            ) from None


def create(file: Path) -> BinaryIO:
    """Open a new file for reading and writing. Raises FileExistsError for an existing name, also a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(file, flags, mode=0o600), "w+b")
