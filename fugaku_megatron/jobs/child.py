"""A launcher as a child process: its output passes through and its end is kept, and requests to stop reach its ranks.

Left out: what the output means (endings.py). Test: pytest tests/test_supervise.py
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO

from ..comm import interrupt

KEPT_BYTES = 1 << 16  # of the output's end: the launcher's words come last
DRAIN_SECONDS = 5.0  # for what a launcher left in its pipes; a process that outlives it may keep them open
ORDERLY = signal.SIGUSR1  # every launcher passes it on to its ranks; Open MPI's ends them at once after SIGTERM


class Child:
    """A running command. Raises ValueError when there is no such program."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise ValueError(f"{command[0]}: {error.strerror}: give the launcher of the MPI, such as mpiexec or srun") from error
        self._said = bytearray()
        self._lock = threading.Lock()
        pipes = ((self.process.stdout, 1), (self.process.stderr, 2))
        self._readers = [threading.Thread(target=self._copy, args=pipe, daemon=True) for pipe in pipes]
        for reader in self._readers:
            reader.start()

    def _copy(self, source: IO[bytes], target: int) -> None:
        while chunk := os.read(source.fileno(), 1 << 16):
            with self._lock:
                self._said += chunk
                del self._said[:-KEPT_BYTES]
            with contextlib.suppress(OSError):  # nobody reads any more, or a full disk: the run goes on
                while chunk:
                    chunk = chunk[os.write(target, chunk):]

    def wait(self) -> tuple[int, str]:
        """(exit code, negative for a signal; the end of what was printed)."""
        code = self.process.wait()
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)
        with self._lock:
            return code, self._said.decode(errors="replace")

    def send(self, number: int) -> None:
        """A signal, unless the process has ended."""
        self.process.send_signal(number)


class Stop:
    """Inside the block SIGTERM, SIGUSR1 and SIGINT ask the run to save and leave: no start follows.

    The first goes to the child of the time as ORDERLY, a second as it is. A Control-C reaches the child by itself.
    """

    SIGNALS = (*interrupt.STOPS, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = self._passed_on = False
        self._child: Child | None = None

    def __enter__(self) -> Stop:
        self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        self.requested = self.requested or interrupt.kept_stop(self._previous.values()) is not None
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def forwarding(self, child: Child) -> Iterator[None]:
        """Signals go to this child inside the block; so does one that came just before it was there."""
        signal.pthread_sigmask(signal.SIG_BLOCK, self.SIGNALS)
        self._child = child
        if self.requested:
            self._pass_on(ORDERLY)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)
        try:
            yield
        finally:
            self._child = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not (number == signal.SIGINT and _typed_here()):
            self._pass_on(number if self._passed_on else ORDERLY)

    def _pass_on(self, number: int) -> None:
        if self._child:
            self._passed_on = True
            self._child.send(number)


def _typed_here() -> bool:
    """Whether this process belongs to the foreground of a terminal, where Control-C goes to the whole group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal
        return False
