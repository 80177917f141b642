"""The newest copies in memory from which every rank can continue, also after the loss of nodes: see `memory_copy`.

A state that is on another node than its rank is moved, and a lost one is computed from parity.
Every public function with a communicator is collective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..text.written_files import write_text
from .manifest import (
    MANIFEST,
    file_name,
    iteration_name,
    join,
    list_iterations,
    read_head,
    unfinished_path,
)
from .memory_copy import FLAG, PIECE
from .memory_slot import (
    NEIGHBOUR,
    PARITY,
    Bytes,
    Protection,
    Segments,
    keep_only,
    make_copy_folder,
    map_file,
    verify_copy,
)
from .node_copy import rank_folder
from .save import put_in_place
from .schema import Manifest

Fits = Callable[[Manifest], bool]
Version = tuple[int, int]  # iteration, attempt


class Held(NamedTuple):
    """A copy on a node.

    rank: whose state it is
    group, sizes: of its parity; empty without
    holder: rank on that node, which sends the copy
    """

    iteration: int
    attempt: int
    rank: int
    group: tuple[int, ...]
    sizes: tuple[int, ...]
    holder: int

    @property
    def version(self) -> Version:
        return self.iteration, self.attempt


@dataclass(frozen=True)
class Found:
    """Copies of one iteration from which every rank can continue.

    version: (0, 0) without any
    copies: by rank, without those of `lost` ranks
    places: node of each rank
    note: line about newer copies that are not used
    """

    version: Version = (0, 0)
    copies: dict[int, Held] = field(default_factory=dict)
    places: Sequence[int] = ()
    note: str = ""

    @property
    def iteration(self) -> int:
        return self.version[0]

    @property
    def lost(self) -> list[int]:
        return [rank for rank in range(len(self.places)) if rank not in self.copies]

    @property
    def moved(self) -> list[int]:
        return [
            rank
            for rank, copy in self.copies.items()
            if self.places[copy.holder] != self.places[rank]
        ]

    @property
    def is_whole(self) -> bool:
        return not (self.lost or self.moved)

    def text(self) -> str:
        """Return what was done to continue, or nothing."""
        done = []
        if self.lost:
            done.append(f"states of ranks {join(self.lost)} computed from other nodes' copies")
        if self.moved:
            done.append(f"states of ranks {join(sorted(self.moved))} moved between nodes")
        return f"{FLAG}: {', '.join(done)}" if done else ""


def choose(held: Iterable[Held], places: Sequence[int]) -> tuple[Found, list[int]]:
    """Return the newest copies from which every rank can continue, and the ranks that prevent the use of newer ones.

    places: node of each rank
    """
    versions: dict[Version, dict[int, Held]] = {}
    for copy in held:
        copies = versions.setdefault(copy.version, {})
        if copy.rank not in copies or places[copy.holder] == places[copy.rank]:
            copies[copy.rank] = copy
    missing: list[int] = []
    for version in sorted(versions, reverse=True):
        copies = versions[version]
        without = _beyond_repair(copies, len(places))
        if not without:
            return Found(version, copies, places), missing
        missing = missing or without
    return Found(places=places), missing


def _beyond_repair(copies: dict[int, Held], ranks: int) -> list[int]:
    groups = {member: copy.group for copy in copies.values() for member in copy.group}

    def is_lost(rank: int) -> bool:
        group = groups.get(rank, ())
        others = [member for member in group if member != rank]
        return not group or any(
            member not in copies or copies[member].group != group for member in others
        )

    return [rank for rank in range(ranks) if rank not in copies and is_lost(rank)]


def find_copies(folder: Path, world: Comm, nodes: Nodes, fits: Fits) -> Found:
    """Return the newest usable copies, verified by their checksums.

    fits: True for a manifest from this layout
    """
    own: list[Held] = []
    others = 0
    for path in sorted(folder.glob("rank_*"))[nodes.ranks.rank :: nodes.ranks.size]:
        for iteration in list_iterations(path):
            head = read_head(path, iteration)
            if fits(head):
                own.append(_held(path, head, world.rank))
            else:
                others = max(others, iteration)
    others = int(world.all_reduce(torch.tensor(others), "max"))
    while True:
        gathered = world.all_gather_object((nodes.number, tuple(own)))
        places = [number for number, _ in gathered]
        every = [copy for _, copies in gathered for copy in copies]
        found, missing = choose(every, places)
        damaged = [
            copy
            for copy in own
            if found.copies.get(copy.rank) == copy and not _is_intact(folder, copy)
        ]
        own = [copy for copy in own if copy not in damaged]
        if not int(world.all_reduce(torch.tensor(len(damaged)), "sum")):
            break
    newest = max((copy.iteration for copy in every), default=0)
    note = ""
    if missing:
        note = f"{newest} are not complete (rank {missing[0]} and a rank of its group are lost)"
    elif others > found.iteration:
        note = f"{others} are of another layout or number of ranks"
    if note:
        note = f"note: {FLAG}: the copies of iteration {note}, and not used"
    return Found(found.version, found.copies, places, note)


def _held(path: Path, head: Manifest, holder: int) -> Held:
    protection = Protection.of(head)
    iteration = head["iteration"]
    if not (path / iteration_name(iteration) / PARITY).exists():
        protection = protection._replace(group=(), sizes=())
    return Held(
        iteration,
        protection.attempt,
        int(path.name.removeprefix("rank_")),
        group=protection.group,
        sizes=protection.sizes,
        holder=holder,
    )


def _is_intact(folder: Path, copy: Held) -> bool:
    own = rank_folder(folder, copy.rank)
    return verify_copy(own / iteration_name(copy.iteration), read_head(own, copy.iteration))


def rebuild(found: Found, folder: Path, world: Comm, nodes: Nodes) -> bool:
    """Give each rank its state on its own node. Return False if a state has another checksum then.

    Copies of other iterations are removed first, to make room.
    """
    if nodes.leads:
        keep_only(folder, lambda path: path.name == iteration_name(found.iteration))
    nodes.ranks.barrier()
    moves = _Moves(found, folder, world)
    for rank in sorted({*found.lost, *found.moved}):
        if rank in found.copies:
            moves.move(rank)
        else:
            moves.compute(rank)
    own = rank_folder(folder, world.rank)
    whole = True
    if world.rank in found.lost or world.rank in found.moved:
        whole = verify_copy(own / iteration_name(found.iteration), read_head(own, found.iteration))
    return bool(world.all_reduce(torch.tensor(int(whole)), "min"))


class _NewCopy(NamedTuple):
    """A copy that is computed. state: zeros at first"""

    folder: Path
    state: Bytes


@dataclass
class _Moves:
    """Messages between nodes: one rank's state after another, in one order on all ranks."""

    found: Found
    folder: Path
    world: Comm

    def move(self, rank: int) -> None:
        """Copy a state to the node of its rank, without parity."""
        holder = self.found.copies[rank].holder
        name = file_name(rank)
        path = self._path(rank)
        text = self._text(holder, rank, path / MANIFEST)
        if not text:
            return
        size = json.loads(text)["files"].get(name, {"size": 0})["size"]
        copy = self._begin(rank, size)
        self._add(holder, rank, path / name, 0, size, copy=copy, first=0)
        self._publish(rank, text, copy)

    def compute(self, rank: int) -> None:
        """Compute a lost state: the XOR of parity with the other states in this parity."""
        copies = self.found.copies
        group = next(copy.group for copy in copies.values() if rank in copy.group)
        segments = Segments(next(copies[member].sizes for member in group if member != rank))
        lost = group.index(rank)
        others = [place for place in range(len(group)) if place != lost]
        after = group[(lost + 1) % len(group)]
        text = self._text(copies[after].holder, rank, self._path(after) / NEIGHBOUR)
        copy = self._begin(rank, segments.sizes[lost])
        for place in others:
            holder = copies[group[place]].holder
            path = self._path(group[place])
            for keeper in others:
                first, last = segments.span(lost, keeper, 0, segments.length)
                start, end = segments.span(place, keeper, 0, segments.length)
                name = file_name(group[place])
                if keeper == place:
                    name = PARITY
                    start = 0
                    end = segments.length
                size = min(last - first, end - start)
                self._add(holder, rank, path / name, start, size, copy=copy, first=first)
        self._publish(rank, text, copy)

    def _path(self, rank: int) -> Path:
        return rank_folder(self.folder, rank) / iteration_name(self.found.iteration)

    def _is_local(self, holder: int, rank: int) -> bool:
        return self.found.places[holder] == self.found.places[rank]

    def _text(self, holder: int, rank: int, path: Path) -> str:
        """Return a holder's file on both ranks, and nothing on others."""
        me = self.world.rank
        if me not in (holder, rank):
            return ""
        if me == holder or self._is_local(holder, rank):
            data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            if not self._is_local(holder, rank):
                self.world.send(torch.tensor([len(data)]), rank)
                self.world.send(data, rank)
        else:
            size = self.world.recv(torch.zeros(1, dtype=torch.int64), holder)
            data = self.world.recv(torch.empty(int(size), dtype=torch.uint8), holder)
        return data.numpy().tobytes().decode()

    def _begin(self, rank: int, size: int) -> _NewCopy | None:
        """Return a new copy on its own rank."""
        if self.world.rank != rank:
            return None
        own = rank_folder(self.folder, rank)
        make_copy_folder(own)
        aside = unfinished_path(own, self.found.iteration)
        aside.mkdir()
        state = map_file(aside / file_name(rank), size) if size else np.empty(0, np.uint8)
        return _NewCopy(aside, state)

    def _add(
        self,
        holder: int,
        rank: int,
        path: Path,
        start: int,
        size: int,
        *,
        copy: _NewCopy | None,
        first: int,
    ) -> None:
        """Add, by XOR, bytes of a holder's file to a new state.

        start, size: in the file
        first: byte of the state
        """
        me = self.world.rank
        local = self._is_local(holder, rank)
        if size <= 0 or me not in (holder, rank) or (local and me != rank):
            return
        data = np.memmap(path, np.uint8, mode="r") if local or me == holder else None
        for offset in range(0, size, PIECE):
            length = min(PIECE, size - offset)
            if data is None:
                piece = np.empty(length, np.uint8)
                self.world.recv(torch.from_numpy(piece), holder)
            else:
                piece = np.array(data[start + offset : start + offset + length])
            if copy is None:
                self.world.send(torch.from_numpy(piece), rank)
                continue
            target = copy.state[first + offset : first + offset + length]
            np.bitwise_xor(target, piece, out=target)

    def _publish(self, rank: int, text: str, copy: _NewCopy | None) -> None:
        if copy is None:
            return
        write_text(copy.folder / MANIFEST, text)
        put_in_place(copy.folder, self._path(rank))
