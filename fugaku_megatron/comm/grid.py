"""The parallel layout: which ranks form the tensor, context, pipeline, data parallel and embedding groups.

The layout is one reshape, ranks 0 .. world-1 -> (dp, pp, cp, tp), with tp innermost: a tensor parallel group consists of
neighbouring ranks (one node, or one unit of a torus). The ranks that share a sequence have the same weights and other tokens, as
ranks with other samples have: both together are the group `dp`, over which gradients are summed. Divided experts have a second
reshape of the dp x tp ranks of a stage -> (edp, ep, etp), so that the ranks which exchange tokens are as near as data-parallel
ranks can be. Left out: placing ranks on nodes, which is the launcher's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .base import Comm, SoloComm

ALONE = SoloComm()


@dataclass(frozen=True)
class Groups:
    """One rank's communicators. `embedding` joins the first and last pipeline stage; it has size 1 elsewhere.

    dp: ranks with the same weights, of which `cp.size` at a time share their samples. cp: ranks that share each sequence.

    ep: ranks that have different experts; etp: that share each expert's matrices; edp: that hold the same experts. All three have
    size 1 where experts are held like other matrices.
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
        """Which of the `data_size` parts of a global batch this rank's samples are."""
        return self.dp.rank // self.cp.size

    @property
    def data_size(self) -> int:
        """Data-parallel size: parts of a global batch."""
        return self.dp.size // self.cp.size


def subgroup(comm: Comm, ranks: Sequence[int]) -> Comm:
    """The communicator of `ranks` (ranks of `comm`, in this order), which must include the caller.

    Entered by every rank of `comm`, each with its own group of one partition. A communicator without other ranks
    (`comm.base.SoloComm`) builds the group itself; all others split, with the group's first rank as the color.
    """
    own = getattr(comm, "subgroup", None)
    return own(ranks) if own else comm.split(color=ranks[0], key=ranks.index(comm.rank))


@dataclass(frozen=True)
class Grid:
    """`world_size` ranks as a (dp, pp, cp, tp) grid; dp x cp = world_size / (tp * pp), a whole number (`layout.check_world_size`).

    ep, etp: ranks that have different experts, and that share each of them, 1 or tp; None: tp.
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
        assert (
            self.etp in (None, 1, self.tp)
            and self.dp * self.tp % (self.ep * (self.etp or self.tp)) == 0
        ), self

    @property
    def dp(self) -> int:
        """Ranks with the same weights: data-parallel size x cp."""
        return self.world_size // (self.tp * self.pp)

    def coords(self, rank: int) -> tuple[int, int, int]:
        """(number among the ranks with the same weights, pp, tp) of a world rank."""
        assert 0 <= rank < self.world_size, f"rank {rank} of {self.world_size}"
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return dp * self.cp + cp, pp, tp

    def rank(self, dp: int, pp: int, tp: int) -> int:
        """World rank at (number among the ranks with the same weights, pp, tp): the inverse of `coords`."""
        dp, cp = divmod(dp, self.cp)
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def ranks(self, rank: int) -> dict[str, list[int]]:
        """World ranks of each group that `rank` belongs to, in group order; keys as in `Groups`."""
        dp, pp, tp = self.coords(rank)
        divided = self.ep > 1 or self.etp not in (None, self.tp)
        ends = (self.rank(dp, 0, tp), self.rank(dp, self.pp - 1, tp))
        return {
            "tp": [self.rank(dp, pp, i) for i in range(self.tp)],
            "pp": [self.rank(dp, i, tp) for i in range(self.pp)],
            "dp": [self.rank(i, pp, tp) for i in range(self.dp)],
            "embedding": sorted(set(ends)) if rank in ends else [rank],
            **(
                {"cp": [self.rank(dp // self.cp * self.cp + i, pp, tp) for i in range(self.cp)]}
                if self.cp > 1
                else {}
            ),
            **(self._expert_ranks(rank) if divided else {}),
        }

    def _expert_ranks(self, rank: int) -> dict[str, list[int]]:
        """World ranks of the groups of divided experts."""
        etp, (dp, pp, tp) = self.etp or self.tp, self.coords(rank)
        stage = [
            self.rank(i, pp, j) for i in range(self.dp) for j in range(self.tp)
        ]  # in the order (edp, ep, etp)
        outer, inner = divmod(dp * self.tp + tp, self.ep * etp)
        begin = outer * self.ep * etp
        return {
            "ep": stage[begin + inner % etp : begin + self.ep * etp : etp],
            "etp": stage[begin + inner // etp * etp :][:etp],
            "edp": stage[inner :: self.ep * etp],
        }

    def groups(self, world: Comm) -> Groups:
        """Build this rank's groups; entered by every rank of `world`. Raises ValueError when the sizes differ."""
        if world.size != self.world_size:
            raise ValueError(
                f"the grid has {self.world_size} ranks but {world.size} were started: run mpiexec -n {self.world_size}"
            )
        lists = self.ranks(world.rank)
        whole = lists.get("etp") == lists["tp"]  # the same ranks need no other communicator
        named = {
            name: subgroup(world, ranks)
            for name, ranks in lists.items()
            if not (whole and name == "etp")
        }
        return Groups(world=world, **named, **({"etp": named["tp"]} if whole else {}))
