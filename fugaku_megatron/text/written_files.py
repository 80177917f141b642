"""Files and folders written where other users can write, such as /dev/shm, /tmp or a group's directory.

Another user can create any name there first, as a file, folder or link. A file with a name that the program chooses is therefore
new, or opened without following a link; a name that the user chose may be a link of the user or of root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from typing import TextIO

from .named_files import StrPath

_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC
_MODE = 0o666


def new_file(path: str, flags: int) -> int:
    """Open a new file in place of any other, as an `opener`: a link is removed, never followed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | _NO_LINK, _MODE)


def no_link(path: str, flags: int) -> int:
    """Open a file that may exist, as an `opener`. Raises OSError for a link."""
    return os.open(path, flags | _NO_LINK, _MODE)


def named_file(path: str, flags: int) -> int:
    """Open a file that the user named, as an `opener`. Raises PermissionError for another user's link."""
    check_link(path)
    return os.open(path, flags | os.O_CLOEXEC, _MODE)


def check_link(path: StrPath) -> None:
    """Raise PermissionError for a link that another user made in a directory that others can write."""
    try:
        status = os.lstat(path)
        folder = os.stat(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return
    if not stat.S_ISLNK(status.st_mode) or status.st_uid in (os.geteuid(), 0):
        return
    if folder.st_mode & 0o022:
        reason = f"it is a link of another user (number {status.st_uid}), which is not followed"
        raise PermissionError(errno.EPERM, reason, os.fspath(path))


def write_text(path: StrPath, text: str) -> None:
    """Write a new file with a name that the program chooses, and wait for the disk."""
    with open(path, "w", encoding="utf-8", opener=new_file) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def reopened(path: Path, text: str) -> TextIO:
    """Replace a file by another with the text, and open that to append: a lost process still writes into the old file."""
    make_folder(path.parent)
    aside = path.with_name(f"{path.name}.tmp")
    write_text(aside, text)
    aside.replace(path)
    return open(path, "a", encoding="utf-8", opener=no_link)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, or accept an existing one. Raises PermissionError as `check_link`."""
    for each in (folder, *folder.absolute().parents):
        check_link(each)
    folder.mkdir(parents=True, exist_ok=True)


def make_own(folder: Path) -> None:
    """Create a folder, or accept one of this user. Raises PermissionError for a link or another user's."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        reason = "it is a link or another user's, and not a folder of this user: remove it"
        raise PermissionError(errno.EPERM, reason, os.fspath(folder))


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
