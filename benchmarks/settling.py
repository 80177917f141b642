"""When the threads of a process have a core each, which what is measured waits for. Test: pytest tests/test_benchmarks.py"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from fugaku_megatron.host.fma_peak import fma_gflops

SETTLE_STEPS = 600_000  # of the loop of multiply-adds
SETTLE_SECONDS = 1.0  # at most, until every thread has a core
SETTLED = 0.75  # of the best rate: two threads on one core have half of it
QUIET = 0.9  # share of wall time for which threads ran; below that others disturbed them


class Settling:
    """Waits until this process's threads have a core each. work: some milliseconds of theirs.

    What slept may wake two threads on one core, in this system or, of virtual CPUs, in the one below, and be moved only a second
    later; products of less than 100 ms ran at half their rate.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._best = work, math.inf
        self.wait(all_the_time=True)

    def now(self) -> bool:
        """Whether the work takes about as long as it did at best."""
        start = time.perf_counter()
        self._work()
        taken = time.perf_counter() - start
        self._best = min(self._best, taken)
        return taken <= self._best / SETTLED

    def wait(self, all_the_time: bool = False) -> None:
        """Return when it does, or after SETTLE_SECONDS."""
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end and (not self.now() or all_the_time):
            pass

    def run(self, work: Callable[[], Any], clock: Callable[[], float], threads: int) -> tuple[Any, bool]:
        """(What `work` returns, whether so many threads had a core each meanwhile). clock: of their processor time."""
        self.wait()
        wall, cpu = time.perf_counter(), clock()
        result = work()
        ran = clock() - cpu >= QUIET * threads * (time.perf_counter() - wall)
        return result, ran and self.now()


def multiply_adds() -> None:
    """Two milliseconds of the threads that torch and the kernels share."""
    fma_gflops(SETTLE_STEPS)
