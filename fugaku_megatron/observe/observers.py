"""Observers of a rank's communication, instructions, data reading and kernels."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..host.observed import (
    INSTRUCTIONS,
    NONBLOCKING,
    Arguments,
    Keywords,
    Observed,
    Observer,
    Phases,
    observe_groups,
    observe_wait,
)
from ..pipeline.instructions import RECEIVES, SENDS, Executor, Instruction
from .export.telemetry import Telemetry
from .hang.hang_verdict import LISTENERS, Address, Link, open_socket, own_address, parent
from .hang.heartbeat import Heartbeat
from .hang.watchdog import Watchdog
from .profile.profile import Profile

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
MESSAGES = ("isend", "irecv")  # between stages, part of an instruction that is reported instead
LISTED = 4  # leading ranks of a group in its text


def listed(ranks: Sequence[int]) -> str:
    if len(ranks) <= LISTED + 1:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:LISTED]))} ... {ranks[-1]}"


class Heartbeats:
    """One rank's heartbeats. Pass `groups(...)`, `watch` and `reading` to the trainer."""

    def __init__(self, heart: Heartbeat, grid: Grid, rank: int) -> None:
        self.heart = heart
        self._ranks: dict[str, Sequence[int]] = {
            **dict.fromkeys(NAMES, [rank]),
            "world": range(grid.world_size),
            **grid.ranks(rank),
        }

    def groups(self, groups: Groups) -> Groups:
        return observe_groups(groups, self._of_group)

    def watch(self, executor: Any) -> Executor:
        """Wrap an executor: each instruction becomes a heartbeat phase, with micro-batch and peer."""

        def call(name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
            instruction: Instruction = args[0]
            text = f"{name} of micro-batch {instruction.microbatch}"
            if len(executor.chunks) > 1:
                text += f", chunk {instruction.model_chunk}"
            if name in SENDS or name in RECEIVES:
                direction = "to" if name in SENDS else "from"
                stage, _ = executor.placement.peer(executor.pp.rank, instruction)
                text += f" {direction} rank {self._ranks['pp'][stage]}"
            with self.heart.phase(text):
                return function(*args, **kwargs)

        return cast(Executor, Observed(executor, INSTRUCTIONS, call))

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self.heart.phase("reading data"):
            yield

    def _of_group(self, group: str) -> Observer:
        members = f"over {NAMES[group]} ranks {listed(self._ranks[group])}"

        def call(name: str, function: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
            if name in MESSAGES and group == "pp":
                return function(*args, **kwargs)
            verb = name.removesuffix(" wait")
            if verb in NONBLOCKING:
                verb = verb.removeprefix("i")
            text = f"{verb} {members}"
            if self.heart.what:
                text += f" in {self.heart.what}"
            with self.heart.phase(text):
                result = function(*args, **kwargs)
            return observe_wait(name, result, call)

        return call


@dataclass(frozen=True)
class Observers:
    """All observers of one rank, to wrap kernels, process groups and executor."""

    phases: Phases
    beats: Heartbeats
    profile: Profile | None
    telemetry: Telemetry = field(default_factory=Telemetry)

    def kernels(self, library: Any) -> Any:
        return self.profile.kernels(library) if self.profile else library

    def groups(self, groups: Groups) -> Groups:
        groups = self.phases.groups(self.beats.groups(groups))
        return self.profile.groups(groups) if self.profile else groups

    def watch(self, executor: Executor) -> Executor:
        watched: Executor = self.phases.watch(self.beats.watch(executor))
        watched = self.telemetry.watch(watched)
        if self.profile:
            watched = self.profile.watch(watched)
        return watched

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        with self.phases.waiting_for_data(), self.beats.reading():
            yield


def place(watchdog: Watchdog, world: Comm, nodes: Nodes) -> None:
    """Set the watchdog's rank, node and link. Collective."""
    folder = nodes.ranks.broadcast_object(watchdog.heart.folder)
    if folder is None:
        return
    local = tuple(nodes.ranks.all_gather_object(world.rank))
    link = None
    if nodes.count > 1:
        token, towards = world.broadcast_object((secrets.randbits(62), own_address()))
        opened = open_socket(own_address(towards) if nodes.number else towards)
        address, port = opened.getsockname()
        ports = nodes.ranks.all_gather_object(port)[:LISTENERS]
        parents = _parents(world, nodes, address, ports)
        link = Link(nodes.number, nodes.count, token, opened, parents)
    watchdog.placed(world.rank, folder, local, link)


def _parents(world: Comm, nodes: Nodes, address: str, ports: list[int]) -> list[Address]:
    """Return addresses of the node above. One rank per node needs 24 bytes per node. Collective."""
    missing = [0] * (LISTENERS - len(ports))
    own = torch.tensor([int.from_bytes(socket.inet_aton(address), "big"), *ports, *missing])
    leaders = world.split(0 if nodes.leads else 1, world.rank)
    above = parent(nodes.number)
    if nodes.leads:
        everyone = own.new_empty(leaders.size, own.numel())  # (nodes, 1 + LISTENERS)
        own = leaders.all_gather(everyone, own)[above or 0].clone()
    number, *listening = nodes.ranks.broadcast(own).tolist()
    if above is None:
        return []
    host = socket.inet_ntoa(number.to_bytes(4, "big"))
    return [(host, port) for port in listening if port]
