"""Which ranks share a node, found once at the start: what concerns a node is said and done inside it, by one of its ranks.

No rank learns of all nodes: at 98,304 ranks their names and core masks alone would take more memory than a model's layer.
"""

from __future__ import annotations

import platform
import zlib
from dataclasses import dataclass

import torch

from .base import Comm


@dataclass(frozen=True)
class Nodes:
    """ranks: those of this rank's node, in the order of the world. count: nodes of the world. number: this one's, from 0."""

    ranks: Comm
    count: int
    number: int

    @property
    def leads(self) -> bool:
        """Whether this rank does what one rank of a node does for all."""
        return self.ranks.rank == 0


def find_nodes(world: Comm, name: str | None = None) -> Nodes:
    """The nodes of `world`. name: this rank's node, by default the host's name. Collective.

    The nodes are numbered in the order of their first ranks.
    """
    name = name or platform.node()
    alike = world.split(zlib.crc32(name.encode()) & 0x7FFFFFFF, world.rank)  # names of one checksum: nearly always one name
    names = alike.all_gather_object(name)
    ranks = alike if len(set(names)) == 1 else alike.split(sorted(set(names)).index(name), alike.rank)
    leaders = world.split(0 if ranks.rank == 0 else 1, world.rank)
    place = torch.tensor([leaders.rank, leaders.size] if ranks.rank == 0 else [0, 0])
    number, count = ranks.broadcast(place).tolist()
    return Nodes(ranks, count, number)
