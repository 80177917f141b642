"""How a start of a run ended: read from what its launcher said and from the launcher's exit code.

What launchers tell of the first rank that fails (MPICH 4.3, Open MPI 5.0 and Slurm 22.05, tried):

    launcher   killed by signal 9                        exit code 7     MPI_Abort(7)
    MPICH      code 9, "Killed (signal 9)" and its node  code 7          code 7
    Open MPI   code 137, "on node N ... signal 9"        code 7          code 7
    srun       code 137 or 143, "N: task 1: Killed"      code 137 or 143, "N: task 1: Exited with exit code 7"
                                                                         code 137, "MPI_Abort(..., 7)" from MPICH

MPICH's words give the bits of all ranks' signals together: 9 and 10 are "Segmentation fault (signal 11)" with code 9 or 10.
So a code alone may be a signal's number or belong to a rank that was ended for another's sake: the words count first.
Left out: what is done about it (supervise.py). Test: pytest tests/test_supervise.py
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from ..comm.exit_codes import ExitCode

RESTARTED = (ExitCode.FAILED, ExitCode.HANG, ExitCode.LOST_RANK, ExitCode.STORAGE)  # what may go better next time
WHAT = {
    ExitCode.FINISHED: "finished, or left in order", ExitCode.FAILED: "a rank failed", ExitCode.USER_ERROR: "refused",
    ExitCode.DIVERGED: "diverged", ExitCode.HANG: "a rank hung", ExitCode.LOST_RANK: "a rank is lost",
    ExitCode.REPLICAS_DIFFER: "replicas differ: the newest checkpoint may be wrong too", ExitCode.STORAGE: "a file system failed",
    ExitCode.INTERRUPTED: "interrupted",
}
_SIGNALS = (r"EXIT STRING: .*\(signal (\d+)\)", r"exited on\s+signal (\d+)")  # MPICH, Open MPI
_JOINED = r"EXIT CODE: (\d+)\n(?:=.*\n)*.*EXIT STRING: .*\(signal (\d+)\)"  # MPICH: one rank's, and all ranks' bits
_CODES = (r"srun: error: \S+: tasks? \S+ Exited with exit code (\d+)", r"application called MPI_Abort\([^,()]*, (\d+)\)",
          r"MPI_ABORT was invoked[^\0]*?Errorcode: (\d+)")
_KILLED = r"srun: error: \S+: tasks? \S+ (?!Exited)\S"
_NODES = (
    r"PID \d+ RUNNING AT (\S+)",  # MPICH
    r"on node (\S+) exited on",  # Open MPI
    r"Remote daemon: .* on node (\S+)",  # Open MPI: a node does not answer
    r"srun: error: Node failure on (\S+)",
    r"srun: error: (\S+): tasks? \S+ (?!Terminated)",
    r"rank \d+ \(node ([^\s()]+)\) (?:stopped|is gone)",  # the trainer's watchdog
)


@dataclass(frozen=True)
class Ending:
    """code: the job's, in the terms of ExitCode. signal: that ended a rank, 0 for none. node: that was named, or "".

    several: other ranks were ended by other signals. other: a code that is none of ours, such as MPICH's for a signal that it did
    not put into words.
    """

    code: ExitCode
    signal: int = 0
    node: str = ""
    other: int = 0
    several: bool = False

    @property
    def restarts(self) -> bool:
        """Whether another start may go better."""
        return self.code in RESTARTED

    def text(self) -> str:
        """What happened, for one line of the log."""
        more = ", and others in other ranks" * self.several
        how = f" (signal {self.signal}, {_signal_name(self.signal)}{more})" if self.signal else ""
        how = f" (exit code {self.other})" if self.code == ExitCode.FAILED else how
        return f"{WHAT[self.code]}{how}{f' on node {self.node}' if self.node else ''}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _first(patterns: tuple[str, ...], said: str) -> str | None:
    """What the patterns' group found first in the text."""
    found = [match for pattern in patterns if (match := re.search(pattern, said, re.MULTILINE))]
    return min(found, key=lambda match: match.start())[1] if found else None


def read(returncode: int, said: str) -> Ending:
    """The ending. returncode: as subprocess gives it, negative where a signal ended the launcher. said: the end of its output."""
    if returncode == 0:
        return Ending(ExitCode.FINISHED)
    node = (_first(_NODES, said) or "").rstrip(",.:")
    if number := _first(_SIGNALS, said):
        one, joined = map(int, found.groups()) if (found := re.search(_JOINED, said)) else (int(number), int(number))
        several = one != joined and one | joined == joined
        return Ending(ExitCode.LOST_RANK, one if several else int(number), node, several=several)
    if (code := _first(_CODES, said)) is not None:
        return _of_code(int(code), node)
    if re.search(_KILLED, said):
        return Ending(ExitCode.LOST_RANK, node=node)
    return _of_code(returncode, node)


def _of_code(code: int, node: str) -> Ending:
    number = -code if code < 0 else code - 128  # as shells have it
    if 0 < number < signal.NSIG and code != ExitCode.INTERRUPTED:
        return Ending(ExitCode.LOST_RANK, number, node)
    known = ExitCode(code) if code in set(ExitCode) else ExitCode.FAILED
    return Ending(known, node=node, other=code)
