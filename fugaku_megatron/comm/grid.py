"""The parallel layout: which ranks form the tensor, pipeline, data parallel and embedding groups.

The layout is one reshape, ranks 0 .. world-1 -> (dp, pp, tp), with tp innermost: a tensor parallel group consists of
neighbouring ranks (one node, or one unit of a torus). Left out: placing ranks on nodes, which is the launcher's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Comm


@dataclass(frozen=True)
class Groups:
    """One rank's communicators. `embedding` joins the first and last pipeline stage; it has size 1 elsewhere."""

    world: Comm
    tp: Comm
    pp: Comm
    dp: Comm
    embedding: Comm


def subgroup(comm: Comm, ranks: Sequence[int]) -> Comm:
    """The communicator of `ranks` (ranks of `comm`, in this order), which must include the caller.

    Entered by every rank of `comm`, each with its own group of one partition. A communicator without other ranks
    (`comm.solo.SoloComm`) builds the group itself; all others split, with the group's first rank as the color.
    """
    own = getattr(comm, "subgroup", None)
    return own(ranks) if own else comm.split(color=ranks[0], key=ranks.index(comm.rank))


@dataclass(frozen=True)
class Grid:
    """`world_size` ranks as a (dp, pp, tp) grid; dp = world_size / (tp * pp), a whole number (`layout.check_world_size`)."""

    world_size: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        assert self.tp >= 1 and self.pp >= 1 and self.world_size >= 1, self
        assert self.world_size % (self.tp * self.pp) == 0, self

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.world_size // (self.tp * self.pp)

    def coords(self, rank: int) -> tuple[int, int, int]:
        """(dp, pp, tp) of a world rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        return *divmod(rest, self.pp), tp

    def rank(self, dp: int, pp: int, tp: int) -> int:
        """World rank at (dp, pp, tp): the inverse of `coords`."""
        return (dp * self.pp + pp) * self.tp + tp

    def ranks(self, rank: int) -> dict[str, list[int]]:
        """World ranks of each group that `rank` belongs to, in group order; keys as in `Groups`."""
        dp, pp, tp = self.coords(rank)
        ends = (self.rank(dp, 0, tp), self.rank(dp, self.pp - 1, tp))
        return {
            "tp": [self.rank(dp, pp, i) for i in range(self.tp)],
            "pp": [self.rank(dp, i, tp) for i in range(self.pp)],
            "dp": [self.rank(i, pp, tp) for i in range(self.dp)],
            "embedding": sorted(set(ends)) if rank in ends else [rank],
        }

    def groups(self, world: Comm) -> Groups:
        """Build this rank's groups; entered by every rank of `world`. Raises ValueError when the sizes differ."""
        if world.size != self.world_size:
            raise ValueError(
                f"the grid has {self.world_size} ranks but {world.size} were started: run mpiexec -n {self.world_size}"
            )
        named = {name: subgroup(world, ranks) for name, ranks in self.ranks(world.rank).items()}
        return Groups(world=world, **named)
