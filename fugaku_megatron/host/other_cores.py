"""Work of a rank on other cores, to find a core that repeats its mistakes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from . import kernels


@contextlib.contextmanager
def other_cores(on: bool = True) -> Iterator[None]:
    """Move each thread of the kernels to the next thread's core in the block; a single thread to another core of the process."""
    if not on:
        yield
        return
    masks = _affinities()
    cpus = kernels.thread_cpus()
    if len(cpus) > 1:
        kernels.pin_threads([*cpus[1:], cpus[0]])
    elif others := os.sched_getaffinity(0) - set(cpus):
        os.sched_setaffinity(0, {min(others)})
    try:
        yield
    finally:
        for thread, mask in masks.items():
            with contextlib.suppress(OSError):  # the thread has ended
                os.sched_setaffinity(thread, mask)


def _affinities() -> dict[int, set[int]]:
    """Return thread -> cores on which it may run."""
    masks = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        with contextlib.suppress(OSError):
            masks[thread] = os.sched_getaffinity(thread)
    return masks
