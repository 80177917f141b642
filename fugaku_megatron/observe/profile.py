"""Profile of chosen ranks (`--profile`)."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..config.layout import Layout
from ..config.output import OutputConfig
from ..config.run_config import RunConfig
from ..host.allocator import peak_memory_mib
from ..host.observed import (
    Profiler,
)
from . import trace as trace_module
from .loss_plot import start_module

BARRIERS = 9  # that clocks are compared at


Say = Callable[[str], None]  # prints a line, on rank 0


def first_pipeline(layout: Layout) -> list[int]:
    """The ranks of rank 0's pipeline, by stage."""
    return Grid(*layout.sizes).ranks(0)["pp"]


def profiled_ranks(output: OutputConfig, layout: Layout) -> list[int]:
    """The ranks that write a trace: those of --profile-ranks, and rank 0's pipeline."""
    return sorted({*output.profile_ranks, *first_pipeline(layout)})


class Profile:
    """Exists on every rank of a run with --profile; the ranks do together what begins and ends the recording."""

    def __init__(self, run: RunConfig, layout: Layout, world: Comm) -> None:
        output = run.output
        self.output, self.layout, self.world = output, layout, world
        self.ranks, self.folder = profiled_ranks(output, layout), Path(output.profile_dir)
        self.pipeline = first_pipeline(layout)
        self.placement = layout.placement
        self.profiler = Profiler() if world.rank in self.ranks else None
        self.whole = (
            self.profiler if world.rank in output.profile_ranks else None
        )  # records kernels and messages, too
        self.started = 0  # iterations since this start

    # What is observed -----------------------------------------------------------------------------------------------------------

    def kernels(self, library: Any) -> Any:
        """The kernel library for `nn.ops.Ops`."""
        return self.whole.kernels(library) if self.whole else library

    def groups(self, groups: Groups) -> Groups:
        """The trainer's groups."""
        return self.whole.groups(groups) if self.whole else groups

    def watch(self, executor: Any) -> Any:
        """The schedule's executor."""
        return self.profiler.watch(executor) if self.profiler else executor

    # Iterations -----------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def iteration(self, say: Say) -> Iterator[None]:
        """Around an iteration; after the last one asked for the results are written. Collective."""
        self.started += 1
        recorded = self.output.profile_step_start <= self.started < self.output.profile_step_end
        if self.started == self.output.profile_step_start:
            self._begin()
        with self.profiler.step(recorded) if self.profiler else contextlib.nullcontext():
            yield
        if self.started == self.output.profile_step_end - 1:
            self._write(say)

    def end(self, say: Say) -> None:
        """At the end of a run, which may have had fewer iterations than asked for. Collective."""
        if self.started < self.output.profile_step_start:
            say(
                f"note: no profile: this start had {self.started} iterations, --profile-step-start is "
                f"{self.output.profile_step_start}"
            )
        elif self.started < self.output.profile_step_end - 1:
            self._write(say)

    def _begin(self) -> None:
        if self.whole:
            self.whole.measure_peak()
        begin = common_moment(self.world)
        if self.profiler:
            self.profiler.begin = begin

    def _trace(self, rank: int) -> Path:
        return self.folder / f"trace_rank{rank}.json"

    def _write(self, say: Say) -> None:
        if self.profiler:
            self._write_own(self.profiler, say)
        self.world.barrier()
        if self.world.rank == 0:
            self._merge(self.folder / "trace.json", say)

    def _merge(self, merged: Path, say: Say) -> None:
        missing = trace_module.merge_traces(
            [self._trace(rank) for rank in self.ranks], merged, self.placement, self.pipeline
        )
        say(
            f"trace of {len(self.ranks) - len(missing)} ranks: {merged} (open it in ui.perfetto.dev)"
        )
        if missing:
            say(
                f"note: not in it, because the directory of rank 0 does not have them: {', '.join(p.name for p in missing)}"
            )
        elif self.layout.pp > 1:
            say(_draw(merged, self.folder / "schedule.png"))

    def _write_own(self, profiler: Profiler, say: Say) -> None:
        rank = self.world.rank
        self.folder.mkdir(parents=True, exist_ok=True)
        profiler.write_trace(
            self._trace(rank), rank, Grid(*self.layout.sizes).coords(rank)[1], peak_memory_mib()
        )
        if not self.whole:
            return
        lines = self.whole.table()
        (self.folder / f"table_rank{rank}.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            say(line)


def common_moment(world: Comm) -> float:
    """One moment of all ranks, each by its own clock (time.perf_counter). Collective.

    All leave a barrier at once, but for the time until each is awake: the median over several barriers shows how far a clock is
    from rank 0's.
    """
    world.barrier()  # waits for the slowest
    left = torch.empty(BARRIERS, dtype=torch.float64)
    for number in range(BARRIERS):
        world.barrier()
        left[number] = time.perf_counter()
    of_rank_0 = world.broadcast(left.clone())
    return (of_rank_0[-1] + (left - of_rank_0).median()).item()


def _draw(trace: Path, picture: Path) -> str:
    """Draw the schedule in a process of its own, and return the line of the log about it."""
    drawing = start_module(
        "schedule_plot",
        str(trace),
        str(picture),
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
    )
    errors = drawing.communicate()[1].strip()
    return (
        f"{picture}: not drawn, {errors.splitlines()[-1]}"
        if drawing.returncode
        else f"schedule: {picture}"
    )
