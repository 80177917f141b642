"""What observes a rank: its heartbeat, the clock of its phases, and the profile of --profile.

A heartbeat reports the instruction and its micro-batch, a collective and its ranks, and reading; `place` tells the watchdog which
ranks and nodes there are. The ranks of --profile-ranks record everything. Of the others those of rank 0's pipeline record their
instructions, so that the schedule of a run is there as a whole. Left out: the heartbeat itself (watchdog/heartbeat.py), what is
recorded (host/observed.py) and drawn (`logs`).
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..config.layout import Layout, placement
from ..config.run_config import OutputConfig, RunConfig
from ..host.allocator import peak_memory_mib
from ..host.observed import (
    INSTRUCTIONS,
    NONBLOCKING,
    Observed,
    Observer,
    Phases,
    Profiler,
    observe_groups,
)
from ..logs import plot
from ..pipeline.parts import SENDS, Instruction
from ..pipeline.schedule import Executor
from ..watchdog.heartbeat import Heartbeat
from ..watchdog.verdict import LISTENERS, Address, Link, open_socket, own_address, parent
from ..watchdog.watch import Watchdog
from .machine_faults import Checksums

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
        self.pipeline, self.placement = first_pipeline(layout), placement(run)
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
        missing = plot.merge_traces(
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
    """What the log says of the picture of the schedule."""
    drawing = plot.start(
        "schedule",
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


NAMES = {
    "world": "all",
    "tp": "tensor-parallel",
    "pp": "pipeline",
    "dp": "data-parallel",
    "embedding": "embedding's",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "etp": "expert-tensor-parallel",
    "edp": "expert-data-parallel",
}
MESSAGES = ("isend", "irecv")  # between stages they are those of an instruction, which says more
LISTED = 4  # ranks of a group that are named


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a line: 0, 2, 4, 6 ... 14."""
    if len(ranks) <= LISTED + 1:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:LISTED]))} ... {ranks[-1]}"


class Heartbeats:
    """Signs of life of one rank. The trainer takes `groups(...)`, `watch` and `reading`."""

    def __init__(self, heart: Heartbeat, grid: Grid, rank: int) -> None:
        self.heart = heart
        self._ranks = {
            **dict.fromkeys(NAMES, [rank]),
            "world": range(grid.world_size),
            **grid.ranks(rank),
        }

    def groups(self, groups: Groups) -> Groups:
        """The same groups; a collective is told with the group's ranks."""
        return observe_groups(groups, self._of_group)

    def watch(self, executor: Any) -> Executor:
        """The schedule's executor; each instruction is told with its micro-batch, a message with the other rank."""
        chunks, placement, stage = len(executor.chunks), executor.placement, executor.pp.rank
        peers = self._ranks["pp"]

        def call(
            name: str, function: Callable[..., Any], args: tuple[Instruction], kwargs: dict
        ) -> Any:
            instruction = args[0]
            what = f"{name} of micro-batch {instruction.microbatch}" + (
                f", chunk {instruction.chunk}" if chunks > 1 else ""
            )
            if name.startswith(("send", "recv")):
                what += f" {'to' if name in SENDS else 'from'} rank {peers[placement.peer(stage, instruction)[0]]}"
            return self._during(what, function, args, kwargs)

        return Observed(executor, INSTRUCTIONS, call)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what fetches samples."""
        with self.heart.phase("reading data"):
            yield

    def _during(self, what: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        before = self.heart.enter(what)
        try:
            return function(*args, **kwargs)
        finally:
            self.heart.leave(before)

    def _of_group(self, group: str) -> Observer:
        members = f"over {NAMES[group]} ranks {listed(self._ranks[group])}"

        def call(name: str, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
            if name in MESSAGES and group == "pp":
                return function(*args, **kwargs)
            verb = name.removeprefix("i") if name in NONBLOCKING else name
            before = self.heart.enter(
                f"{verb} {members}" + f" in {self.heart.what}" * bool(self.heart.what)
            )
            try:
                result = function(*args, **kwargs)
            finally:
                self.heart.leave(before)
            if name not in NONBLOCKING:
                return result
            return Observed(result, ("wait",), lambda _, wait, *rest: call(verb, wait, *rest))

        return call


@dataclass(frozen=True)
class Observers:
    """What observes a rank's communicators, instructions, reading and kernels.

    profile, checksums: None if the run asks for none.
    """

    phases: Phases
    beats: Heartbeats
    profile: Profile | None
    checksums: Checksums | None = None

    def kernels(self, library: Any) -> Any:
        """The kernels, observed."""
        profiled = self.profile.kernels(library) if self.profile else library
        return self.checksums.observe(profiled) if self.checksums else profiled

    def groups(self, groups: Groups) -> Groups:
        """The same groups, observed."""
        groups = self.phases.groups(self.beats.groups(groups))
        return self.profile.groups(groups) if self.profile else groups

    def watch(self, executor: Executor) -> Executor:
        """The schedule's executor, observed."""
        watched = self.phases.watch(self.beats.watch(executor))
        return self.profile.watch(watched) if self.profile else watched

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around what fetches samples."""
        with self.phases.waiting_for_data(), self.beats.reading():
            yield


def place(watchdog: Watchdog, world: Comm, nodes: Nodes) -> None:
    """Tell the watchdog who is who. Collective."""
    folder = nodes.ranks.broadcast_object(watchdog.heart.folder)
    if folder is not None:
        local = tuple(nodes.ranks.all_gather_object(world.rank))
        watchdog.placed(world.rank, folder, local, _link(world, nodes) if nodes.count > 1 else None)


def _link(world: Comm, nodes: Nodes) -> Link:
    """A socket of each rank, of which the first ones of each node are made known to the nodes that report to it."""
    token, towards = world.broadcast_object((secrets.randbits(62), own_address()))
    opened = open_socket(own_address(towards) if nodes.number else towards)
    address, port = opened.getsockname()
    ports = nodes.ranks.all_gather_object(port)[:LISTENERS]
    return Link(nodes.number, nodes.count, token, opened, _parents(world, nodes, address, ports))


def _parents(world: Comm, nodes: Nodes, address: str, ports: list[int]) -> list[Address]:
    """Where the node above listens. Of each node one rank learns 24 bytes of all others, for as long as this takes."""
    own = torch.tensor(
        [int.from_bytes(socket.inet_aton(address), "big"), *ports, *[0] * (LISTENERS - len(ports))]
    )
    leaders = world.split(0 if nodes.leads else 1, world.rank)
    above = parent(nodes.number)
    if nodes.leads:
        everyone = leaders.all_gather(
            own.new_empty(leaders.size, own.numel()), own
        )  # (nodes, 1 + LISTENERS)
        own = everyone[above or 0].clone()
    number, *listening = nodes.ranks.broadcast(own).tolist()
    host = socket.inet_ntoa(number.to_bytes(4, "big"))
    return [(host, port) for port in listening if port and above is not None]
