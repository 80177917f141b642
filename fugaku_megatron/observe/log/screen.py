"""Log lines on the terminal, with a live line below them."""

from __future__ import annotations

import os
import stat
from collections import deque
from pathlib import Path
from typing import TextIO

from ...text.named_files import StrPath
from ...text.numbers import duration_text
from ...text.written_files import named_file
from ..hang.heartbeat import stat_words
from .iteration_metrics import IterationMetrics

WIDTH = 79  # characters of a live line: ranks below mpiexec cannot query the terminal
RECENT = 20  # iterations from which rates and the remaining time are computed
_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")  # also mpiexec.hydra, mpiexec.openmpi
# Processes between the launcher and a rank on a node.
_PROXIES = ("hydra_pmi_proxy", "orted", "prted")


def on_terminal(stream: TextIO) -> bool:
    """Return True if output to `stream` appears on a terminal.

    Standard output below mpiexec appears on mpiexec's: MPICH starts ranks with pipes, Open MPI with terminals even if its
    output is a file. False if the launcher runs on another node.
    """
    try:
        if stream.fileno() != 1:
            return stream.isatty()
        return _launcher_terminal(stream.isatty())
    except (OSError, ValueError):  # no file descriptor, or a system without /proc
        return stream.isatty()


def _launcher_terminal(otherwise: bool) -> bool:
    mode = os.fstat(1).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISCHR(mode) or stat.S_ISSOCK(mode)):
        return False
    own = os.readlink("/proc/self/fd/1")
    process = os.getppid()
    while process > 1:
        name = Path(f"/proc/{process}/comm").read_text().strip()
        if name not in _PROXIES:
            output = os.readlink(f"/proc/{process}/fd/1")
            if name.startswith(_LAUNCHERS):
                return output.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
            if output != own:  # `sh -c "train | tee run.log"` as a rank
                return otherwise
        process = int(stat_words(process)[1])
    return otherwise


def append(log_file: StrPath | None, *lines: str) -> None:
    if log_file is not None and lines:
        # surrogateescape: a path in a line may have any byte.
        with open(
            log_file, "a", encoding="utf-8", errors="surrogateescape", opener=named_file
        ) as file:
            file.writelines(line + "\n" for line in lines)


class LiveLine:
    """Line with progress, loss, tokens per second and remaining time."""

    def __init__(self, train_iters: int, start_iteration: int = 0) -> None:
        self._end = train_iters
        self._iteration = start_iteration
        self._loss: float | None = None
        # Seconds and tokens of iterations.
        self._recent: deque[tuple[float, float]] = deque(maxlen=RECENT)

    def add(self, metrics: IterationMetrics) -> None:
        tokens = 0.0
        if metrics.consumed_tokens and metrics.consumed_samples and metrics.global_batch_size:
            tokens = metrics.consumed_tokens / metrics.consumed_samples * metrics.global_batch_size
        if metrics.elapsed_seconds:
            self._recent.append((metrics.elapsed_seconds, tokens))
        self._iteration = metrics.iteration
        self._loss = metrics.lm_loss

    def text(self) -> str:
        progress = self._iteration / max(self._end, 1)
        parts = [f"iteration {self._iteration}/{self._end} ({progress:.0%})"]
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4f}")
        if self._recent:
            seconds, tokens = (sum(values) for values in zip(*self._recent))
            left = (self._end - self._iteration) * seconds / len(self._recent)
            parts.append(f"{tokens / seconds:,.0f} tokens/s")
            parts.append(f"{duration_text(left)} left")
        return " | ".join(parts)[:WIDTH]


class Screen:
    """The printing rank's standard output and log file.

    live: redrawn below other lines; None: prints log lines
    """

    def __init__(
        self,
        stream: TextIO,
        live: LiveLine | None,
        log_file: StrPath | None,
    ) -> None:
        self._stream = stream
        self._live = live
        self._log_file = log_file
        self._shown = ""

    def line(self, text: str) -> None:
        blank = f"\r{' ' * len(self._shown)}\r" if self._shown else ""
        self._shown = ""
        self._write(blank + text + "\n")
        self._keep(text)
        self.refresh()

    def log_line(self, text: str) -> None:
        if self._live is None:
            self._write(text + "\n")
        self._keep(text)

    def iteration(self, metrics: IterationMetrics) -> None:
        if self._live is not None:
            self._live.add(metrics)
            self.refresh()

    def refresh(self) -> None:
        if self._live is not None:
            text = self._live.text()
            self._write(f"\r{text:{len(self._shown)}}")
            self._shown = text

    def close(self) -> None:
        if self._shown:
            self._write("\n")
        self._live = None
        self._shown = ""

    def _keep(self, text: str) -> None:
        try:
            append(self._log_file, text)
        except OSError as error:  # not worth ending a run
            path = self._log_file
            self._log_file = None
            self.line(f"--log-file {path}: no longer written: {error.strerror}")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
