"""Kill a rank of a running job at a known point; a job is known by its --save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE = 120  # s


def ranks_of(save: Path) -> list[psutil.Process]:
    """The ranks that train to `save`, by their process numbers."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(save) in process.cmdline() and {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"} & set(process.environ()):
                found.append(process)
        except psutil.Error:
            continue
    return sorted((p for p in found if "python" in p.name()), key=lambda p: p.pid)


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def iterations(save: Path) -> int:
    history = save / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


def kill_after(save: Path, *counts: int, then: Callable[[int], object] = lambda turn: None) -> threading.Thread:
    """A thread that kills a rank each time that the history has so many iterations. then: called with 0, 1 ... before each kill."""
    def work() -> None:
        for turn, count in enumerate(counts):
            end, victims = time.monotonic() + PATIENCE, []
            while time.monotonic() < end and not (victims and iterations(save) >= count):
                victims = [victim for victim in victims if alive(victim)] or ranks_of(save)
                time.sleep(0.01)  # the search takes longer than many iterations, so the ranks are known before the count is reached
            then(turn)
            for victim in victims[-1:]:
                victim.kill()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
