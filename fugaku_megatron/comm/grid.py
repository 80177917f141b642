"""A parallel layout's process groups.

Ranks 0 .. world-1 are reshaped to (dp, pp, cp, tp). Expert parallelism reshapes a stage's dp x tp
ranks to (edp, ep, etp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Comm, SoloComm

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
class Grid:
    """Ranks as a (dp, pp, cp, tp) grid with dp x cp = world_size / (tp * pp) (`layout.check_world_size`).

    etp: 1 or tp; None: tp
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1

    def __post_init__(self) -> None:
        assert self.tp >= 1 and self.pp >= 1 and self.cp >= 1 and self.world_size >= 1, self
        assert self.world_size % (self.tp * self.pp * self.cp) == 0, self
        assert self.etp in (None, 1, self.tp), self
        assert self.dp * self.tp % (self.ep * (self.etp or self.tp)) == 0, self

    @property
    def dp(self) -> int:
        return self.world_size // (self.tp * self.pp)

    def coords(self, rank: int) -> tuple[int, int, int]:
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return dp * self.cp + cp, pp, tp

    def rank(self, dp: int, pp: int, tp: int) -> int:
        dp, cp = divmod(dp, self.cp)
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def ranks(self, rank: int) -> dict[str, list[int]]:
        """Return the world ranks of each group with `rank`, in group order; keys as in `Groups`."""
        dp, pp, tp = self.coords(rank)
        ends = (self.rank(dp, 0, tp), self.rank(dp, self.pp - 1, tp))
        groups = {
            "tp": [self.rank(dp, pp, i) for i in range(self.tp)],
            "pp": [self.rank(dp, i, tp) for i in range(self.pp)],
            "dp": [self.rank(i, pp, tp) for i in range(self.dp)],
            "embedding": sorted(set(ends)) if rank in ends else [rank],
        }
        if self.cp > 1:
            first = dp // self.cp * self.cp
            groups["cp"] = [self.rank(first + i, pp, tp) for i in range(self.cp)]
        if self.ep > 1 or self.etp not in (None, self.tp):
            groups |= self._expert_ranks(rank)
        return groups

    def _expert_ranks(self, rank: int) -> dict[str, list[int]]:
        etp = self.etp or self.tp
        dp, pp, tp = self.coords(rank)
        # In the order (edp, ep, etp).
        stage = [self.rank(i, pp, j) for i in range(self.dp) for j in range(self.tp)]
        outer, inner = divmod(dp * self.tp + tp, self.ep * etp)
        begin = outer * self.ep * etp
        return {
            "ep": stage[begin + inner % etp : begin + self.ep * etp : etp],
            "etp": stage[begin + inner // etp * etp :][:etp],
            "edp": stage[inner :: self.ep * etp],
        }

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
