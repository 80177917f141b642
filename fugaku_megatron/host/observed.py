"""Calls that go through an observer: the phases of a rank's iteration, and the events of --profile.

--profile writes what a rank does in some iterations, as a table and as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.
It has three tracks: the schedule's instructions, kernels, communication. Nothing is sampled: every call of a kernel or of a
communication verb is one event, timed by the caller, so that Python between them is what remains of the step. The times of all
ranks begin where they left one barrier together. Left out: what happens inside a kernel, traces of several ranks
(`observe.loss_plot`).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

from ..comm.grid import Groups
from . import kernels
from .runtime import fma_peak_gflops

VERBS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send",
    "recv",
    "barrier",
    "iall_reduce",
    "iall_gather",
    "ireduce_scatter",
    "iall_to_all",
    "isend",
    "irecv",
)
NONBLOCKING = VERBS[-6:]  # what computation does not hide of them is spent in `wait`
INSTRUCTIONS = (
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "recv_forward",
    "send_forward",
    "recv_backward",
    "send_backward",
)

Observer = Callable[
    [str, Callable[..., Any], tuple, dict], Any
]  # name, function, args, kwargs -> what the function returns
DATA, PREVIOUS, NEXT, REDUCTIONS = WAITS = ("data", "previous stage", "next stage", "reductions")
PHASES = ("computation", *WAITS)
PIPELINE = {
    "recv_forward": PREVIOUS,
    "send_backward": PREVIOUS,
    "recv_backward": NEXT,
    "send_forward": NEXT,
}
TRACKS = ("schedule", "kernels", "communication")
FMA_ROUNDS = 10


class Observed:
    """`inner`, with calls of `names` going through observe(name, function, args, kwargs). Groups of one rank stay silent."""

    def __init__(self, inner: Any, names: tuple[str, ...], observe: Observer) -> None:
        self._inner = inner
        self._names = names
        self._observe = observe
        self._silent = getattr(inner, "size", 2) == 1

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names or self._silent:
            return value
        return lambda *args, **kwargs: self._observe(name, value, args, kwargs)


def observe_groups(groups: Groups, observer: Callable[[str], Observer]) -> Groups:
    """The same groups, their verbs observed. observer: of the group with this name."""
    return Groups(
        **{
            f.name: Observed(getattr(groups, f.name), VERBS, observer(f.name))
            for f in fields(groups)
        }
    )


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
        return Observed(
            executor, tuple(PIPELINE), lambda name, *call: self._timed(PIPELINE[name])(name, *call)
        )

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around what fetches samples."""
        begin = time.perf_counter()
        self._waiting = True
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
            begin = time.perf_counter()
            self._waiting = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._waiting = False
                self._seconds[phase] += time.perf_counter() - begin
            if name not in NONBLOCKING:
                return result
            return Observed(result, ("wait",), lambda _, wait, *rest: call("wait", wait, *rest))

        return call


@dataclass(frozen=True)
class Event:
    """One call. Times in seconds (time.perf_counter); flops: of the kernel table (kernels.inc), 0 for what is not a matmul.

    microbatch, chunk: of an instruction.
    """

    track: str
    name: str
    start: float
    seconds: float
    flops: float = 0.0
    microbatch: int | None = None
    chunk: int | None = None

    def details(self) -> dict[str, float | None]:
        """What a trace says of it in addition to its name and times."""
        if self.flops:
            return {"gflops": self.flops / self.seconds / 1e9}
        return (
            {} if self.microbatch is None else {"microbatch": self.microbatch, "chunk": self.chunk}
        )


class Profiler:
    """Collects events while `active`. Pass `groups(...)`, `Ops` on `kernels(...)`, and `watch` to the trainer, or `watch` alone.

    begin: the moment from which a trace counts, time.perf_counter(); without one, that of the first event.
    """

    def __init__(self) -> None:
        self.begin: float | None = None
        self.events: list[Event] = []
        self.steps: list[float] = []
        self.active = False
        self.peak_gflops = 0.0

    def groups(self, groups: Groups) -> Groups:
        """The same groups, their verbs observed."""
        return observe_groups(groups, lambda name: self._note("communication", f"{name} "))

    def kernels(self, library: Any) -> Any:
        """The same kernel library, its calls observed, for `nn.ops.Ops`."""
        names = tuple(
            name
            for name, value in vars(library).items()
            if inspect.isbuiltin(value) and not name.startswith("bench_")
        )
        return Observed(library, names, self._note("kernels", ""))

    def watch(self, executor: Any) -> Any:
        """The schedule's executor, its instructions observed."""
        return Observed(executor, INSTRUCTIONS, self._note("schedule", ""))

    def measure_peak(self) -> None:
        """Before the recorded steps, for `table`."""
        self.peak_gflops = fma_peak_gflops(FMA_ROUNDS)

    def step(self, recorded: bool) -> AbstractContextManager[None]:
        """One iteration; nothing is recorded unless `recorded`."""
        return _Step(self) if recorded else nullcontext()

    def _note(
        self, track: str, prefix: str
    ) -> Callable[[str, Callable[..., Any], tuple, dict], Any]:
        def call(name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.events.append(
                Event(
                    track,
                    prefix + name,
                    start,
                    time.perf_counter() - start,
                    **_about(track, name, args, kwargs),
                )
            )
            if name not in NONBLOCKING:
                return result
            return Observed(
                result, ("wait",), lambda verb, wait, *_: call(f"{name} wait", wait, (), {})
            )

        return call

    # Results --------------------------------------------------------------------------------------------------------------------

    def table(self) -> list[str]:
        """Operation, calls, seconds, share of the steps, GFLOP/s, share of the FMA peak; per recorded iteration."""
        steps = max(1, len(self.steps))
        wall = sum(self.steps)
        lines = [
            f"profile of {len(self.steps)} iterations, {wall / steps:.3f} s each; FMA peak {self.peak_gflops:.0f} GFLOP/s "
            "in FP32 (measured before them)",
            f"{'operation':40} {'calls':>7} {'seconds':>9} {'% step':>7} {'GFLOP/s':>9} {'% peak':>7}",
        ]
        work = [e for e in self.events if e.track != "schedule"]
        for name in sorted(
            {e.name for e in work}, key=lambda n: -sum(e.seconds for e in work if e.name == n)
        ):
            lines.append(self._row(name, [e for e in work if e.name == name], steps, wall))
        rest = wall - sum(e.seconds for e in work)
        lines.append(
            f"{'Python, autograd and the rest':40} {'':7} {rest / steps:9.4f} {100 * rest / wall if wall else 0:7.1f}"
        )
        return lines

    def _row(self, name: str, events: list[Event], steps: int, wall: float) -> str:
        seconds = sum(e.seconds for e in events)
        flops = sum(e.flops for e in events)
        rate = flops / seconds / 1e9 if seconds else 0.0
        row = f"{name:40} {len(events) / steps:7.0f} {seconds / steps:9.4f} {100 * seconds / wall if wall else 0:7.1f}"
        return (
            f"{row} {rate:9.1f} {100 * rate / self.peak_gflops:7.1f}"
            if rate and self.peak_gflops
            else row
        )

    def write_trace(
        self, path: str | os.PathLike, rank: int, stage: int = 0, peak_mib: float | None = None
    ) -> None:
        """Chrome's trace format: microseconds from `begin`, one process per rank, one thread per track.

        peak_mib: memory of this process at its peak.
        """
        begin = (
            min((e.start for e in self.events), default=0.0) if self.begin is None else self.begin
        )
        about = {
            "process_name": {"name": f"rank {rank}, stage {stage}"},
            "process_sort_index": {"sort_index": rank},
        }
        if peak_mib is not None:
            about["process_labels"] = {
                "labels": f"{peak_mib:.0f} MiB at its peak",
                "peak_mib": peak_mib,
            }
        names = [
            {"ph": "M", "pid": rank, "name": name, "args": args} for name, args in about.items()
        ]
        names += [
            {"ph": "M", "pid": rank, "tid": i, "name": "thread_name", "args": {"name": t}}
            for i, t in enumerate(TRACKS)
        ]
        spans = [
            {
                "ph": "X",
                "pid": rank,
                "tid": TRACKS.index(e.track),
                "name": e.name,
                "ts": 1e6 * (e.start - begin),
                "dur": 1e6 * e.seconds,
                "args": e.details(),
            }
            for e in self.events
        ]
        with open(path, "w") as file:
            json.dump({"traceEvents": names + spans, "displayTimeUnit": "ms"}, file)


def _about(track: str, name: str, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Fields of the event of a call: a kernel's FLOPs, an instruction's micro-batch and chunk."""
    if track == "kernels":
        return {"flops": kernels.table.flops(name, *args, **kwargs)}
    return (
        {"microbatch": args[0].microbatch, "chunk": args[0].model_chunk}
        if track == "schedule"
        else {}
    )


class _Step:
    def __init__(self, profiler: Profiler) -> None:
        self.profiler = profiler

    def __enter__(self) -> None:
        self.profiler.active = True
        self.start = time.perf_counter()

    def __exit__(self, *exception: Any) -> None:
        self.profiler.steps.append(time.perf_counter() - self.start)
        self.profiler.active = False
