"""Output of a run while it trains: log lines, TensorBoard, a history file, peak memory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from .history import open_history
from .iteration_metrics import METRICS, IterationMetrics
from .screen import open_screen
from .wandb_run import WandbRun

_PEAK_MEMORY = re.compile(r"peak memory per rank: max (\d+) MiB")


_VALIDATION = re.compile(
    r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|"
)


def format_validation(iteration: int, lm_loss: float, suffix: str = "") -> list[str]:
    """Megatron's three lines after an evaluation. As there, the perplexity is cut at exp(20). suffix: see `validation`."""
    perplexity = math.exp(min(lm_loss, 20.0))
    values = f"lm loss value: {lm_loss:.6E} | lm loss PPL: {perplexity:.6E}"
    text = f" validation{suffix} loss at iteration {iteration} | {values} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def parse_validation_line(line: str) -> tuple[int, float, float]:
    """(iteration, lm loss, perplexity) of the middle line. Raises ValueError if it is another line."""
    match = _VALIDATION.search(line)
    if match is None:
        raise ValueError(f"not a validation line: {line.strip()[:80]!r}")
    return int(match[1]), float(match[2]), float(match[3])


class MetricsWriter:
    """Averages the iterations of a log interval and writes them: log line, TensorBoard, history.

    All ranks may hold one; only the one with `printing` writes anything. `history_path` is a JSON-lines file: a run
    that starts at `start_iteration` drops the records after it, which an earlier run wrote past its last checkpoint.
    `live` and `log_file`: --log-live and --log-file. wandb: a run of Weights & Biases that gets TensorBoard's figures. Raises
    ValueError, on every rank, if `tensorboard_dir` or `wandb` is set and its package is not installed.
    """

    def __init__(
        self,
        train_iters: int,
        log_interval: int,
        *,
        printing: bool = True,
        start_iteration: int = 0,
        stream: TextIO | None = None,
        tensorboard_dir: str | os.PathLike | None = None,
        history_path: str | os.PathLike | None = None,
        live: str = "auto",
        log_file: str | os.PathLike | None = None,
        wandb: WandbRun | None = None,
    ) -> None:
        if log_interval < 1:
            raise ValueError(f"--log-interval must be at least 1, got {log_interval}")
        if tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(
                f"--tensorboard-dir {tensorboard_dir}: a package is missing: pip install tensorboard, or this package "
                "with its extra [log]"
            )
        self.log_interval, self.printing = log_interval, printing
        self._interval: list[IterationMetrics] = []
        self._tensorboard: Any = None
        if tensorboard_dir is not None and printing:
            from torch.utils.tensorboard import (
                SummaryWriter,
            )  # imported only on request: it takes seconds

            self._tensorboard = SummaryWriter(log_dir=os.fspath(tensorboard_dir))
        self._history = (
            open_history(Path(history_path), start_iteration) if history_path and printing else None
        )
        if wandb is not None:
            wandb.check_installed()
        stream = sys.stdout if stream is None else stream
        self._screen = (
            open_screen(stream, live, train_iters, start_iteration, log_file) if printing else None
        )
        self._wandb = wandb.start(self.print) if wandb is not None and printing else None

    def add(self, metrics: IterationMetrics) -> IterationMetrics | None:
        """Take one iteration; at the end of a log interval write the interval's line and return its metrics, else None."""
        self._interval.append(metrics)
        for name, metadata in METRICS:
            self._scalar(
                metadata["tag"], getattr(metrics, name), metrics.iteration, metrics.consumed_samples
            )
        if self._screen is not None:
            self._screen.iteration(metrics)
        return None if metrics.iteration % self.log_interval else self.flush()

    def flush(self) -> IterationMetrics | None:
        """Write the line of the interval so far, if it has iterations; the end of a run may cut its last interval short."""
        if not self._interval:
            return None
        metrics = IterationMetrics.from_interval(self._interval)
        self._interval = []
        if self._screen is not None:
            self._screen.log_line(metrics.format_line())
        self._record("train", asdict(metrics))
        for name, metadata in METRICS:
            self._scalar(metadata["interval_tag"], getattr(metrics, name), metrics.iteration)
        return metrics

    def validation(
        self, iteration: int, lm_loss: float, consumed_samples: int, suffix: str = ""
    ) -> None:
        """Write the result of an evaluation. suffix: "-0", "-1" and so on where there are several validation sets."""
        for line in format_validation(iteration, lm_loss, suffix):
            self.print(line)
        self._record(
            f"validation{suffix}",
            {"iteration": iteration, "consumed_samples": consumed_samples, "lm_loss": lm_loss},
        )
        self._scalar(f"lm loss validation{suffix}", lm_loss, iteration, consumed_samples)
        self._scalar(
            f"lm loss validation{suffix} ppl",
            math.exp(min(lm_loss, 20.0)),
            iteration,
            consumed_samples,
        )

    def print(self, line: str) -> None:
        """Print a line, on the printing rank only."""
        if self._screen is not None:
            self._screen.line(line)

    def event(self, iteration: int, line: str) -> None:
        """Print a line about an iteration, and keep it in the history."""
        self.print(line)
        self._record("event", {"iteration": iteration, "text": line})

    def keep(self, kind: str, iteration: int, **values: Any) -> None:
        """Keep values that JSON knows in the history alone."""
        self._record(kind, {"iteration": iteration, **values})

    def close(self) -> None:
        """Flush and close whatever is open."""
        for output in (self._screen, self._history, self._tensorboard):
            if output is not None:
                with contextlib.suppress(OSError):  # the history's: `_record` has reported it
                    output.close()
        if self._wandb is not None:
            self._wandb.finish()
        self._history = self._tensorboard = self._wandb = None

    def _scalar(
        self,
        tag: str | None,
        value: float | None,
        iteration: int,
        consumed_samples: int | None = None,
    ) -> None:
        """Write a scalar, if it has a tag and a value; to TensorBoard with `consumed_samples` over these too, as Megatron does."""
        if tag is None or value is None:
            return
        if self._wandb is not None:
            self._wandb.log({tag: value}, step=iteration)
        if self._tensorboard is None:
            return
        self._tensorboard.add_scalar(tag, value, iteration)
        if consumed_samples is not None:
            self._tensorboard.add_scalar(f"{tag} vs samples", value, consumed_samples)

    def _record(self, kind: str, values: dict[str, Any]) -> None:
        if self._history is None:
            return
        try:
            self._history.write(json.dumps({"kind": kind, **values}) + "\n")
            self._history.flush()
        except OSError as error:  # not worth ending a run; what is not written stays in the buffer until the next call
            self.print(f"{self._history.name}: not written yet: {error.strerror}")


def format_peak_memory(mib: list[float]) -> str:
    """`mib`: every rank's peak_memory_mib(), in rank order."""
    largest = max(range(len(mib)), key=mib.__getitem__)  # rank
    return (
        f"peak memory per rank: max {mib[largest]:.0f} MiB (rank {largest}), min {min(mib):.0f} MiB"
    )


def parse_peak_memory(lines: Iterable[str]) -> int | None:
    """MiB of the largest rank from the line of `format_peak_memory` in a log; None if the run did not reach its end."""
    return next((int(match[1]) for line in lines if (match := _PEAK_MEMORY.search(line))), None)
