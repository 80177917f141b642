"""--profile: what a rank does in some iterations, as a table and as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Three tracks: the schedule's instructions, kernels, communication. Nothing is sampled: every call of a kernel or of a communication
verb is one event, timed by the caller, so that Python between them is what remains of the step.
Left out: what happens inside a kernel. Test: pytest tests/test_profiler.py
"""

from __future__ import annotations

import inspect
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from ..comm.base import Comm
from ..comm.grid import Groups
from . import kernels
from .fma_peak import fma_peak_gflops

TRACKS = ("schedule", "kernels", "communication")
VERBS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send", "recv", "barrier",
         "iall_reduce", "iall_gather", "ireduce_scatter", "isend", "irecv")
NONBLOCKING = VERBS[-5:]  # what computation does not hide of them is spent in `wait`
INSTRUCTIONS = ("forward", "backward", "recv_forward", "send_forward", "recv_backward", "send_backward")
FMA_ROUNDS = 10


@dataclass(frozen=True)
class Event:
    """One call. Times in seconds (time.perf_counter); flops: of the kernel table (kernels.inc), 0 for what is no product."""

    track: str
    name: str
    start: float
    seconds: float
    flops: float = 0.0


class Profiler:
    """Collects events while `active`. Give the trainer `groups(...)`, `Ops` on `kernels(...)`, and `watch`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.steps: list[float] = []
        self.active = False
        self.peak_gflops = 0.0

    def groups(self, groups: Groups) -> Groups:
        """The same groups, their verbs observed."""
        return Groups(**{f.name: _Observed(getattr(groups, f.name), VERBS, self._note("communication", f"{f.name} "))
                         for f in fields(groups)})

    def kernels(self, library: Any) -> Any:
        """The same kernel library, its calls observed, for `nn.ops.Ops`."""
        names = tuple(name for name, value in vars(library).items() if inspect.isbuiltin(value) and not name.startswith("bench_"))
        return _Observed(library, names, self._note("kernels", ""))

    def watch(self, executor: Any) -> Any:
        """The schedule's executor, its instructions observed."""
        return _Observed(executor, INSTRUCTIONS, self._note("schedule", ""))

    def step(self, recorded: bool) -> AbstractContextManager[None]:
        """One iteration; nothing is recorded unless `recorded`."""
        return _Step(self) if recorded else nullcontext()

    def _note(self, track: str, prefix: str) -> Callable[[str, Callable[..., Any], tuple, dict], Any]:
        def call(name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            flops = kernels.table.flops(name, *args, **kwargs) if track == "kernels" else 0.0
            self.events.append(Event(track, prefix + name, start, time.perf_counter() - start, flops))
            if name not in NONBLOCKING:
                return result
            return _Observed(result, ("wait",), lambda verb, wait, *_: call(f"{name} wait", wait, (), {}))

        return call

    # Results --------------------------------------------------------------------------------------------------------------------

    def table(self) -> list[str]:
        """Operation, calls, seconds, share of the steps, GFLOP/s, share of the FMA peak; per recorded iteration."""
        steps, wall = max(1, len(self.steps)), sum(self.steps)
        lines = [f"profile of {len(self.steps)} iterations, {wall / steps:.3f} s each; FMA peak {self.peak_gflops:.0f} GFLOP/s "
                 "in FP32 (measured before them)",
                 f"{'operation':40} {'calls':>7} {'seconds':>9} {'% step':>7} {'GFLOP/s':>9} {'% peak':>7}"]
        work = [e for e in self.events if e.track != "schedule"]
        for name in sorted({e.name for e in work}, key=lambda n: -sum(e.seconds for e in work if e.name == n)):
            lines.append(self._row(name, [e for e in work if e.name == name], steps, wall))
        rest = wall - sum(e.seconds for e in work)
        lines.append(f"{'Python, autograd and the rest':40} {'':7} {rest / steps:9.4f} {100 * rest / wall if wall else 0:7.1f}")
        return lines

    def _row(self, name: str, events: list[Event], steps: int, wall: float) -> str:
        seconds, flops = sum(e.seconds for e in events), sum(e.flops for e in events)
        rate = flops / seconds / 1e9 if seconds else 0.0
        row = f"{name:40} {len(events) / steps:7.0f} {seconds / steps:9.4f} {100 * seconds / wall if wall else 0:7.1f}"
        return f"{row} {rate:9.1f} {100 * rate / self.peak_gflops:7.1f}" if rate and self.peak_gflops else row

    def write_trace(self, path: str | os.PathLike, rank: int) -> None:
        """Chrome's trace format: microseconds, one process per rank, one thread per track."""
        begin = min((e.start for e in self.events), default=0.0)
        names = [{"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}]
        names += [{"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": t}} for i, t in enumerate(TRACKS)]
        spans = [{"ph": "X", "pid": rank, "tid": TRACKS.index(e.track), "name": e.name, "ts": 1e6 * (e.start - begin),
                  "dur": 1e6 * e.seconds, "args": {"gflops": e.flops / e.seconds / 1e9} if e.flops else {}} for e in self.events]
        with open(path, "w") as file:
            json.dump({"traceEvents": names + spans, "displayTimeUnit": "ms"}, file)


class _Step:
    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler

    def __enter__(self) -> None:
        if not self.profiler.peak_gflops:
            self.profiler.peak_gflops = fma_peak_gflops(FMA_ROUNDS)
        self.profiler.active, self.start = True, time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        self.profiler.steps.append(time.perf_counter() - self.start)
        self.profiler.active = False


class _Observed:
    """`inner`, with calls of `names` going through observe(name, function, args, kwargs). Groups of one rank stay silent."""

    def __init__(self, inner: Comm | Any, names: tuple[str, ...], observe: Callable[..., Any]) -> None:
        self._inner, self._names, self._observe = inner, names, observe
        self._silent = getattr(inner, "size", 2) == 1

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names or self._silent:
            return value
        return lambda *args, **kwargs: self._observe(name, value, args, kwargs)
