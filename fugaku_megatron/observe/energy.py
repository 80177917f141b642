"""Energy that the nodes of a run use."""

from __future__ import annotations

import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from ..host.energy import Counters


class EnergyWatch:
    """Energy of all nodes, if every node has a counter. Construction is collective."""

    def __init__(self, world: Comm, nodes: Nodes, counters: Counters) -> None:
        self.world = world
        self._counters = counters if nodes.leads else None
        self.active = bool(world.all_reduce(torch.tensor(int(bool(counters.counters))), "min"))
        self._joules = 0.0
        self._seconds = 0.0

    def begin(self) -> None:
        if self.active and self._counters:
            self._counters.joules()

    def end(self, seconds: float) -> None:
        self._seconds += seconds
        if self.active and self._counters:
            passed = self._counters.joules()
            self._joules += float("nan") if passed is None else passed

    def finish_interval(self) -> float | None:
        """Return the interval's mean power, all nodes, watts; None without every counter. Collective."""
        if not self.active:
            return None
        joules = self._joules
        seconds = self._seconds
        self._joules = 0.0
        self._seconds = 0.0
        together = self.world.all_reduce(torch.tensor(joules, dtype=torch.float64)).item()
        return together / seconds if together > 0 and seconds > 0 else None  # or NaN


def short_seconds(value: float) -> str:
    """Return "2.5 s" or "3 min"."""
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min"
