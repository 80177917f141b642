"""Files that several tests read, made once for all workers of a test run."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder that `make` filled, in the first worker that needs it; the others wait."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / name
    folder.mkdir(exist_ok=True)
    with open(base / f"{name}.made", "a") as made:
        fcntl.flock(made, fcntl.LOCK_EX)
        if made.tell() == 0:
            make(folder)
            made.write("made\n")
    return folder
