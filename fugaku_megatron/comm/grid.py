"""A parallel layout's process groups.

Ranks 0 .. world-1 are reshaped to (dp, pp, cp, tp). Expert parallelism reshapes a stage's dp x tp
ranks to (edp, ep, etp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Comm, SoloComm
from .rank_grid import RankGrid

ALONE = SoloComm()


@dataclass(frozen=True)
class Groups:
    """One rank's communicators.

    dp: ranks with the same weights, context-parallel ranks included
    cp: ranks that share each sequence
    embedding: first and last pipeline stage; size 1 elsewhere
    ep, etp, edp: ranks with different experts, with shards of an expert, with the same experts
    """

    world: Comm
    tp: Comm
    pp: Comm
    dp: Comm
    embedding: Comm
    ep: Comm = ALONE
    etp: Comm = ALONE
    edp: Comm = ALONE
    cp: Comm = ALONE

    @property
    def data_rank(self) -> int:
        return self.dp.rank // self.cp.size

    @property
    def data_size(self) -> int:
        return self.dp.size // self.cp.size


def subgroup(comm: Comm, ranks: Sequence[int]) -> Comm:
    """Build the communicator of `ranks` (of `comm`, in order), which include the caller.

    Entered by every rank of `comm`, each with its group in one partition.
    """
    own = getattr(comm, "subgroup", None)
    return own(ranks) if own else comm.split(color=ranks[0], key=ranks.index(comm.rank))


@dataclass(frozen=True)
class Grid(RankGrid):
    """Ranks whose process groups are built."""

    def groups(self, world: Comm) -> Groups:
        """Build this rank's groups; entered by every rank of `world`. ValueError if the sizes differ."""
        if world.size != self.world_size:
            raise ValueError(
                f"the grid has {self.world_size} ranks but {world.size} were started: run mpiexec -n {self.world_size}"
            )
        ranks = self.ranks(world.rank)
        etp_is_tp = ranks.get("etp") == ranks["tp"]
        if etp_is_tp:
            del ranks["etp"]
        groups = {name: subgroup(world, members) for name, members in ranks.items()}
        if etp_is_tp:
            groups["etp"] = groups["tp"]
        return Groups(world=world, **groups)
