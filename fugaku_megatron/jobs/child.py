"""A launcher such as mpiexec or srun as a child process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from ..start.exit_codes import SAVE_MEMORY, ExitCode
from ..start.signals import StopSignals

KEPT_BYTES = 1 << 16  # kept end of the output, with the launcher's messages
DRAIN_SECONDS = 5.0  # limit for reading pipes that a process may hold open after the launcher ended
# Every launcher forwards SIGUSR1 to its ranks; after SIGTERM Open MPI's launcher kills them at once.
ORDERLY = signal.SIGUSR1
# Another start may succeed.
RESTARTED = (ExitCode.FAILED, ExitCode.HANG, ExitCode.LOST_RANK, ExitCode.STORAGE)
WHAT = {
    ExitCode.FINISHED: "finished, or stopped on request",
    ExitCode.FAILED: "a rank failed",
    ExitCode.USER_ERROR: "refused",
    ExitCode.DIVERGED: "diverged",
    ExitCode.HANG: "a rank hung",
    ExitCode.LOST_RANK: "a rank is lost",
    ExitCode.REPLICAS_DIFFER: "a machine is faulty: the newest checkpoint may be wrong too",
    ExitCode.STORAGE: "a file system failed",
    ExitCode.LAYOUT_DIFFERS: "the layout does not train as one rank",
    ExitCode.INTERRUPTED: "interrupted",
    ExitCode.OUTPUT: "standard output could not be written",
}


_SIGNALS = (r"EXIT STRING: .*\(signal (\d+)\)", r"exited on\s+signal (\d+)")  # MPICH, Open MPI
# MPICH: one rank's code, and all ranks' bits.
_JOINED = r"EXIT CODE: (\d+)\n(?:=.*\n)*.*EXIT STRING: .*\(signal (\d+)\)"
_CODES = (
    r"srun: error: \S+: tasks? \S+ Exited with exit code (\d+)",
    r"application called MPI_Abort\([^,()]*, (\d+)\)",
    r"MPI_ABORT was invoked[^\0]*?Errorcode: (\d+)",
)


_KILLED = r"srun: error: \S+: tasks? \S+ (?!Exited)\S"


_NODES = (
    r"PID \d+ RUNNING AT (\S+)",  # MPICH
    r"on node (\S+) exited on",  # Open MPI
    r"Remote daemon: .* on node (\S+)",  # Open MPI: a node does not answer
    r"srun: error: Node failure on (\S+)",
    r"srun: error: (\S+): tasks? \S+ (?!Terminated)",
    r"rank \d+ \(node ([^\s()]+)\) (?:stopped|is gone)",  # the trainer's watchdog
)


class Launcher:
    """A running launcher. ValueError if the program does not exist."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            raise ValueError(
                f"{command[0]}: {error.strerror}: pass the launcher of the MPI, such as mpiexec or srun"
            ) from error
        self._said = bytearray()
        self._lock = threading.Lock()
        pipes = ((self.process.stdout, 1), (self.process.stderr, 2))
        self._readers = [
            threading.Thread(target=self._copy, args=pipe, daemon=True) for pipe in pipes
        ]
        for reader in self._readers:
            reader.start()

    def _copy(self, source: IO[bytes], target: int) -> None:
        while chunk := os.read(source.fileno(), 1 << 16):
            with self._lock:
                self._said += chunk
                del self._said[:-KEPT_BYTES]
            # The run continues if the reader has ended or the disk is full.
            with contextlib.suppress(OSError):
                while chunk:
                    chunk = chunk[os.write(target, chunk) :]

    def wait(self) -> tuple[int, str]:
        """Return (exit code, negative for a signal; end of the output)."""
        code = self.process.wait()
        for reader in self._readers:
            reader.join(DRAIN_SECONDS)
        with self._lock:
            return code, self._said.decode(errors="replace")

    def send(self, number: int) -> None:
        self.process.send_signal(number)


class Stop(StopSignals):
    """A block in which SIGTERM, SIGUSR1 and SIGINT ask the run to save and exit without a restart.

    The launcher gets the first signal as ORDERLY, later ones unchanged, and Control-C from the
    terminal.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed_on = False
        self._launcher: Launcher | None = None

    @contextlib.contextmanager
    def forwarding(self, launcher: Launcher) -> Iterator[None]:
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        self._launcher = launcher
        if self.stop_requested:
            self._pass_on(ORDERLY)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)
        try:
            yield
        finally:
            self._launcher = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if not (number == signal.SIGINT and _typed_here()):
            self._pass_on(number if self._passed_on else ORDERLY)

    def _pass_on(self, number: int) -> None:
        if self._launcher:
            self._passed_on = True
            self._launcher.send(number)


def _typed_here() -> bool:
    """Return True in a terminal's foreground, where Control-C reaches the process group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # no terminal
        return False


@dataclass(frozen=True)
class Ending:
    """A run's end.

    code: exit code of the job
    signal: signal that ended a rank, or 0
    several: other signals ended other ranks
    other: exit code outside ExitCode, such as MPICH's for an unnamed signal
    out_of_memory: the kernel killed a process of this control group
    """

    code: ExitCode
    signal: int = 0
    node: str = ""
    other: int = 0
    several: bool = False
    out_of_memory: bool = False

    @property
    def restarts(self) -> bool:
        return self.code in RESTARTED

    def text(self) -> str:
        """Return cause, signal and node in words, with a remedy if memory ran out."""
        text = WHAT[self.code]
        if self.code == ExitCode.FAILED:
            text += f" (exit code {self.other})"
        elif self.signal:
            others = ", and others in other ranks" if self.several else ""
            text += f" (signal {self.signal}, {_signal_name(self.signal)}{others})"
        if self.node:
            text += f" on node {self.node}"
        if self.out_of_memory:
            text += (
                ": out of memory: the kernel killed a process of this control group (memory.events): "
                f"{SAVE_MEMORY}"
            )
        return text


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _first(patterns: tuple[str, ...], said: str) -> str | None:
    found = [match for pattern in patterns if (match := re.search(pattern, said, re.MULTILINE))]
    return min(found, key=lambda match: match.start())[1] if found else None


def ending(returncode: int, said: str) -> Ending:
    """Classify a run by the launcher's exit code and MPI's messages in the output `said`."""
    if returncode == 0:
        return Ending(ExitCode.FINISHED)
    node = (_first(_NODES, said) or "").rstrip(",.:")
    if number := _first(_SIGNALS, said):
        if found := re.search(_JOINED, said):
            one, joined = map(int, found.groups())
            if one != joined and one | joined == joined:
                return Ending(ExitCode.LOST_RANK, one, node, several=True)
        return Ending(ExitCode.LOST_RANK, int(number), node)
    if (code := _first(_CODES, said)) is not None:
        return _of_code(int(code), node)
    if re.search(_KILLED, said):
        return Ending(ExitCode.LOST_RANK, node=node)
    return _of_code(returncode, node)


def _of_code(code: int, node: str) -> Ending:
    number = -code if code < 0 else code - 128  # 128 + signal, as in a shell
    if 0 < number < signal.NSIG and code not in set(ExitCode):
        return Ending(ExitCode.LOST_RANK, number, node)
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
    return Ending(known, node=node, other=code)
