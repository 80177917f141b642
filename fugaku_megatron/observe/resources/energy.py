"""Energy that a run's nodes use."""

from __future__ import annotations

import torch

from ...comm.agreement import Nodes
from ...comm.base import Comm
from ...host.energy import Counters
from ...training.trainer import IterationResult
from ..observer import MetricValues, Observer


class EnergyWatch(Observer):
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

    def end(self, result: IterationResult) -> MetricValues:
        self._seconds += result.seconds
        if self.active and self._counters:
            passed = self._counters.joules()
            self._joules += float("nan") if passed is None else passed
        return {}

    def finish_interval(self, iteration: int) -> MetricValues:
        """Return the interval's mean power, all nodes, watts; None without every counter."""
        if not self.active:
            return {}
        joules = self.world.all_reduce(torch.tensor(self._joules, dtype=torch.float64)).item()
        watts = None
        if joules > 0 and self._seconds > 0:  # joules may be NaN
            watts = joules / self._seconds
        self._joules = 0.0
        self._seconds = 0.0
        return {"watts": watts}
