"""Figures of a log interval under the names of Megatron-LM's telemetry, for OTLP and Prometheus.

Names, kinds and units follow megatron/core/telemetry/training_metrics.py there.
"""

from __future__ import annotations

from typing import NamedTuple

from ..log.iteration_metrics import IterationMetrics

NAMESPACE = "megatron.training"
GAUGE = "gauge"
COUNTER = "counter"
HISTOGRAM = "histogram"


class Figure(NamedTuple):
    """Field of `IterationMetrics`, times `factor`, for export."""

    name: str
    kind: str
    unit: str
    description: str
    field: str
    factor: float = 1

    def value(self, metrics: IterationMetrics) -> float | None:
        value: float | None = getattr(metrics, self.field)
        return None if value is None else value * self.factor


FIGURES = (
    Figure(
        "step_duration_ms",
        HISTOGRAM,
        "ms",
        "Mean seconds of an iteration x 1000",
        "elapsed_seconds",
        1e3,
    ),
    Figure("loss", GAUGE, "", "Mean training loss of the log interval", "lm_loss"),
    Figure("throughput_tflops", GAUGE, "", "TFLOP/s of a rank", "tflops"),
    Figure("grad_norm", GAUGE, "", "Norm of the gradients", "grad_norm"),
    Figure("skipped_iters", COUNTER, "", "Iterations without an update", "skipped"),
    Figure("learning_rate", GAUGE, "", "Learning rate", "learning_rate"),
    Figure("tokens_per_sec", GAUGE, "", "Tokens per second of all ranks", "tokens_per_second"),
    Figure(
        "memory_allocated_gb",
        GAUGE,
        "",
        "Memory of the largest rank in GiB",
        "resident_mib",
        1 / 1024,
    ),
)
