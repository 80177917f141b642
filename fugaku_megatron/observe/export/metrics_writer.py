"""A run's output: log lines, TensorBoard, Weights & Biases, history, peak memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from ...text.named_files import StrPath
from ..log.iteration_metrics import METRICS, IterationMetrics
from ..log.screen import Screen, open_screen
from .history import open_history
from .telemetry import Telemetry
from .textfile import Textfile
from .wandb_run import WandbRun

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
    """Destinations for a run's metrics.

    wandb: gets TensorBoard's scalars
    telemetry, textfile: get the figures of log intervals
    """

    stream: TextIO | None = None
    live: str = "auto"
    log_file: StrPath | None = None
    history: StrPath | None = None
    tensorboard_dir: StrPath | None = None
    wandb: WandbRun | None = None
    telemetry: Telemetry | None = None
    textfile: StrPath | None = None

    def check_installed(self) -> None:
        if self.tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"--tensorboard-dir {self.tensorboard_dir}: a package is missing: pip install tensorboard, or this package "
                "with its extra [log]"
            )
        if self.wandb is not None:
            self.wandb.check_installed()


class MetricsWriter:
    """Writer of metrics, averaged over log intervals.

    start_iteration: the run resumes here; later records of the history are dropped
    """

    def __init__(
        self,
        train_iters: int,
        log_interval: int,
        outputs: LogOutputs = LogOutputs(),
        printing: bool = True,
        start_iteration: int = 0,
    ) -> None:
        if log_interval < 1:
            raise ValueError(f"--log-interval must be at least 1, got {log_interval}")
        outputs.check_installed()
        self.log_interval = log_interval
        self.printing = printing
        self._interval: list[IterationMetrics] = []
        self._screen: Screen | None = None
        self._history: TextIO | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        self._telemetry: Telemetry | None = None
        self._textfile: Textfile | None = None
        if not printing:
            return
        if outputs.tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter  # takes seconds

            self._tensorboard = SummaryWriter(log_dir=os.fspath(outputs.tensorboard_dir))
        self._telemetry = outputs.telemetry
        if outputs.textfile is not None:
            self._textfile = Textfile(os.fspath(outputs.textfile))
        if outputs.history:
            self._history = open_history(Path(outputs.history), start_iteration)
        self._screen = open_screen(
            outputs.stream or sys.stdout,
            outputs.live,
            train_iters,
            start_iteration=start_iteration,
            log_file=outputs.log_file,
        )
        if outputs.wandb is not None:
            self._wandb = outputs.wandb.start(self.print)

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
        if self._telemetry is not None:
            self._telemetry.record(metrics)
        if self._textfile is not None:
            try:
                self._textfile.write(metrics)
            except OSError as error:  # not worth ending a run; the next interval writes all figures
                self.print(f"{self._textfile.path}: not written: {error.strerror}")
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
        if self._history is None:
            return
        try:
            self._history.write(json.dumps({"kind": kind, **values}) + "\n")
            self._history.flush()
        except (
            OSError
        ) as error:  # not worth ending a run; the buffer is written with the next record
            self.print(f"{self._history.name}: not written yet: {error.strerror}")

    def close(self) -> None:
        for output in (self._screen, self._history, self._tensorboard):
            if output is not None:
                with contextlib.suppress(OSError):  # the history's: `record` has reported it
                    output.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._history = None
        self._tensorboard = None
        self._wandb = None

    def _scalar(
        self,
        tag: str | None,
        value: float | None,
        iteration: int,
        consumed_samples: int | None = None,
    ) -> None:
        if tag is None or value is None:
            return
        if self._wandb is not None:
            self._wandb.log({tag: value}, step=iteration)
        if self._tensorboard is None:
            return
        self._tensorboard.add_scalar(tag, value, iteration)
        if consumed_samples is not None:
            self._tensorboard.add_scalar(f"{tag} vs samples", value, consumed_samples)


def format_peak_memory(mib: list[float]) -> str:
    most = max(mib)
    rank = mib.index(most)
    return f"peak memory per rank: max {most:.0f} MiB (rank {rank}), min {min(mib):.0f} MiB"


def parse_peak_memory(lines: Iterable[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := _PEAK_MEMORY.search(line))), None)
