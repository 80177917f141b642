"""Files that commands write: a place that takes none is refused before the work, and what fails after all is one line too.

Test: pytest tests/test_perf_outputs.py
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .config import check


def check_file(flag: str, file: str | Path | None) -> None:
    """Raises ValueError for a place that cannot be a file; None: the flag was not given."""
    if file is None:
        return
    check(str(file) not in ("", "."), f"{flag} {str(file)!r} is no name: give a file")
    folder = Path(file).absolute().parent
    check(folder.is_dir(), f"{flag} {file}: {folder} is not a directory: make it, or give another file")
    check(not Path(file).is_dir(), f"{flag} {file} is a directory: give a file in it")


def check_picture(file: str | Path | None) -> None:
    """The same of --png, which needs matplotlib, too."""
    check_file("--png", file)
    check(file is None or importlib.util.find_spec("matplotlib") is not None,
          f"--png {file} needs matplotlib: pip install matplotlib, or leave --png out")


@contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    """Around the writing itself: the system's refusal as a ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {file}: cannot be written ({error.strerror}); give another file") from None
