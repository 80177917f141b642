"""Output directories that appear complete or not at all."""

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
from ..config.fields import check


def check_new(flag: str, target: str, file: bool = False) -> None:
    """Raise ValueError unless `target`, the flag's value, is absent or an empty directory.

    file: `target` will be a file
    """
    path = Path(target)
    check(target != "", f"{flag} is empty: pass a {'file' if file else 'directory'}")
    if file:
        check(
            not os.path.lexists(path),
            f"{flag} {target} exists: pass a new file, so that nothing is replaced",
        )
        return
    check(not path.exists() or path.is_dir(), f"{flag} {target} is a file: pass a directory")
    check(
        not path.exists() or not any(path.iterdir()),
        f"{flag} {target} is not empty: pass a new directory, so that nothing is replaced",
    )


@contextmanager
def new_directory(flag: str, directory: str, file: bool = False) -> Iterator[Path]:
    """Write a new directory that appears complete or not at all.

    file: `directory` is a file; the block writes a file with its name into the new directory

    Refuses a second concurrent block for one directory. Raise ValueError, one line with the flag,
    as `check_new` and if nothing can be written.
    """
    check_new(flag, directory, file)
    final = Path(directory).absolute()
    aside = final.with_name(f"{_prefix(final)}{os.getpid()}.{uuid.uuid4().hex}")
    written = aside / final.name if file else aside
    try:
        for path in _abandoned(final):
            shutil.rmtree(path, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        fsync(written)
        check_new(flag, directory, file)
        written.replace(final)
        fsync(final.parent)
    except OSError as error:
        raise ValueError(
            f"{flag} {directory}: {describe(error)}: pass another directory"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _prefix(final: Path) -> str:
    return f".{final.name}.converting.{platform.node()}."


def _abandoned(final: Path) -> list[Path]:
    prefix = _prefix(final)
    found = []
    for path in final.parent.glob(".*"):
        process = path.name.removeprefix(prefix).split(".")[0]
        if path.name.startswith(prefix) and process.isdecimal():
            if not psutil.pid_exists(int(process)):
                found.append(path)
    return found
