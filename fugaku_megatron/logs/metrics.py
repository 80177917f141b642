"""What a run says of itself: Megatron-DeepSpeed's log line, TensorBoard, a progress bar, a history file, peak memory.

The log line is a table of fields, read both ways: `format_line` prints it, `parse_line` turns logs (ours, those of
Megatron-DeepSpeed) into records again. `python -m fugaku_megatron.logs LOG` makes tables of them (log_table.py). Left out: the
formulas of FLOPs (the caller passes them) and drawing (plot.py).
Test: pytest tests/test_metrics.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

# attribute, name in the line, format: in Megatron-DeepSpeed's order, then fields of our own
_FIELDS = (
    ("consumed_samples", "consumed samples", "{:12d}"),
    ("consumed_tokens", "consumed tokens", "{:12d}"),
    ("elapsed_seconds", "elapsed time per iteration (s)", "{:.2f}"),
    ("learning_rate", "learning rate", "{:.3E}"),
    ("global_batch_size", "global batch size", "{:5d}"),
    ("lm_loss", "lm loss", "{:.6E}"),
    ("loss_scale", "loss scale", "{:.1f}"),
    ("grad_norm", "grad norm", "{:.3f}"),
    ("num_zeros", "num zeros", "{:.1f}"),
    ("params_norm", "params norm", "{:.3f}"),
    ("skipped", "number of skipped iterations", "{:3d}"),
    ("nans", "number of nan iterations", "{:3d}"),
    ("samples_per_second", "samples per second", "{:.3f}"),
    ("tflops", "TFLOPs", "{:.2f}"),
    ("minor_faults", "minor faults", "{:d}"),
    ("system_seconds", "system time (s)", "{:.3f}"),
    ("clock_ghz", "clock (GHz)", "{:.2f}"),
)
# Megatron's TensorBoard tag -> argument of MetricsWriter.add
_TAGS = {
    "learning-rate": "learning_rate",
    "batch-size": "global_batch_size",
    "lm loss": "lm_loss",
    "loss-scale": "loss_scale",
    "grad-norm": "grad_norm",
    "num-zeros": "num_zeros",
    "params-norm": "params_norm",
}
_HEAD = re.compile(r"\biteration\s+(\d+)/\s*(\d+) \|")
_PEAK_MEMORY = re.compile(r"peak memory per rank: max (\d+) MiB")
_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|")


@dataclass(frozen=True)
class IterationMetrics:
    """One log line; None: not in the line. Seconds are per iteration, `tflops` 10^12 operations per second and rank.

    Of the rank that prints: `minor_faults` and `system_seconds` per iteration, `clock_ghz` measured after the last one.
    """

    iteration: int
    train_iters: int
    consumed_samples: int | None = None
    consumed_tokens: int | None = None
    elapsed_seconds: float | None = None
    learning_rate: float | None = None
    global_batch_size: int | None = None
    lm_loss: float | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None
    num_zeros: float | None = None
    skipped: int | None = None
    nans: int | None = None
    samples_per_second: float | None = None
    tflops: float | None = None
    params_norm: float | None = None
    minor_faults: int | None = None
    system_seconds: float | None = None
    clock_ghz: float | None = None

    def format_line(self) -> str:
        """The line as Megatron-DeepSpeed prints it; fields that are None are left out."""
        parts = [f" iteration {self.iteration:8d}/{self.train_iters:8d} |"]
        for attribute, name, spec in _FIELDS:
            value = getattr(self, attribute)
            if value is not None:
                parts.append(f" {name}: {spec.format(value)} |")
        return "".join(parts)


def parse_line(line: str) -> IterationMetrics:
    """The inverse of `format_line`. Passes over a prefix (rank, time) and unknown fields; reads milliseconds too.

    Raises ValueError if it is no log line or a number cannot be read.
    """
    head = _HEAD.search(line)
    if head is None:
        raise ValueError(f"not a log line of an iteration: {line.strip()[:80]!r}")
    pairs = (part.rpartition(":") for part in line[head.end():].split("|"))
    texts = {name.strip(): value.strip() for name, _, value in pairs}
    if "elapsed time per iteration (ms)" in texts:
        texts["elapsed time per iteration (s)"] = str(float(texts["elapsed time per iteration (ms)"]) / 1000)
    values: dict[str, Any] = {}
    for attribute, name, spec in _FIELDS:
        if name in texts:
            values[attribute] = _number(texts[name], int if spec.endswith("d}") else float, name)
    return IterationMetrics(iteration=int(head[1]), train_iters=int(head[2]), **values)


def parse_log(lines: Iterable[str]) -> list[IterationMetrics]:
    """The iterations of a whole log, other lines passed over."""
    return [parse_line(line) for line in lines if _HEAD.search(line)]


def format_validation(iteration: int, lm_loss: float) -> list[str]:
    """Megatron's three lines after an evaluation. As there, the perplexity is cut at exp(20)."""
    perplexity = math.exp(min(20.0, lm_loss))
    values = f"lm loss value: {lm_loss:.6E} | lm loss PPL: {perplexity:.6E}"
    text = f" validation loss at iteration {iteration} | {values} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


def parse_validation_line(line: str) -> tuple[int, float, float]:
    """(iteration, lm loss, perplexity) of the middle line. Raises ValueError if it is another line."""
    match = _VALIDATION.search(line)
    if match is None:
        raise ValueError(f"not a validation line: {line.strip()[:80]!r}")
    return int(match[1]), float(match[2]), float(match[3])


def _number(text: str, kind: type, name: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{name}: {text!r} is not a number") from None


class MetricsWriter:
    """Averages the iterations of a log interval and writes them: log line, TensorBoard, history, progress bar.

    All ranks may hold one; only the one with `printing` writes anything. `history_path` is a JSON-lines file: a run
    that starts at `start_iteration` drops the records after it, which a former run wrote past its last checkpoint.
    `progress` None means: if the stream is a terminal and tqdm is installed. Raises ValueError, on every rank, if
    TensorBoard is asked for and not installed.
    """

    def __init__(self, train_iters: int, log_interval: int, *, printing: bool = True, start_iteration: int = 0,
                 stream: TextIO | None = None, tensorboard_dir: str | os.PathLike | None = None,
                 history_path: str | os.PathLike | None = None, progress: bool | None = None) -> None:
        if log_interval < 1:
            raise ValueError(f"--log-interval must be at least 1, got {log_interval}")
        if tensorboard_dir is not None and importlib.util.find_spec("tensorboard") is None:
            raise ValueError(f"--tensorboard-dir {tensorboard_dir}: a package is missing: pip install tensorboard")
        self.train_iters, self.log_interval, self.printing = train_iters, log_interval, printing
        self.stream = sys.stdout if stream is None else stream
        self._interval: list[dict[str, Any]] = []
        self._tensorboard = _summary_writer(tensorboard_dir) if tensorboard_dir is not None and printing else None
        self._history = _open_history(Path(history_path), start_iteration) if history_path and printing else None
        self._bar = _progress_bar(self.stream, train_iters, start_iteration, progress) if printing else None

    def add(self, iteration: int, *, consumed_samples: int, consumed_tokens: int, elapsed_seconds: float,
            learning_rate: float, global_batch_size: int, lm_loss: float, loss_scale: float, flops_per_rank: float,
            skipped: bool = False, grad_norm: float | None = None, num_zeros: float | None = None,
            params_norm: float | None = None, minor_faults: int | None = None, system_seconds: float | None = None,
            clock_ghz: float | None = None) -> IterationMetrics | None:
        """Take one iteration; at the end of a log interval write its line and return it, else None.

        `elapsed_seconds`, `flops_per_rank` (operations of the iteration / ranks), `minor_faults` and `system_seconds` are those
        of this iteration alone.
        """
        values = {name: value for name, value in locals().items() if name != "self"}
        self._interval.append(values)
        self._write_scalars(values)
        if self._bar is not None:
            self._bar.update()
        return None if iteration % self.log_interval else self.flush()

    def flush(self) -> IterationMetrics | None:
        """Write the line of the interval so far, if it has iterations: a run's end may cut its last interval short."""
        if not self._interval:
            return None
        metrics = _average(self._interval, self.train_iters)
        self._interval = []
        self.print(metrics.format_line())
        self._record("train", asdict(metrics))
        self._scalar("iteration-time", metrics.elapsed_seconds, metrics.iteration)
        self._scalar("throughput", metrics.tflops, metrics.iteration)
        return metrics

    def validation(self, iteration: int, lm_loss: float, consumed_samples: int) -> None:
        """Write the result of an evaluation."""
        for line in format_validation(iteration, lm_loss):
            self.print(line)
        self._record("validation", {"iteration": iteration, "consumed_samples": consumed_samples, "lm_loss": lm_loss})
        self._scalar("lm loss validation", lm_loss, iteration, consumed_samples)
        self._scalar("lm loss validation ppl", math.exp(min(20.0, lm_loss)), iteration, consumed_samples)

    def print(self, line: str) -> None:
        """Print a line above the progress bar, on the printing rank only."""
        if not self.printing:
            return
        if self._bar is not None:
            self._bar.clear()
        self.stream.write(line + "\n")
        self.stream.flush()
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Flush and close whatever is open."""
        for output in (self._bar, self._history, self._tensorboard):
            if output is not None:
                with contextlib.suppress(OSError):  # of the history, which has told it
                    output.close()
        self._bar = self._history = self._tensorboard = None

    def _write_scalars(self, values: dict[str, Any]) -> None:
        """Megatron's TensorBoard tags, every iteration."""
        for tag, name in _TAGS.items():
            if values[name] is not None:
                self._scalar(tag, values[name], values["iteration"], values["consumed_samples"])

    def _scalar(self, tag: str, value: float, iteration: int, consumed_samples: int | None = None) -> None:
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
        except OSError as error:  # no reason to lose a run; what is not written yet stays in the buffer for the next time
            self.print(f"{self._history.name}: not written yet: {error.strerror}")


def _average(interval: list[dict[str, Any]], train_iters: int) -> IterationMetrics:
    """An interval's log line: mean time and throughput, mean loss of iterations not skipped, the rest of the last."""
    last, seconds = interval[-1], sum(step["elapsed_seconds"] for step in interval)
    losses = [step["lm_loss"] for step in interval if not step["skipped"]]
    same = ("iteration", "consumed_samples", "consumed_tokens", "learning_rate", "global_batch_size", "loss_scale",
            "grad_norm", "num_zeros", "params_norm", "clock_ghz")
    faults, system = (_mean([step[name] for step in interval]) for name in ("minor_faults", "system_seconds"))
    return IterationMetrics(
        train_iters=train_iters,
        elapsed_seconds=seconds / len(interval),
        lm_loss=sum(losses) / len(losses) if losses else None,
        skipped=sum(step["skipped"] for step in interval),
        nans=sum(not math.isfinite(step["lm_loss"]) for step in interval),
        samples_per_second=sum(step["global_batch_size"] for step in interval) / seconds,
        tflops=sum(step["flops_per_rank"] for step in interval) / seconds / 1e12,
        minor_faults=None if faults is None else round(faults),
        system_seconds=system,
        **{name: last[name] for name in same},
    )


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else sum(values) / len(values)


def _summary_writer(directory: str | os.PathLike) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # imported when asked for only: it takes seconds

    return SummaryWriter(log_dir=os.fspath(directory))


def _progress_bar(stream: TextIO, total: int, initial: int, wanted: bool | None) -> Any:
    if wanted is False or (wanted is None and not stream.isatty()) or importlib.util.find_spec("tqdm") is None:
        return None
    from tqdm import tqdm

    return tqdm(total=total, initial=initial, file=stream, unit="it", leave=False, dynamic_ncols=True)


def read_history(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a history file, each of "kind" "train" or "validation"; a last line cut short is passed over."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number < len(lines):
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
    return records


def _open_history(path: Path, start_iteration: int) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    former = read_history(path) if path.exists() else []
    kept = [record for record in former if record["iteration"] <= start_iteration]
    aside = path.with_name(path.name + ".tmp")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)
    return open(path, "a", encoding="utf-8")


def peak_memory_mib() -> float:
    """The largest resident memory of this process so far, MiB."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) / 1024
    except (OSError, TypeError):  # no Linux. There, ru_maxrss would count what the parent held before exec
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def format_peak_memory(mib: list[float]) -> str:
    """`mib`: every rank's peak_memory_mib(), in rank order."""
    most = max(range(len(mib)), key=mib.__getitem__)
    return f"peak memory per rank: max {mib[most]:.0f} MiB (rank {most}), min {min(mib):.0f} MiB"


def parse_peak_memory(lines: Iterable[str]) -> int | None:
    """MiB of the largest rank from a log that `format_peak_memory` wrote into; None: the run did not reach its end."""
    return next((int(found[1]) for line in lines if (found := _PEAK_MEMORY.search(line))), None)
