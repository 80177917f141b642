"""Where the time of a rank's iteration goes: computing, or waiting, and for what.

A rank that computes longer than others is seen in its own computation, and in the waiting of all others. Every wait is timed where
it happens: two readings of the clock, no message. What waits inside another wait belongs to the outer one; computation is the rest
of the iteration. Left out: comparing ranks (`logs.stragglers`), gathering (`training.rank_times`), kernels (profiler.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..comm.grid import Groups
from .observed import NONBLOCKING, Observed, Observer, observe_groups

DATA, PREVIOUS, NEXT, REDUCTIONS = WAITS = ("data", "previous stage", "next stage", "reductions")
PHASES = ("computation", *WAITS)
PIPELINE = {"recv_forward": PREVIOUS, "send_backward": PREVIOUS, "recv_backward": NEXT, "send_forward": NEXT}


class Phases:
    """Seconds that this rank has waited since `begin`. Give the trainer `groups(...)`, `watch` and `waiting_for_data`."""

    def __init__(self) -> None:
        self._waiting = False
        self.begin()

    def begin(self) -> None:
        """Before an iteration."""
        self._seconds = dict.fromkeys(WAITS, 0.0)

    def groups(self, groups: Groups) -> Groups:
        """The same groups, all verbs timed as reductions where they are not part of another wait."""
        return observe_groups(groups, lambda _: self._timed(REDUCTIONS))

    def watch(self, executor: Any) -> Any:
        """The schedule's executor, its sends and receives timed."""
        return Observed(executor, tuple(PIPELINE), lambda name, *call: self._timed(PIPELINE[name])(name, *call))

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around what fetches samples."""
        begin, self._waiting = time.perf_counter(), True
        try:
            yield
        finally:
            self._waiting = False
            self._seconds[DATA] += time.perf_counter() - begin

    def of_iteration(self, seconds: float) -> list[float]:
        """Seconds of each of PHASES in an iteration that began with `begin` and took `seconds`."""
        waited = list(self._seconds.values())
        return [seconds - sum(waited), *waited]

    def _timed(self, phase: str) -> Observer:
        def call(name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            if self._waiting:
                return function(*args, **kwargs)
            begin, self._waiting = time.perf_counter(), True
            try:
                result = function(*args, **kwargs)
            finally:
                self._waiting = False
                self._seconds[phase] += time.perf_counter() - begin
            if name not in NONBLOCKING:
                return result
            return Observed(result, ("wait",), lambda _, wait, *rest: call("wait", wait, *rest))

        return call
