"""Processes that a benchmark starts and that write JSON, one record a line: on request, or one after another until they end.

    with Child(python("contestant", order), environment, "ours") as side: side.ask("step")       works on request
    for row in ranks(2, "comm_rank", {"sizes": [65536]}): ...                                    MPI ranks, rank 0 writes

A process of this package takes its order as one JSON argument and calls `answers()` before anything else. Left out: what the
processes do (contestant.py, rivals.py, comm_rank.py, schedule_rank.py, two_hosts_rank.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

from fugaku_megatron.config.checks import check

ROOT = Path(__file__).resolve().parents[1]


def python(module: str, *words: object) -> list[str]:
    """The command of a module of this package; a word that is not text is written as JSON."""
    return [sys.executable, "-m", f"{__package__}.{module}", *(w if isinstance(w, str) else json.dumps(w) for w in words)]


def mpiexec() -> str:
    """The mpiexec next to python, else that on the PATH. ValueError when there is none."""
    beside = Path(sys.executable).parent / "mpiexec"
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    check(path is not None, "no mpiexec next to python nor on the PATH: pip install mpich, or load the site's MPI")
    return path


class Child:
    """The parent's end of the pipes. Its standard error is the parent's; `name` stands in errors."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        self.usage = psutil.Process(self.process.pid)

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to a line. RuntimeError when it ends before it answers."""
        with contextlib.suppress(BrokenPipeError):  # it ended; answer() says so
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next record; the first says that the process is ready. RuntimeError when it ends before."""
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def records(self) -> Iterator[dict[str, Any]]:
        """All records until the process ends. RuntimeError when it fails."""
        yield from map(json.loads, self.process.stdout)
        if self.process.wait():
            raise self._ended()

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"the process of {self.name} ended with exit code {self.process.wait()}; its message is above")

    def cpu_seconds(self) -> float:
        """CPU time of the process so far."""
        times = self.usage.cpu_times()
        return times.user + times.system

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ranks(count: int, module: str, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The records of rank 0 of a module of this package, one thread a rank. RuntimeError when the ranks fail."""
    command = [mpiexec(), "-n", str(count), *python(module, order)]
    with Child(command, {**os.environ, "OMP_NUM_THREADS": "1"}, f"{count} ranks of {module}") as job:
        yield from job.records()


def answers() -> TextIO:
    """Called in the process itself: where answers go. What libraries print must not be taken for one and goes to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def answer(stream: TextIO, record: Mapping[str, Any]) -> None:
    """One answer."""
    print(json.dumps(record), file=stream, flush=True)
