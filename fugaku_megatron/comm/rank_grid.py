"""Ranks of a parallel layout, without communicators and torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankGrid:
    """Ranks as a (dp, pp, cp, tp) grid with dp x cp = world_size / (tp * pp) (`layout.check_world_size`).

    etp: divides tp; None: tp
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
        assert self.tp % (self.etp or self.tp) == 0, self
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
