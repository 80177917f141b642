"""Copies of the training state in the memory of other nodes, for `--save-memory`.

Ranks with one local number on G nodes are a group. Each has its own state in its node's memory, and XOR parity of one segment
of the state of each other rank (Moody et al. 2010, SCR; with G = 2 the parity is the other state).
`memory_rebuild` computes the states of a lost node from those of the other nodes.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..comm.agreement import Nodes, agree
from ..comm.base import Comm, Handle
from ..text.written_files import write_text
from .manifest import Description, entries, iteration_name
from .memory_slot import (
    NEIGHBOUR,
    Bytes,
    Protection,
    Segments,
    Slot,
    attempt_number,
    keep_only,
)
from .node_copy import rank_folder
from .save import Steps
from .shards import Shard
from .tensor_files import FilePlan, plan_file

FLAG = "--save-memory"
PIECE = 4 << 20  # bytes of a message
NAP = 5e-4  # s between two looks at messages


def node_groups(nodes: int, size: int) -> list[range]:
    """Divide nodes into groups of `size`, some larger if that does not divide them."""
    count = max(1, nodes // size)
    bounds = [nodes * group // count for group in range(count + 1)]
    return [range(first, end) for first, end in zip(bounds, bounds[1:])]


def group_of(world: Comm, nodes: Nodes, size: int) -> Comm:
    """Build the communicator of this rank's group. Collective."""
    groups = node_groups(nodes.count, size)
    number = next(index for index, group in enumerate(groups) if nodes.number in group)
    return world.split(number * nodes.ranks.size + nodes.ranks.rank, nodes.number)


def _finish(handles: Sequence[Handle]) -> None:
    """Wait for messages without hurrying the communication thread, which training needs."""
    while not all(handle.done() for handle in handles):
        time.sleep(NAP)
    for handle in handles:
        handle.wait()


def exchange(comm: Comm, state: Bytes, parity: Bytes, segments: Segments) -> None:
    """Send this rank's segments to the other ranks of its group, and compute `parity` of theirs."""
    me = comm.rank
    others = [rank for rank in range(comm.size) if rank != me]
    buffers = {rank: np.empty(min(PIECE, segments.length), np.uint8) for rank in others}
    for start in range(0, segments.length, PIECE):
        end = min(start + PIECE, segments.length)
        handles = []
        received = []
        for rank in others:
            first, last = segments.span(me, rank, start, end)
            if last > first:
                handles.append(comm.isend(torch.from_numpy(state[first:last]), rank))
            first, last = segments.span(rank, me, start, end)
            if last > first:
                piece = buffers[rank][: last - first]
                handles.append(comm.irecv(torch.from_numpy(piece), rank))
                received.append(piece)
        _finish(handles)
        parity[start:end] = 0
        for piece in received:
            target = parity[start : start + len(piece)]
            np.bitwise_xor(target, piece, out=target)


def _send_to_next(comm: Comm, text: str) -> str:
    """Send a text to the next rank of a group; return the text of the rank before."""
    sent = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    after = (comm.rank + 1) % comm.size
    before = (comm.rank - 1) % comm.size
    size = torch.zeros(1, dtype=torch.int64)
    _finish([comm.isend(torch.tensor([len(sent)]), after), comm.irecv(size, before)])
    received = torch.empty(int(size), dtype=torch.uint8)
    _finish([comm.isend(sent, after), comm.irecv(received, before)])
    return received.numpy().tobytes().decode()


def _remedy() -> str:
    return ". Earlier copies are untouched. If memory is full, omit --save-memory or start fewer ranks on a node"


class MemoryCopies:
    """This rank's two slots, used in turn: the newest complete copy is kept until the next is complete on all ranks.

    folder: of the run's copies on this node
    size: nodes of a group
    run: id of the run
    iteration: of the copy from which the run continues, or 0; others are removed
    attempt: of that copy, if it is not whole any more: the next one, of the same iteration, then replaces it
    """

    def __init__(
        self,
        folder: Path,
        world: Comm,
        nodes: Nodes,
        *,
        size: int,
        run: str,
        iteration: int = 0,
        attempt: int | None = None,
    ) -> None:
        self._own = rank_folder(folder, world.rank)
        self._run = run
        self._world = world
        self._nodes = nodes
        self._here = nodes.ranks.all_gather_object(self._own.name)
        self._comm = group_of(world, nodes, size)
        self._group = tuple(self._comm.all_gather_object(world.rank))
        self._attempt = int(world.broadcast_object(attempt_number()))
        self._incomplete = attempt
        self._plan: FilePlan | None = None
        self._segments: Segments | None = None
        self._slots: list[Slot] = []
        self._complete: Slot | None = None
        if nodes.leads:
            keep_only(folder, lambda path: path.name == iteration_name(iteration))
        nodes.ranks.barrier()

    @property
    def is_incomplete(self) -> bool:
        """True if the copy from which the run continues does not survive another lost node."""
        return self._incomplete is not None

    def steps(self, shards: list[Shard], description: Description) -> Steps:
        """Copy the state, and exchange parity while training continues. See `save.BackgroundSave`.

        shards: of equal keys and sizes in each call
        """
        iteration = description.iteration
        description = replace(description, state={**description.state, "run": self._run})
        prefix = f"{FLAG}: iteration {iteration} is not copied: "
        if self._segments is None:
            if shards:
                self._plan = plan_file({shard.key: shard.tensor for shard in shards})
            size = self._plan.size if self._plan else 0
            self._segments = Segments(tuple(self._comm.all_gather_object(size)))
        slot = agree(self._world, partial(self._begin, iteration, shards), prefix, _remedy)
        outcome = yield partial(self._copy, slot, shards, description)
        agree(self._world, outcome, prefix, _remedy)
        self._complete = slot
        self._incomplete = None
        self._remove_others()

    def _begin(self, iteration: int, shards: list[Shard]) -> Slot:
        assert self._segments is not None
        free = [slot for slot in self._slots if slot is not self._complete]
        if not free:
            free = [Slot(self._own, self._world.rank, self._plan, self._segments.length)]
            self._slots += free
        free[0].begin(iteration, shards)
        return free[0]

    def _copy(self, slot: Slot, shards: list[Shard], description: Description) -> None:
        """Compute parity and checksums, and publish the copy."""
        assert self._segments is not None
        exchange(self._comm, slot.state, slot.parity, self._segments)
        attempt = self._attempt if self._incomplete is None else self._incomplete
        protection = Protection(attempt, self._group, self._segments.sizes)
        text = slot.seal(shards, description, protection)
        write_text(slot.folder / NEIGHBOUR, _send_to_next(self._comm, text))
        slot.publish(description.iteration)

    def _remove_others(self) -> None:
        """Remove the copy from which the run continued, and those of ranks that are on other nodes now."""
        kept = {slot.folder for slot in self._slots}
        for _, _, path in entries(self._own):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        if self._nodes.leads:
            keep_only(self._own.parent, lambda path: path.parent.name in self._here)

    def remove(self) -> None:
        """Remove all copies at the end of a run. Collective in the node."""
        self._nodes.ranks.barrier()
        if self._nodes.leads:
            shutil.rmtree(self._own.parent, ignore_errors=True)
