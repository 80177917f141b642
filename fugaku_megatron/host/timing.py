"""Wall time for calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ..comm.base import Comm


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def timings(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return each round's mean seconds per call, after a warm-up round."""

    def one_round() -> None:
        for call in calls:
            call()

    one_round()
    return [seconds(one_round) / len(calls) for _ in range(rounds)]


def best_seconds(calls: Sequence[Callable[[], object]], rounds: int = 3) -> float:
    """Return the fastest round's mean seconds per call, after a warm-up round."""
    return min(timings(calls, rounds))


def slowest_seconds(comm: Comm, call: Callable[[], object]) -> float:
    """Return the seconds from the last rank's begin to the last rank's end. Collective."""
    comm.barrier()
    own = torch.tensor(seconds(call), dtype=torch.float64)
    return float(comm.all_reduce(own, "max"))
