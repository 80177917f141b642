"""A run's output: log lines, metrics for the writers, validation and peak memory."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from ...text.named_files import StrPath
from ..log.iteration_metrics import METRICS, IterationMetrics
from ..log.screen import LiveLine, Screen, on_terminal
from .writer import Writer

_PEAK_MEMORY = re.compile(r"peak memory per rank: max (\d+) MiB")
_VALIDATION = re.compile(
    r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|"
)


def _perplexity(lm_loss: float) -> float:
    """Return the perplexity, at most Megatron's exp(20)."""
    return math.exp(min(lm_loss, 20.0))


def format_validation(iteration: int, lm_loss: float, suffix: str = "") -> list[str]:
    values = f"lm loss value: {lm_loss:.6E} | lm loss PPL: {_perplexity(lm_loss):.6E}"
    text = f" validation{suffix} loss at iteration {iteration} | {values} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def parse_validation_line(line: str) -> tuple[int, float, float]:
    """Return (iteration, lm loss, perplexity)."""
    match = _VALIDATION.search(line)
    if match is None:
        raise ValueError(f"not a validation line: {line.strip()[:80]!r}")
    return int(match[1]), float(match[2]), float(match[3])


@dataclass(frozen=True)
class LogOutputs:
    """Destinations for a run's log lines and metrics. live: value of --log-live"""

    stream: TextIO | None = None
    live: str = "auto"
    log_file: StrPath | None = None
    writers: Sequence[Writer] = ()


class MetricsWriter:
    """Writer of metrics, averaged over log intervals."""

    def __init__(
        self,
        train_iters: int,
        log_interval: int,
        outputs: LogOutputs = LogOutputs(),
        printing: bool = True,
        start_iteration: int = 0,
    ) -> None:
        self.log_interval = log_interval
        self.printing = printing
        self.writers = outputs.writers
        self._interval: list[IterationMetrics] = []
        self._screen: Screen | None = None
        if printing:
            stream = outputs.stream or sys.stdout
            live = None
            if outputs.live == "on" or outputs.live == "auto" and on_terminal(stream):
                live = LiveLine(train_iters, start_iteration)
            self._screen = Screen(stream, live, outputs.log_file)
            if live and outputs.log_file is None:
                self._screen.line(
                    "note: log lines are not printed on a terminal: --log-file FILE keeps them, --log-live off prints them"
                )

    def add(self, metrics: IterationMetrics) -> IterationMetrics | None:
        self._interval.append(metrics)
        for name, metric in METRICS:
            value = getattr(metrics, name)
            self._scalar(metric.tag, value, metrics.iteration, metrics.consumed_samples)
        if self._screen is not None:
            self._screen.iteration(metrics)
        return None if metrics.iteration % self.log_interval else self.flush()

    def flush(self) -> IterationMetrics | None:
        """Write the interval's metrics to all outputs, and begin the next interval; None if empty."""
        if not self._interval:
            return None
        metrics = IterationMetrics.from_interval(self._interval)
        self._interval = []
        if self._screen is not None:
            self._screen.log_line(metrics.format_line())
        self.record("train", **asdict(metrics))
        for name, metric in METRICS:
            self._scalar(metric.interval_tag, getattr(metrics, name), metrics.iteration)
        for writer in self.writers:
            writer.interval(metrics)
        return metrics

    def validation(
        self, iteration: int, lm_loss: float, consumed_samples: int, suffix: str = ""
    ) -> None:
        """Write an evaluation. suffix: "-0", "-1" ... with several validation sets"""
        for line in format_validation(iteration, lm_loss, suffix):
            self.print(line)
        self.record(
            f"validation{suffix}",
            iteration=iteration,
            consumed_samples=consumed_samples,
            lm_loss=lm_loss,
        )
        tag = f"lm loss validation{suffix}"
        self._scalar(tag, lm_loss, iteration, consumed_samples)
        self._scalar(f"{tag} ppl", _perplexity(lm_loss), iteration, consumed_samples)

    def print(self, line: str) -> None:
        if self._screen is not None:
            self._screen.line(line)

    def event(self, iteration: int, line: str) -> None:
        self.print(line)
        self.record("event", iteration=iteration, text=line)

    def record(self, kind: str, **values: Any) -> None:
        for writer in self.writers:
            try:
                writer.record(kind, values)
            except OSError as error:  # not worth ending a run
                self.print(str(error))

    def close(self) -> None:
        if self._screen is not None:
            self._screen.close()
        for writer in self.writers:
            writer.close()
        self.writers = ()

    def _scalar(
        self,
        tag: str | None,
        value: float | None,
        iteration: int,
        consumed_samples: int | None = None,
    ) -> None:
        if tag is None or value is None:
            return
        for writer in self.writers:
            writer.scalar(tag, value, iteration, consumed_samples)


def format_peak_memory(mib: list[float]) -> str:
    most = max(mib)
    rank = mib.index(most)
    return f"peak memory per rank: max {most:.0f} MiB (rank {rank}), min {min(mib):.0f} MiB"


def parse_peak_memory(lines: Iterable[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := _PEAK_MEMORY.search(line))), None)
