"""A value whose calls of some names go through an observer, and the phases of a rank's iteration that are measured in this way.

Left out: the profiler (profiler.py).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

from ..comm.grid import Groups

VERBS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier",
         "iall_reduce", "iall_gather", "ireduce_scatter", "isend", "irecv")
NONBLOCKING = VERBS[-5:]  # what computation does not hide of them is spent in `wait`
INSTRUCTIONS = ("forward", "backward", "backward_input", "backward_weight", "recv_forward", "send_forward", "recv_backward",
                "send_backward")

Observer = Callable[[str, Callable[..., Any], tuple, dict], Any]  # name, function, args, kwargs -> what the function returns


class Observed:
    """`inner`, with calls of `names` going through observe(name, function, args, kwargs). Groups of one rank stay silent."""

    def __init__(self, inner: Any, names: tuple[str, ...], observe: Observer) -> None:
        self._inner, self._names, self._observe = inner, names, observe
        self._silent = getattr(inner, "size", 2) == 1

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names or self._silent:
            return value
        return lambda *args, **kwargs: self._observe(name, value, args, kwargs)


def observe_groups(groups: Groups, observer: Callable[[str], Observer]) -> Groups:
    """The same groups, their verbs observed. observer: of the group with this name."""
    return Groups(**{f.name: Observed(getattr(groups, f.name), VERBS, observer(f.name)) for f in fields(groups)})


DATA, PREVIOUS, NEXT, REDUCTIONS = WAITS = ("data", "previous stage", "next stage", "reductions")
PHASES = ("computation", *WAITS)
PIPELINE = {"recv_forward": PREVIOUS, "send_backward": PREVIOUS, "recv_backward": NEXT, "send_forward": NEXT}


class Phases:
    """Seconds that this rank has waited since `begin`. Pass `groups(...)`, `watch` and `waiting_for_data` to the trainer."""

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
