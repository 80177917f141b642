"""Data files as a user names them: looked at before they are opened, since opening a FIFO waits for ever and a device never ends.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

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
        raise ValueError(f"{flag} {path}: cannot be read ({reason}); give the path of an existing file")
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be read ({error.strerror}); give the path of an existing file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {path}: not UTF-8 text (byte {error.start}); is it another file?") from None
