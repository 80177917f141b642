"""Observed calls: phases of a rank's iteration, and events for --profile.

--profile writes a table and a trace for Perfetto (ui.perfetto.dev) or chrome://tracing. The caller times every call,
without sampling; time outside all calls is Python's. `observe.profile.trace` merges traces.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from ..comm.grid import Groups
from ..text.named_files import StrPath
from ..text.table import Column, text_table
from ..text.written_files import new_file
from . import kernel_costs
from .machine import fma_peak_gflops

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
NONBLOCKING = VERBS[-6:]  # their time that computation does not hide is spent in `wait`
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

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
# (name, function, args, kwargs) -> function(*args, **kwargs)
Observer = Callable[[str, Callable[..., Any], Arguments, Keywords], Any]
DATA = "data"
PREVIOUS = "previous stage"
NEXT = "next stage"
REDUCTIONS = "reductions"
WAITS = (DATA, PREVIOUS, NEXT, REDUCTIONS)
PHASES = ("computation", *WAITS)
PIPELINE = {
    "recv_forward": PREVIOUS,
    "send_backward": PREVIOUS,
    "recv_backward": NEXT,
    "send_forward": NEXT,
}
TRACKS = ("schedule", "kernels", "communication")
FMA_ROUNDS = 10
COLUMNS: tuple[Column, ...] = (
    ("operation", "<40", "name"),
    ("calls", ">7.0f", "calls"),
    ("seconds", ">9.4f", "seconds"),
    ("% step", ">7.1f", "step_percent"),
    ("GFLOP/s", ">9.1f", "gflops"),
    ("% peak", ">7.1f", "peak_percent"),
)


class Observed:
    """`inner` with calls of `names` passed to `observe`."""

    def __init__(self, inner: Any, names: tuple[str, ...], observe: Observer) -> None:
        self._inner = inner
        self._names = names
        self._observe = observe

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name not in self._names:
            return value
        return lambda *args, **kwargs: self._observe(name, value, args, kwargs)


def observe_wait(name: str, result: Any, observe: Observer) -> Any:
    """Return a verb's result; a handle's `wait` is observed as "<verb> wait"."""
    if name not in NONBLOCKING:
        return result
    return Observed(
        result, ("wait",), lambda _, wait, args, kwargs: observe(f"{name} wait", wait, args, kwargs)
    )


def observe_groups(groups: Groups, observer: Callable[[str], Observer]) -> Groups:
    """Return the groups, observed unless they have one rank."""
    named = {field.name: getattr(groups, field.name) for field in fields(groups)}
    observed = {
        name: Observed(comm, VERBS, observer(name)) for name, comm in named.items() if comm.size > 1
    }
    return replace(groups, **observed)


class Phases:
    """Seconds waited since `begin`. Pass `groups(...)`, `watch` and `waiting_for_data` to the trainer."""

    def __init__(self) -> None:
        self._waiting = False
        self.begin()

    def begin(self) -> None:
        self._seconds = dict.fromkeys(WAITS, 0.0)

    def groups(self, groups: Groups) -> Groups:
        """Return the groups; verbs outside other waits count as reductions."""
        return observe_groups(groups, lambda _: self._timed(REDUCTIONS))

    def watch(self, executor: Any) -> Any:
        return Observed(
            executor, tuple(PIPELINE), lambda name, *call: self._timed(PIPELINE[name])(name, *call)
        )

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        begin = time.perf_counter()
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
            self._seconds[DATA] += time.perf_counter() - begin

    def of_iteration(self, seconds: float) -> list[float]:
        waited = list(self._seconds.values())
        return [seconds - sum(waited), *waited]

    def _timed(self, phase: str) -> Observer:
        def call(name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
            if self._waiting:
                return function(*args, **kwargs)
            begin = time.perf_counter()
            self._waiting = True
            try:
                result = function(*args, **kwargs)
            finally:
                self._waiting = False
                self._seconds[phase] += time.perf_counter() - begin
            return observe_wait(name, result, call)

        return call


@dataclass(frozen=True)
class Event:
    """One call. start, seconds: time.perf_counter(). flops: from kernels.inc, 0 except for matmuls."""

    track: str
    name: str
    start: float
    seconds: float
    flops: float = 0.0
    microbatch: int | None = None
    chunk: int | None = None

    def details(self) -> dict[str, float | None]:
        if self.flops:
            return {"gflops": self.flops / self.seconds / 1e9}
        if self.microbatch is None:
            return {}
        return {"microbatch": self.microbatch, "chunk": self.chunk}


class Profiler:
    """Events recorded while `active`. Pass `groups(...)`, `Ops` on `kernels(...)`, and `watch` to the trainer, or `watch` alone.

    begin: origin of a trace's times, time.perf_counter(); None: the first event
    """

    def __init__(self) -> None:
        self.begin: float | None = None
        self.events: list[Event] = []
        self.steps: list[float] = []
        self.active = False
        self.peak_gflops = 0.0

    def groups(self, groups: Groups) -> Groups:
        return observe_groups(groups, lambda name: self._note("communication", f"{name} "))

    def kernels(self, library: Any) -> Any:
        names = tuple(
            name
            for name, value in vars(library).items()
            if inspect.isbuiltin(value) and not name.startswith("bench_")
        )
        return Observed(library, names, self._note("kernels", ""))

    def watch(self, executor: Any) -> Any:
        return Observed(executor, INSTRUCTIONS, self._note("schedule", ""))

    def measure_peak(self) -> None:
        self.peak_gflops = fma_peak_gflops(FMA_ROUNDS)

    @contextlib.contextmanager
    def step(self, recorded: bool) -> Iterator[None]:
        if not recorded:
            yield
            return
        self.active = True
        start = time.perf_counter()
        try:
            yield
        finally:
            self.steps.append(time.perf_counter() - start)
            self.active = False

    def _note(self, track: str, prefix: str) -> Observer:
        def call(name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
            if not self.active:
                return function(*args, **kwargs)
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - start
            event = Event(track, prefix + name, start, seconds)
            if track == "kernels":
                event = replace(event, flops=kernel_costs.flops(name, *args, **kwargs))
            elif track == "schedule":
                event = replace(event, microbatch=args[0].microbatch, chunk=args[0].model_chunk)
            self.events.append(event)
            return observe_wait(name, result, call)

        return call

    # Results --------------------------------------------------------------------------------------------------------------------

    def table(self) -> list[str]:
        """Return a row for each operation, the slowest first, and a last row for the rest."""
        calls: dict[str, list[Event]] = {}
        for event in self.events:
            if event.track != "schedule":
                calls.setdefault(event.name, []).append(event)
        operations = sorted(calls.items(), key=lambda item: -_seconds(item[1]))
        rows = [
            self._row(name, len(events), _seconds(events), sum(e.flops for e in events))
            for name, events in operations
        ]
        wall = sum(self.steps)
        rest = wall - sum(map(_seconds, calls.values()))
        return [
            f"profile of {len(self.steps)} iterations, {wall / self._step_count:.3f} s each; "
            f"FMA peak {self.peak_gflops:.0f} GFLOP/s in FP32 (measured before them)",
            *text_table(COLUMNS, [*rows, self._row("Python, autograd and the rest", None, rest)]),
        ]

    @property
    def _step_count(self) -> int:
        return max(1, len(self.steps))

    def _row(
        self, name: str, calls: int | None, seconds: float, flops: float = 0.0
    ) -> dict[str, Any]:
        wall = sum(self.steps)
        gflops = None
        if flops and seconds and self.peak_gflops:
            gflops = flops / seconds / 1e9
        return {
            "name": name,
            "calls": None if calls is None else calls / self._step_count,
            "seconds": seconds / self._step_count,
            "step_percent": 100 * seconds / wall if wall else 0.0,
            "gflops": gflops,
            "peak_percent": gflops and 100 * gflops / self.peak_gflops,
        }

    def write_trace(
        self, path: StrPath, rank: int, stage: int = 0, peak_mib: float | None = None
    ) -> None:
        """Write Chrome's trace format: microseconds from `begin`, a process per rank, a thread per track."""
        begin = self.begin
        if begin is None:
            begin = min((e.start for e in self.events), default=0.0)
        metadata = {
            "process_name": {"name": f"rank {rank}, stage {stage}"},
            "process_sort_index": {"sort_index": rank},
        }
        if peak_mib is not None:
            labels = f"{peak_mib:.0f} MiB at its peak"
            metadata["process_labels"] = {"labels": labels, "peak_mib": peak_mib}
        names = [
            {"ph": "M", "pid": rank, "name": name, "args": args} for name, args in metadata.items()
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
        with open(path, "w", opener=new_file) as file:
            json.dump({"traceEvents": names + spans, "displayTimeUnit": "ms"}, file)


def _seconds(events: Iterable[Event]) -> float:
    return sum(event.seconds for event in events)
