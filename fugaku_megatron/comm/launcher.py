"""What an MPI launcher (mpiexec, srun) tells its processes, and how a process reports so that its launcher shows it.

Needs neither torch nor MPI, so that a command line can be refused, or its help printed, before either is loaded.
Test: pytest tests/test_launch.py
"""

from __future__ import annotations

import array
import fcntl
import os
import stat
import sys
import termios
import time
from typing import TextIO

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # variables with the number of processes
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # variables with this process's number
GRACE_EVERYWHERE = 10.0  # s that other ranks leave to rank 0 where it is known to fail as well; its end ends them
GRACE_START = 2.0  # s, the same where processes have just started: rank 0 may still be loading Python


def _first_set(names: tuple[str, ...], default: int) -> tuple[str, int]:
    return next(((name, int(os.environ[name])) for name in names if name in os.environ), ("", default))


def processes() -> tuple[str, int]:
    """The variable that says how many processes were started, and its value; ("", 1) when no launcher started this one."""
    return _first_set(SIZES, 1)


def rank() -> int:
    """This process's number among those started; 0 when no launcher started it."""
    return _first_set(RANKS, 0)[1]


def report_everywhere(text: str) -> None:
    """Print `text` on stderr, once, where every process of a job fails alike before MPI has started.

    Rank 0 prints. The others leave it the time to do so, because some launchers kill all processes when the first one fails; many
    processes start further apart than a few.
    """
    if rank():
        time.sleep(min(GRACE_EVERYWHERE, GRACE_START + processes()[1] / 100))
        return
    print(text, file=sys.stderr, flush=True)
    wait_until_read(sys.stderr)


def wait_until_read(stream: TextIO, limit: float = 2.0) -> None:
    """Wait until the launcher has read the pipe behind `stream`, at most `limit` seconds.

    MPICH's launcher drops what it has not read when the abort arrives: without this, 3 of 60 reports were lost.
    """
    try:
        pipe = stream.fileno()
        unread, end = array.array("i", [1]), time.monotonic() + limit
        while stat.S_ISFIFO(os.fstat(pipe).st_mode) and unread[0] and time.monotonic() < end:
            time.sleep(0.01)
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
    except (OSError, ValueError):  # not a file, or a system without FIONREAD
        pass
