"""Log lines on the terminal, with a live line below them."""

from __future__ import annotations

import os
import stat
from collections import deque
from pathlib import Path
from typing import TextIO

from .iteration_metrics import IterationMetrics

WIDTH = 79  # characters of a live line: ranks below mpiexec cannot ask for the terminal's


RECENT = 20  # iterations over which rates and the time left are taken


_LAUNCHERS = ("mpiexec", "mpirun", "orterun", "prterun")  # also mpiexec.hydra, mpiexec.openmpi


_PROXIES = (
    "hydra_pmi_proxy",
    "orted",
    "prted",
)  # processes of the launcher on a node, between it and a rank


def on_terminal(stream: TextIO) -> bool:
    """Return True if output to `stream`, this process's standard output, appears on a terminal.

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
    """Return True if the standard output of this process's launcher is a terminal; `otherwise` without a launcher."""
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
        """Return the text that blanks the live line and returns to its start."""
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
