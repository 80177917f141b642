"""The output of a run while it trains: log lines on the screen and in a file, TensorBoard, a history file, peak memory.

On a terminal one live line takes the place of the iterations' log lines. `fugaku-megatron log LOG` makes tables of logs
(log_table.py). Left out: what the metrics are and their log line (iteration.py), drawing (plot.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import socket
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from .iteration import METRICS, IterationMetrics

WIDTH = 79  # characters of a live line: ranks below mpiexec cannot ask for the terminal's
RECENT = 20  # iterations over which rates and the time left are taken
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")  # also mpiexec.hydra, mpiexec.openmpi
_PROXIES = (
    "hydra_pmi_proxy",
    "orted",
    "prted",
)  # processes of the launcher on a node, between it and a rank


def on_terminal(stream: TextIO) -> bool:
    """Whether what is written to `stream`, this process's standard output, appears on a terminal.

    Below mpiexec that is where mpiexec's own standard output leads: MPICH starts its ranks with pipes, and Open MPI starts them
    with terminals even where its own output goes to a file. False where the launcher runs on another node. Other streams say it
    themselves.
    """
    try:
        if stream.fileno() != 1:
            return stream.isatty()
        return _launcher_terminal(stream.isatty())
    except (OSError, ValueError):  # no file descriptor, or a system without /proc
        return stream.isatty()


def _launcher_terminal(otherwise: bool) -> bool:
    """Whether the standard output of the launcher that started this process is a terminal; `otherwise` where there is none."""
    mode, process, own = os.fstat(1).st_mode, os.getppid(), os.readlink("/proc/self/fd/1")
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)):
        return False
    while process > 1:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        if name.startswith(_LAUNCHERS):
            return os.readlink(f"/proc/{process}/fd/1").startswith(
                ("/dev/pts/", "/dev/tty", "/dev/console")
            )
        if (
            name not in _PROXIES and os.readlink(f"/proc/{process}/fd/1") != own
        ):  # `sh -c "train | tee run.log"` as a rank
            return otherwise
        process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return otherwise


def duration_text(seconds: float) -> str:
    """8 s, 3 min 20 s, 5 h 12 min, 2 d 4 h."""
    whole = max(0, round(seconds))
    for unit, name, smaller, small_name in (
        (86400, "d", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {small_name}"
    return f"{whole} s"


def append(log_file: str | os.PathLike | None, *lines: str) -> None:
    """Add lines to the file of --log-file, None where that flag was left out. Raises OSError when it cannot be written."""
    if log_file is not None and lines:
        with open(
            log_file, "a", encoding="utf-8", errors="surrogateescape"
        ) as file:  # a path may hold any byte
            file.writelines(line + "\n" for line in lines)


class LiveLine:
    """The text of the live line: progress, loss, tokens per second and the time left, from the iterations so far."""

    def __init__(self, train_iters: int, start_iteration: int = 0) -> None:
        self._end, self._iteration = train_iters, start_iteration
        self._loss: float | None = None
        self._recent: deque[tuple[float, float]] = deque(
            maxlen=RECENT
        )  # (seconds, tokens) of iterations

    def add(self, metrics: IterationMetrics) -> None:
        tokens = 0.0
        if metrics.consumed_tokens and metrics.consumed_samples and metrics.global_batch_size:
            tokens = metrics.consumed_tokens / metrics.consumed_samples * metrics.global_batch_size
        if metrics.elapsed_seconds:
            self._recent.append((metrics.elapsed_seconds, tokens))
        self._iteration, self._loss = metrics.iteration, metrics.lm_loss

    def text(self) -> str:
        parts = [
            f"iteration {self._iteration}/{self._end} ({self._iteration / max(self._end, 1):.0%})"
        ]
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._recent:
            seconds, tokens = (sum(values) for values in zip(*self._recent))
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
            parts.append(
                f"{duration_text((self._end - self._iteration) * seconds / len(self._recent))} left"
            )
        return " | ".join(parts)[:WIDTH]


class Screen:
    """Standard output and the log file of the rank that prints.

    live: the live line that is redrawn below the other lines; None: log lines are printed as they are.
    """

    def __init__(
        self,
        stream: TextIO,
        live: LiveLine | None = None,
        log_file: str | os.PathLike | None = None,
    ) -> None:
        self._stream, self._live, self._log_file = stream, live, log_file
        self._shown = ""

    def line(self, text: str) -> None:
        """Print a line, above the live line, and add it to the log file."""
        self._write(self._wiped() + text + "\n")
        self._keep(text)
        self.refresh()

    def log_line(self, text: str) -> None:
        """Add the log line of an iteration to the log file; print it unless the live line stands for it."""
        if self._live is None:
            self._write(text + "\n")
        self._keep(text)

    def iteration(self, metrics: IterationMetrics) -> None:
        """Bring the live line up to date, if there is one."""
        if self._live is not None:
            self._live.add(metrics)
            self.refresh()

    def refresh(self) -> None:
        """Draw the live line again, if there is one."""
        if self._live is not None:
            text = self._live.text()
            self._write(f"\r{text:{len(self._shown)}}")
            self._shown = text

    def close(self) -> None:
        """Leave the live line as the last line."""
        if self._shown:
            self._write("\n")
        self._live, self._shown = None, ""

    def _wiped(self) -> str:
        """What overwrites the live line with blanks and goes back to its start."""
        shown, self._shown = self._shown, ""
        return f"\r{' ' * len(shown)}\r" if shown else ""

    def _keep(self, text: str) -> None:
        try:
            append(self._log_file, text)
        except OSError as error:  # not worth ending a run
            self._log_file, path = None, self._log_file
            self.line(f"--log-file {path}: no longer written: {error.strerror}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def open_screen(
    stream: TextIO,
    live: str,
    train_iters: int,
    start_iteration: int = 0,
    log_file: str | os.PathLike | None = None,
) -> Screen:
    """The screen for --log-live `live`, with a hint where log lines are neither printed nor kept."""
    line = (
        LiveLine(train_iters, start_iteration)
        if live == "on" or live == "auto" and on_terminal(stream)
        else None
    )
    screen = Screen(stream, line, log_file)
    if line is not None and log_file is None:
        screen.line(
            "note: log lines are not printed on a terminal: --log-file FILE keeps them, --log-live off prints them"
        )
    return screen


HISTORY = "history.jsonl"  # in the directory of --save
SERVER = "https://api.wandb.ai"  # unless WANDB_BASE_URL names another
REACHED_WITHIN = 3.0  # s
_PEAK_MEMORY = re.compile(r"peak memory per rank: max (\d+) MiB")
_VALIDATION = re.compile(
    r"validation loss at iteration (\d+) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|"
)


@dataclass(frozen=True)
class WandbRun:
    """What --wandb-project and its companion flags say. config: of the run, shown with it."""

    project: str
    name: str
    entity: str | None = None
    directory: str | None = None
    config: dict[str, Any] = field(default_factory=dict)

    def check_installed(self) -> None:
        """Raises ValueError, one line, where the package is missing."""
        if importlib.util.find_spec("wandb") is None:
            raise ValueError(
                f"--wandb-project {self.project}: a package is missing: pip install wandb, or this package with "
                "its extra [wandb]"
            )

    def start(self, say: Callable[[str], None]) -> Any:
        """The open run, or None where the package refuses: that is said, and no reason to end a training run."""
        import wandb  # imported only on request: it takes seconds

        mode = os.environ.get("WANDB_MODE") or ("online" if _reachable() else "offline")
        if mode == "offline":
            say(
                "note: --wandb-project: offline, because the server is not reachable or WANDB_MODE says so: send the files later "
                "with `wandb sync`"
            )
        try:
            if self.directory:
                os.makedirs(self.directory, exist_ok=True)
            return wandb.init(
                project=self.project,
                name=self.name,
                entity=self.entity,
                dir=self.directory,
                config=self.config,
                mode=mode,  # type: ignore[arg-type]  # wandb checks WANDB_MODE
            )
        except Exception as error:  # noqa: BLE001 - wandb's own errors have no common class
            reason = [*str(error).splitlines(), type(error).__name__][0]
            say(f"note: --wandb-project {self.project}: {reason}; the run continues without it")
            return None


def _reachable() -> bool:
    address = urlsplit(os.environ.get("WANDB_BASE_URL", SERVER))
    try:
        socket.create_connection(
            (address.hostname, address.port or (80 if address.scheme == "http" else 443)),
            REACHED_WITHIN,
        ).close()
    except OSError:
        return False
    return True


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
            _open_history(Path(history_path), start_iteration)
            if history_path and printing
            else None
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


def read_history(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The records of a history file, each of "kind" "train", "validation", "event" or "experts"; an incomplete last line is
    ignored."""
    lines = Path(path).read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line.decode()))
        except RecursionError as error:
            raise ValueError(
                f"{path} line {number}: brackets are nested too deeply: move the file away"
            ) from error
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path} line {number} is not JSON: {error}: move the file away"
                ) from error
    return records


def read_run_history(path: Path) -> list[dict[str, Any]]:
    """The records of the history that a run continues, none if the file does not exist. Raises ValueError for another file."""
    if path.exists() and not path.is_file():
        raise ValueError(
            f"--save: {path} is not a regular file, and the history is written there: move it away"
        )
    records = read_history(path) if path.exists() else []
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            raise ValueError(
                f"{path} line {number} has no iteration, so it is not the history of a run: move the file away"
            )
    return records


def _open_history(path: Path, start_iteration: int) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = [record for record in read_run_history(path) if record["iteration"] <= start_iteration]
    aside = path.with_name(path.name + ".tmp")
    aside.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    aside.replace(path)
    return open(path, "a", encoding="utf-8")


def format_peak_memory(mib: list[float]) -> str:
    """`mib`: every rank's peak_memory_mib(), in rank order."""
    largest = max(range(len(mib)), key=mib.__getitem__)  # rank
    return (
        f"peak memory per rank: max {mib[largest]:.0f} MiB (rank {largest}), min {min(mib):.0f} MiB"
    )


def parse_peak_memory(lines: Iterable[str]) -> int | None:
    """MiB of the largest rank from the line of `format_peak_memory` in a log; None if the run did not reach its end."""
    return next((int(match[1]) for line in lines if (match := _PEAK_MEMORY.search(line))), None)
