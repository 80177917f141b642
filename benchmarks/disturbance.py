"""Disturbance of a measurement by other processes: the share of our cores that they take, and threads that wait for a core.

`Watch` reads it from the machine's CPU time, for steps and jobs; `Settling` from the threads' own, for milliseconds, which the
machine's count in hundredths of a second does not resolve. Both call a measurement disturbed from the same share on.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from fugaku_megatron.host.machine import fma_gflops
from fugaku_megatron.host.timing import seconds

OTHERS = (
    0.1  # a measurement is marked as disturbed when others used more than this share of our cores
)
SETTLE_STEPS = 600_000  # of the loop of multiply-adds
SETTLE_SECONDS = 1.0  # at most, until every thread has a core
SETTLED = 0.75  # of the best rate: two threads on one core have half of it


def busy_seconds() -> float:
    """Return CPU seconds of this machine since its start that were not idle; the system counts in hundredths of a second."""
    times = psutil.cpu_times()
    return sum(
        getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal")
    )


def own_seconds() -> float:
    """Return CPU seconds of this process and of all that it started, ended ones included."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            total += sum(child.cpu_times()[:4])
    return total


class Watch:
    """Counts from its construction. own: returns the CPU seconds so far of the measured processes."""

    def __init__(self, threads: int, own: Callable[[], float] = own_seconds) -> None:
        self._threads = threads
        self._own = own
        self._begin = time.perf_counter()
        self._others = busy_seconds() - own()

    def others(self) -> float:
        """Return CPU seconds of all other processes, and those stolen by other virtual machines, over the wall time of `threads` cores."""
        return (busy_seconds() - self._own() - self._others) / (
            self._threads * (time.perf_counter() - self._begin)
        )

    def disturbed(self) -> bool:
        """Return whether others took too much since the construction."""
        return self.others() > OTHERS


class Settling:
    """Waits until this process's threads have a core each. work: runs some milliseconds on all of them.

    Threads that slept may wake on the same core, in this system or, with virtual CPUs, in the host, and may be moved only a second
    later; matmuls of less than 100 ms ran at half their rate.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._best = math.inf
        self.wait(all_the_time=True)

    def now(self) -> bool:
        """Return whether the work takes about as long as it did at best."""
        taken = seconds(self._work)
        self._best = min(self._best, taken)
        return taken <= self._best / SETTLED

    def wait(self, all_the_time: bool = False) -> None:
        """Return when it does, or after SETTLE_SECONDS."""
        end = time.perf_counter() + SETTLE_SECONDS
        while time.perf_counter() < end and (not self.now() or all_the_time):
            pass

    def run(
        self, work: Callable[[], Any], clock: Callable[[], float], threads: int
    ) -> tuple[Any, bool]:
        """Return the result of `work`, and whether so many threads had a core each meanwhile. clock: of their processor time."""
        self.wait()
        wall = time.perf_counter()
        cpu = clock()
        result = work()
        ran = clock() - cpu >= (1 - OTHERS) * threads * (time.perf_counter() - wall)
        return result, ran and self.now()


def multiply_adds() -> None:
    """Run two milliseconds of multiply-adds on the threads that torch and the kernels share."""
    fma_gflops(SETTLE_STEPS)
