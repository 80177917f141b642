"""How much of the machine other processes had while something was measured. Test: pytest tests/test_benchmarks.py"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

OTHERS = 0.1  # a measurement during which others took more than this part of our cores is not to be trusted


class Watch:
    """Counts from when it is made. own: CPU seconds so far of what is measured."""

    def __init__(self, threads: int, own: Callable[[], float]) -> None:
        self._threads, self._own, self._begin = threads, own, time.perf_counter()
        self._others = busy_seconds() - own()

    def others(self) -> float:
        """CPU seconds of everything else, and those stolen from this machine, over the wall time of `threads` cores."""
        return (busy_seconds() - self._own() - self._others) / (self._threads * (time.perf_counter() - self._begin))


def busy_seconds() -> float:
    """CPU seconds of this machine that were not idle, since it started; the system counts in hundredths."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq", "steal"))
