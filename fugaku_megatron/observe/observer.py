"""Life cycle of a run's observers: memory, energy, slow ranks, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..training.trainer import IterationResult

MetricValues = dict[str, Any]  # fields of `IterationMetrics`
Say = Callable[[int, str], None]  # prints a line about an iteration


class Observer:
    """An observer on every rank. `finish_interval` and `report` end a log interval; all methods are collective."""

    def begin(self) -> None: ...

    def end(self, result: IterationResult) -> MetricValues:
        """End an iteration; return values for `IterationMetrics`."""
        return {}

    def finish_interval(self, iteration: int) -> MetricValues:
        return {}

    def report(self, iteration: int) -> None: ...
