"""A process that works on request: it says that it is ready, then answers every line on its standard input with one of JSON.

Left out: what it does (contestant.py, rivals.py). Test: pytest tests/test_benchmarks.py
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import psutil

ROOT = Path(__file__).resolve().parents[1]


class Child:
    """The parent's end of the pipes to `python -m benchmarks.MODULE ARGUMENTS`; between two answers the process sleeps in a read.

    ready: its first answer. RuntimeError, which names the process as `name`, when it ends before it answers; its message is on
    standard error.
    """

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], name: str) -> None:
        self.name = name
        self.process = subprocess.Popen([sys.executable, "-m", f"{__package__}.{module}", *arguments], cwd=ROOT, env=environment,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.usage = psutil.Process(self.process.pid)
        self.ready = self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to a line."""
        with contextlib.suppress(BrokenPipeError):  # it ended; _answer says so
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self._answer()

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

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self.name} ended with exit code {self.process.wait()}; its message is above")
        return json.loads(line)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def answers() -> TextIO:
    """Called in the process itself: where answers go. What libraries print must not be taken for one and goes to standard error."""
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stream


def answer(stream: TextIO, record: Mapping[str, Any]) -> None:
    """One answer."""
    print(json.dumps(record), file=stream, flush=True)
