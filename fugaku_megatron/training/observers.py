"""What observes a rank in an iteration: its heartbeat, the clock of its phases and perhaps a profile.

A heartbeat tells the instruction and its micro-batch, a collective and its ranks, and reading. Left out: the heartbeat itself
(watchdog/heartbeat.py), where time goes (host/observed.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..comm.grid import Grid, Groups
from ..host.observed import INSTRUCTIONS, NONBLOCKING, Observed, Observer, Phases, observe_groups
from ..pipeline.parts import SENDS, Instruction
from ..pipeline.schedule import Executor
from ..watchdog.heartbeat import Heartbeat
from .checksums import Checksums
from .profile import Profile

NAMES = {"world": "all", "tp": "tensor-parallel", "pp": "pipeline", "dp": "data-parallel", "embedding": "embedding's"}
MESSAGES = ("isend", "irecv")  # of an instruction, which says more
LISTED = 4  # ranks of a group that are named


def listed(ranks: Sequence[int]) -> str:
    """Ranks in a line: 0, 2, 4, 6 ... 14."""
    if len(ranks) <= LISTED + 1:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:LISTED]))} ... {ranks[-1]}"


class Heartbeats:
    """Signs of life of one rank. Give the trainer `groups(...)`, `watch` and `reading`."""

    def __init__(self, heart: Heartbeat, grid: Grid, rank: int) -> None:
        self.heart = heart
        self._ranks = {"world": range(grid.world_size), **grid.ranks(rank)}

    def groups(self, groups: Groups) -> Groups:
        """The same groups; a collective is told with the group's ranks."""
        return observe_groups(groups, self._of_group)

    def watch(self, executor: Any) -> Executor:
        """The schedule's executor; each instruction is told with its micro-batch, a message with the other rank."""
        chunks, placement, stage = len(executor.chunks), executor.placement, executor.pp.rank
        peers = self._ranks["pp"]

        def call(name: str, function: Callable[..., Any], args: tuple[Instruction], kwargs: dict) -> Any:
            instruction = args[0]
            what = f"{name} of micro-batch {instruction.microbatch}" + (f", chunk {instruction.chunk}" if chunks > 1 else "")
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
            if name in MESSAGES:
                return function(*args, **kwargs)
            verb = name.removeprefix("i") if name in NONBLOCKING else name
            before = self.heart.enter(f"{verb} {members}" + f" in {self.heart.what}" * bool(self.heart.what))
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
