"""Files that commands write: a path that cannot be written is refused before the work, and a failure while writing is one line."""

from __future__ import annotations

import importlib.util
import os
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .checks import check


def check_file(flag: str, file: str | Path | None) -> None:
    """Raises ValueError, one line, when `file`, the value of `flag`, cannot be written. None: the flag was left out."""
    if file is None:
        return
    check(str(file) not in ("", "."), f"{flag} {str(file)!r} is not a name: pass a file")
    try:
        _check_place(flag, file)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"{flag} {file}: {error.strerror}: pass another file") from None


def _check_place(flag: str, file: str | Path) -> None:
    folder = Path(file).absolute().parent
    check("\0" not in str(file), f"{flag} {str(file)!r} holds a zero byte, which no name may: pass another file")
    check(folder.is_dir(), f"{flag} {file}: {folder} is not a directory: make it, or pass another file")
    check(not Path(file).is_dir(), f"{flag} {file} is a directory: pass a file in it")
    check(not Path(file).is_fifo(), f"{flag} {file} is a FIFO, which would wait for a reader: pass a file")
    writable = os.access(file if Path(file).exists() else folder, os.W_OK)
    check(writable, f"{flag} {file}: no permission to write there: pass another file")


def check_picture(file: str | Path | None) -> None:
    """check_file for --png, which also needs matplotlib."""
    check_file("--png", file)
    check(file is None or importlib.util.find_spec("matplotlib") is not None,
          f"--png {file} needs matplotlib: pip install matplotlib, or this package with its extra [log], or leave --png out")


@contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    """A block that writes `file`, the value of `flag`: an OSError in it becomes a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {file}: cannot be written ({error.strerror}); pass another file") from None


def pipe_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table between pipes, aligned to the right except for the last column."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows)]
    rule = "| " + " | ".join("-" * (width - 1) + ":" for width in widths[:-1]) + " | " + "-" * widths[-1] + " |"
    padded = [[" " * (w - _width(cell)) + cell for cell, w in zip(row[:-1], widths)] + [row[-1].ljust(widths[-1])] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return [lines[0], rule, *lines[1:]]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in cell)
