"""Interface of the writers of a run's metrics."""

from __future__ import annotations

from typing import Any

from ..log.iteration_metrics import IterationMetrics


class Writer:
    """A destination of metrics on the printing rank. Methods that a writer does not need do nothing."""

    def scalar(
        self, tag: str, value: float, iteration: int, consumed_samples: int | None = None
    ) -> None:
        """Write a value under one of Megatron-LM's TensorBoard tags."""

    def interval(self, metrics: IterationMetrics) -> None:
        """Write the metrics of a log interval."""

    def record(self, kind: str, values: dict[str, Any]) -> None:
        """Write a record of the history. OSError if the record is not written yet."""

    def close(self) -> None: ...
