"""A directory that appears when it is whole, and not before: written under a temporary name, and renamed at the end."""

from __future__ import annotations

import os
import platform
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

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

    Of two blocks for one directory each writes into its own, and the second one to end is refused. Raises ValueError, one line with
    the flag, for what `check_new` refuses and where nothing can be written.
    """
    check_new(flag, directory)
    final = Path(directory).absolute()
    aside = final.with_name(f"{_prefix(final)}{os.getpid()}.{uuid.uuid4().hex}")
    try:
        for path in _abandoned(final):
            shutil.rmtree(path, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        fsync(aside)
        check_new(flag, directory)
        aside.replace(final)
        fsync(final.parent)
    except OSError as error:
        raise ValueError(f"{flag} {directory}: {describe(error)}: give another directory") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(final: Path) -> str:
    """What the names of temporary directories of this host begin with; then the process follows, and what is unique in it."""
    return f".{final.name}.converting.{platform.node()}."


def _abandoned(final: Path) -> list[Path]:
    """Temporary directories that processes of this host left which are gone."""
    prefix, siblings = _prefix(final), final.parent.iterdir() if final.parent.is_dir() else ()
    ours = ((path, path.name.removeprefix(prefix).split(".")[0]) for path in siblings if path.name.startswith(prefix))
    return [path for path, process in ours if process.isdecimal() and not psutil.pid_exists(int(process))]
