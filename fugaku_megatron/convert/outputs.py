"""A directory that appears when it is whole, and not before: written under a temporary name, and renamed at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..checkpoint.manifest import fsync
from ..comm.agreement import describe
from ..run.checks import check


def check_new(flag: str, directory: str) -> None:
    """Raises ValueError unless `directory`, the value of `flag`, is absent or empty."""
    path = Path(directory)
    check(directory != "", f"{flag} is empty: give a directory")
    check(not path.exists() or path.is_dir(), f"{flag} {directory} is a file: give a directory")
    check(not path.exists() or not any(path.iterdir()), f"{flag} {directory} is not empty: give a new directory, so that nothing "
          "is replaced")


@contextmanager
def whole(flag: str, directory: str) -> Iterator[Path]:
    """A new directory to write in, which is `directory` after the block; nothing is left of it where the block raises.

    Raises ValueError, one line with the flag, for what `check_new` refuses and where nothing can be written.
    """
    check_new(flag, directory)
    final = Path(directory).absolute()
    aside = final.with_name(f".{final.name}.converting")
    try:
        shutil.rmtree(aside, ignore_errors=True)  # of a conversion that was killed
        aside.mkdir(parents=True)
        yield aside
        fsync(aside)
        aside.replace(final)
        fsync(final.parent)
    except OSError as error:
        raise ValueError(f"{flag} {directory}: {describe(error)}: give another directory") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
