"""Heartbeats and clocks that observe a rank's communication and reading."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..host.observed import (
    INSTRUCTIONS,
    NONBLOCKING,
    Observed,
    Observer,
    Phases,
    observe_groups,
    observe_wait,
)
from ..pipeline.instructions import SENDS, Instruction
from ..pipeline.schedule import Executor
from .abft import Checksums
from .hang_verdict import LISTENERS, Address, Link, open_socket, own_address, parent
from .heartbeat import Heartbeat
from .profile import Profile
from .watchdog import Watchdog

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
                f", chunk {instruction.model_chunk}" if chunks > 1 else ""
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
            verb = name.removesuffix(" wait")
            if verb in NONBLOCKING:
                verb = verb.removeprefix("i")
            before = self.heart.enter(
                f"{verb} {members}" + f" in {self.heart.what}" * bool(self.heart.what)
            )
            try:
                result = function(*args, **kwargs)
            finally:
                self.heart.leave(before)
            return observe_wait(name, result, call)

        return call


@dataclass(frozen=True)
class Observers:
    """Observers of a rank's communicators, instructions, reading and kernels.

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
    """Return the addresses of the parent node. Meanwhile one rank of each node has 24 bytes of every other node. Collective."""
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
