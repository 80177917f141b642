"""Emulated nodes: ranks that are threads, with a folder in place of each node's memory."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fugaku_megatron.checkpoint.manifest import Description
from fugaku_megatron.checkpoint.memory_copy import MemoryCopies
from fugaku_megatron.checkpoint.memory_rebuild import Found, find_copies, rebuild
from fugaku_megatron.checkpoint.save import run_steps
from fugaku_megatron.checkpoint.shards import Shard
from fugaku_megatron.comm.agreement import Nodes, find_nodes
from fugaku_megatron.comm.base import Comm
from tests.threads import ThreadWorld


@dataclass(frozen=True)
class Cluster:
    """Nodes below `root`. places: name of each rank's node"""

    root: Path
    places: Sequence[str]

    def __post_init__(self) -> None:
        for name in self.places:
            (self.root / name).mkdir(exist_ok=True)

    def folder(self, rank: int) -> Path:
        return self.root / self.places[rank] / "copies"

    def nodes(self, world: Comm) -> Nodes:
        return find_nodes(world, self.places[world.rank])

    def lose(self, *names: str) -> None:
        for name in names:
            shutil.rmtree(self.root / name)
            (self.root / name).mkdir()


def shards(rank: int, iteration: int, sizes: Sequence[int]) -> list[Shard]:
    """Return random shards of a rank, none of size 0. sizes: elements of each rank"""
    if not sizes[rank]:
        return []
    generator = torch.Generator().manual_seed(1000 * iteration + rank)
    values = torch.rand(sizes[rank], generator=generator)
    steps = torch.tensor([iteration, rank])
    return [Shard.whole(f"weight/{rank}", values), Shard.whole(f"steps/{rank}", steps)]


def copy(cluster: Cluster, sizes: Sequence[int], group: int, *iterations: int) -> None:
    """Copy the states of these iterations."""

    def rank(world: Comm) -> None:
        copies = MemoryCopies(
            cluster.folder(world.rank), world, cluster.nodes(world), size=group, run="run"
        )
        for iteration in iterations:
            description = Description(iteration, {}, {}, {"iteration": iteration})
            run_steps(copies.steps(shards(world.rank, iteration, sizes), description))

    ThreadWorld(len(cluster.places)).run(rank)


def find(cluster: Cluster) -> list[Found]:
    """Return what each rank finds, and give it its state."""

    def rank(world: Comm) -> Found:
        folder = cluster.folder(world.rank)
        nodes = cluster.nodes(world)
        found = find_copies(folder, world, nodes, lambda head: True)
        if found.iteration:
            assert rebuild(found, folder, world, nodes)
        return found

    return ThreadWorld(len(cluster.places)).run(rank)
