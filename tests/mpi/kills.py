"""Kill a rank at a known point, at which it waits: FAULT_HOLD in tests/campaigns/faults/first."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from tests.time_limit import wait_until

PATIENCE = 240  # s


def holding(mark: Path, *iterations: int) -> dict[str, str]:
    """Return variables with which the last rank waits after each iteration given, the first time."""
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
