"""Processes that a benchmark starts and that write JSON, one record a line: on request, or one after another until they end.

    with Child(python("contestant", order), environment, "ours") as side: side.ask("step")       works on request
    for row in ranks(2, "comm", {"sizes": [65536]}): ...                                         MPI ranks, rank 0 writes

Such a process runs a module of this package with one JSON argument and calls `order()` before anything else. Left out: what the
processes do (contestant.py, driver.py, comm.py, schedule.py, two_hosts.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fugaku_megatron.config.fields import check

ROOT = Path(__file__).resolve().parents[1]
Answer = Callable[[Mapping[str, Any]], None]


def python(module: str, order: Mapping[str, Any]) -> list[str]:
    """Return the command of a module of this package."""
    return [sys.executable, "-m", f"{__package__}.{module}", json.dumps(order)]


def mpiexec() -> str:
    """Return the mpiexec next to python, else the one on the PATH. ValueError when there is none."""
    path = shutil.which(
        "mpiexec", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    )
    check(
        path is not None,
        "no mpiexec next to python nor on the PATH: pip install mpich, or load the site's MPI",
    )
    return path


class Child:
    """The parent's end of the pipes. Its standard error is the parent's; `name` stands in errors."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self.name = name
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def ask(self, line: str) -> dict[str, Any]:
        """Send a line and return the process's answer. RuntimeError when the process ends before."""
        with contextlib.suppress(BrokenPipeError):  # it ended; answer() says so
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next record; the first says that the process is ready. RuntimeError when the process ends before."""
        line = self.process.stdout.readline()
        if not line:
            raise self._ended()
        return json.loads(line)

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield all records until the process ends. RuntimeError when the process fails."""
        yield from map(json.loads, self.process.stdout)
        if self.process.wait():
            raise self._ended()

    def _ended(self) -> RuntimeError:
        return RuntimeError(
            f"the process of {self.name} ended with exit code {self.process.wait()}; its message is above"
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def ranks(count: int, module: str, order: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the records of rank 0 of a module of this package, one thread a rank. RuntimeError when the ranks fail."""
    command = [mpiexec(), "-n", str(count), *python(module, order)]
    with Child(
        command, {**os.environ, "OMP_NUM_THREADS": "1"}, f"{count} ranks of {module}"
    ) as job:
        yield from job.records()


def order() -> tuple[dict[str, Any], Answer]:
    """Return this process's JSON argument and the function that sends an answer; send what libraries print to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return json.loads(sys.argv[1]), lambda record: print(
        json.dumps(record), file=stream, flush=True
    )
