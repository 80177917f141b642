"""Profile of chosen ranks (`--profile`)."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...comm.base import Comm
from ...comm.grid import Grid, Groups
from ...config.layout import Layout
from ...config.output import OutputConfig
from ...config.run_config import RunConfig
from ...host.allocator import peak_memory_mib
from ...host.observed import Profiler
from ...start.child_program import start_module
from ...text.written_files import make_folder, write_text
from .trace import merge_traces

BARRIERS = 9  # at which clocks are compared
Say = Callable[[str], None]  # prints a line on rank 0


def first_pipeline(layout: Layout) -> list[int]:
    return Grid(*layout.sizes).ranks(0)["pp"]


def profiled_ranks(output: OutputConfig, layout: Layout) -> list[int]:
    return sorted({*output.profile_ranks, *first_pipeline(layout)})


class Profile:
    """Profile of a run; recording begins and ends collectively.

    profiler: None on other ranks
    detailed: on --profile-ranks, which also record kernels and messages
    """

    def __init__(self, run: RunConfig, layout: Layout, world: Comm) -> None:
        self.output = run.output
        self.layout = layout
        self.world = world
        self.ranks = profiled_ranks(run.output, layout)
        self.folder = Path(run.output.profile_dir)
        self.pipeline = first_pipeline(layout)
        self.placement = run.placement
        self.profiler = Profiler() if world.rank in self.ranks else None
        self.detailed = self.profiler if world.rank in run.output.profile_ranks else None
        self.started = 0

    def kernels(self, library: Any) -> Any:
        return self.detailed.kernels(library) if self.detailed else library

    def groups(self, groups: Groups) -> Groups:
        return self.detailed.groups(groups) if self.detailed else groups

    def watch(self, executor: Any) -> Any:
        return self.profiler.watch(executor) if self.profiler else executor

    @contextlib.contextmanager
    def iteration(self, say: Say) -> Iterator[None]:
        """Run an iteration; write results after the last requested. Collective."""
        self.started += 1
        first = self.output.profile_step_start
        end = self.output.profile_step_end
        if self.started == first:
            self._begin()
        if self.profiler:
            with self.profiler.step(first <= self.started < end):
                yield
        else:
            yield
        if self.started == end - 1:
            self._write(say)

    def end(self, say: Say) -> None:
        """Write the results of a shorter run. Collective."""
        first = self.output.profile_step_start
        if self.started < first:
            say(
                f"note: no profile: this start had {self.started} iterations, --profile-step-start is {first}"
            )
        elif self.started < self.output.profile_step_end - 1:
            self._write(say)

    def _begin(self) -> None:
        if self.detailed:
            self.detailed.measure_peak()
        begin = common_moment(self.world)
        if self.profiler:
            self.profiler.begin = begin

    def _trace(self, rank: int) -> Path:
        return self.folder / f"trace_rank{rank}.json"

    def _write(self, say: Say) -> None:
        rank = self.world.rank
        if self.profiler:
            stage = Grid(*self.layout.sizes).coords(rank)[1]
            make_folder(self.folder)
            trace = self._trace(rank)
            self.profiler.write_trace(trace, rank, stage=stage, peak_mib=peak_memory_mib())
        if self.detailed:
            lines = self.detailed.table()
            write_text(self.folder / f"table_rank{rank}.txt", "\n".join(lines) + "\n")
            for line in lines:
                say(line)
        self.world.barrier()
        if rank == 0:
            self._merge(say)

    def _merge(self, say: Say) -> None:
        merged = self.folder / "trace.json"
        traces = [self._trace(rank) for rank in self.ranks]
        missing = merge_traces(traces, merged, self.placement, self.pipeline)
        say(f"trace of {len(traces) - len(missing)} ranks: {merged} (open it in ui.perfetto.dev)")
        if missing:
            names = ", ".join(path.name for path in missing)
            say(f"note: not in it, because the directory of rank 0 does not have them: {names}")
        elif self.layout.pp > 1:
            say(_draw(merged, self.folder / "schedule.png"))


def common_moment(world: Comm) -> float:
    """Return one moment of all ranks, by each rank's clock (time.perf_counter). Collective.

    All ranks leave a barrier at once, apart from wake-up times: a clock's offset is the median over several barriers.
    """
    world.barrier()  # waits for the slowest
    left = torch.empty(BARRIERS, dtype=torch.float64)
    for number in range(BARRIERS):
        world.barrier()
        left[number] = time.perf_counter()
    root = world.broadcast(left.clone())
    return float(root[-1] + (left - root).median())


def _draw(trace: Path, picture: Path) -> str:
    drawing = start_module(
        "observe.log.schedule_plot",
        str(trace),
        str(picture),
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="surrogateescape",
    )
    errors = drawing.communicate()[1].strip()
    if drawing.returncode:
        return f"{picture}: not drawn, {errors.splitlines()[-1]}"
    return f"schedule: {picture}"
