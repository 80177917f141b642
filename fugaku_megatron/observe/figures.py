"""Figures of a log interval under the names of Megatron-LM's telemetry, for OTLP and Prometheus.

Names, kinds and units are those of megatron/core/telemetry/training_metrics.py there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .iteration_metrics import IterationMetrics

NAMESPACE = "megatron.training"
GAUGE = "gauge"
COUNTER = "counter"
HISTOGRAM = "histogram"


class Figure(NamedTuple):
    """Figure for export. value: None if the interval has no such value"""

    name: str
    kind: str
    unit: str
    description: str
    value: Callable[[IterationMetrics], float | None]


def _milliseconds(metrics: IterationMetrics) -> float | None:
    return None if metrics.elapsed_seconds is None else metrics.elapsed_seconds * 1e3


def _gib(metrics: IterationMetrics) -> float | None:
    return None if metrics.resident_mib is None else metrics.resident_mib / 1024


FIGURES = (
    Figure(
        "step_duration_ms", HISTOGRAM, "ms", "Mean seconds of an iteration x 1000", _milliseconds
    ),
    Figure("loss", GAUGE, "", "Mean training loss of the log interval", lambda each: each.lm_loss),
    Figure("throughput_tflops", GAUGE, "", "TFLOP/s of a rank", lambda each: each.tflops),
    Figure("grad_norm", GAUGE, "", "Norm of the gradients", lambda each: each.grad_norm),
    Figure("skipped_iters", COUNTER, "", "Iterations without an update", lambda each: each.skipped),
    Figure("learning_rate", GAUGE, "", "Learning rate", lambda each: each.learning_rate),
    Figure(
        "tokens_per_sec",
        GAUGE,
        "",
        "Tokens per second of all ranks",
        lambda each: each.tokens_per_second,
    ),
    Figure("memory_allocated_gb", GAUGE, "", "Memory of the largest rank in GiB", _gib),
)
