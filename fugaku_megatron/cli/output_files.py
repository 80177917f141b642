"""Output files on a command line: checks before anything expensive starts, and write errors."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..config.fields import check
from ..text.named_files import StrPath
from ..text.written_files import check_link, named_file


def check_file(flag: str, file: str | Path | None) -> None:
    """Raise ValueError for a file that cannot be written, or for another name than a file's."""
    if file is None:
        return
    path = Path(file)
    check(str(file) not in ("", "."), f"{flag} {str(file)!r} is not a name: pass a file")
    check(
        "\0" not in str(file),
        f"{flag} {str(file)!r} holds a zero byte, which no name may: pass another file",
    )
    try:
        folder = path.absolute().parent
        check(
            folder.is_dir(),
            f"{flag} {file}: {folder} is not a directory: make it, or pass another file",
        )
        check(not path.is_dir(), f"{flag} {file} is a directory: pass a file in it")
        check(
            not path.is_fifo(),
            f"{flag} {file} is a FIFO, which would wait for a reader: pass a file",
        )
        check_link(file)
        writable = os.access(path if path.exists() else folder, os.W_OK)
    except OSError as error:  # e.g. the name is too long, or a folder is closed
        raise ValueError(f"{flag} {file}: {error.strerror}: pass another file") from None
    check(writable, f"{flag} {file}: no permission to write there: pass another file")


def check_picture(file: str | Path | None) -> None:
    check_file("--png", file)
    check(
        file is None or importlib.util.find_spec("matplotlib") is not None,
        f"--png {file} needs matplotlib: pip install matplotlib, or this package with its extra [log], or leave --png out",
    )


def shown(text: str) -> str:
    """Replace path bytes that are not valid UTF-8 by U+FFFD; fonts refuse them."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


@contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"{flag} {file}: cannot be written ({error.strerror}); pass another file"
        ) from None


@contextmanager
def drawing(path: StrPath, width: float, height: float, dpi: int = 120) -> Iterator[Any]:
    """Yield an empty matplotlib figure, and write it into `path`. OSError for a file error. width, height: inches"""
    from matplotlib.figure import Figure  # opens no window, unlike pyplot's

    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    with open(path, "wb", opener=named_file) as file:
        figure.savefig(file, dpi=dpi, format="png")


@contextmanager
def picture(path: StrPath, width: float, height: float, dpi: int = 120) -> Iterator[Any]:
    """Yield a figure as `drawing`, for the value of --png."""
    with writing("--png", os.fspath(path)), drawing(path, width, height, dpi) as figure:
        yield figure
