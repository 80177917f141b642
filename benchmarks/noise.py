"""The share of the machine that other processes used during a measurement. Test: pytest tests/test_benchmarks.py"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

OTHERS = 0.1  # a measurement is marked as disturbed when others used more than this share of our cores


class Watch:
    """Counts from its construction. own: returns the CPU seconds so far of the measured processes."""

    def __init__(self, threads: int, own: Callable[[], float]) -> None:
        self._threads, self._own, self._begin = threads, own, time.perf_counter()
        self._others = busy_seconds() - own()

    def others(self) -> float:
        """CPU seconds of all other processes, and those stolen by other virtual machines, over the wall time of `threads` cores."""
        return (busy_seconds() - self._own() - self._others) / (self._threads * (time.perf_counter() - self._begin))


def busy_seconds() -> float:
    """CPU seconds of this machine since its start that were not idle; the system counts in hundredths of a second."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
