"""Energy that the nodes of a run use."""

from __future__ import annotations

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..host.energy import Counters


class EnergyWatch:
    """Joules of all nodes during the iterations. counters: of this node. active: every node has some. Collective."""

    def __init__(self, world: Comm, nodes: Nodes, counters: Counters) -> None:
        self.world, self._counters = world, counters if nodes.leads else None
        self.active = bool(world.all_reduce(torch.tensor(int(bool(counters.counters))), "min"))
        self._joules, self._seconds = 0.0, 0.0

    def begin(self) -> None:
        """Before an iteration."""
        if self.active and self._counters:
            self._counters.joules()

    def end(self, seconds: float) -> None:
        """After it. seconds: that it took."""
        self._seconds += seconds
        if self.active and self._counters:
            passed = self._counters.joules()
            self._joules += float("nan") if passed is None else passed

    def finish_interval(self) -> float | None:
        """Watts of all nodes since the interval before; None where a counter is missing or has failed. Collective."""
        if not self.active:
            return None
        joules, seconds, self._joules, self._seconds = self._joules, self._seconds, 0.0, 0.0
        together = self.world.all_reduce(torch.tensor(joules, dtype=torch.float64)).item()
        return together / seconds if together > 0 and seconds > 0 else None  # NaN is above nothing


def short_seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min"
