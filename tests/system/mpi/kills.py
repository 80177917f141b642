"""Kill a rank of a running job at a known point, where it waits for that: FAULT_HOLD of tests/campaigns/faults/first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tests.time_limit import wait_until

PATIENCE = 240  # s


def holding(mark: Path, *iterations: int) -> dict[str, str]:
    """The environment of a job whose last rank waits after each of these iterations, the first time."""
    return {"FAULT_HOLD": ":".join(map(str, (mark, *iterations)))}


def kill_held(
    mark: Path, *iterations: int, then: Callable[[int], object] = lambda turn: None
) -> threading.Thread:
    """A thread that kills each rank that `holding` lets wait. then: called with 0, 1 ... before each kill."""

    def work() -> None:
        for turn, iteration in enumerate(iterations):
            link = mark.with_name(f"{mark.name}.{iteration}")
            if not wait_until(link.is_symlink, PATIENCE):
                return
            then(turn)
            os.kill(int(os.readlink(link)), signal.SIGKILL)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
