"""Exit codes, and error reports of a process below an MPI launcher."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import os
import signal
import stat
import sys
import termios
import time
from enum import IntEnum
from typing import TextIO

from . import witness
from .environment import HYDRA, processes, rank

# Seconds that other ranks wait for rank 0 to report the same failure; the end of rank 0 ends them.
GRACE_EVERYWHERE = 10.0
GRACE_START = 2.0  # the same just after the start: rank 0 may still be loading Python

# Messages of the loader, torch, C, C++ and Python.
_NO_MEMORY = ("failed to map segment", "llocate memory", "bad_alloc", "can't start new thread")

SAVE_MEMORY = "start fewer ranks on a node, or save memory by --recompute-granularity full"

_REFUSED_PATHS = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


class ExitCode(IntEnum):
    """Exit code of a job, for job scripts. Launchers add their own: above 128, a signal ended a rank.

    FINISHED includes an orderly stop after a signal or at a time limit: the next start resumes.
    """

    FINISHED = 0
    FAILED = 1  # a bug with its traceback, or out of memory; `verify`: a file is damaged
    # Reported in one line; a restart would fail in the same way. Also: another job has taken over the lock of --save.
    USER_ERROR = 2
    DIVERGED = 3  # gradients contain Inf or NaN; a restart would reach them again
    HANG = 4  # a rank made no progress
    LOST_RANK = 5  # a rank's process or node is gone
    # A machine fault: replicas of the same state differ, or a core computes wrong results.
    REPLICAS_DIFFER = 6
    STORAGE = 7  # a possibly temporary file-system failure: I/O error, stale handle, server timeout
    LAYOUT_DIFFERS = 8  # --check-layout: the run as laid out does not train as one rank
    INTERRUPTED = 130  # Control-C, as in shells: 128 + SIGINT
    OUTPUT = 141  # standard output is closed (as in shells: 128 + SIGPIPE) or its disk is full


def report_everywhere(text: str) -> None:
    """Print `text` on stderr once, if every process fails alike before MPI has started.

    Ranks other than 0 wait, longer with more processes: some launchers kill all processes when the first fails.
    """
    with contextlib.suppress(ValueError):  # invalid launcher variables, possibly reported by `text`
        if rank():
            time.sleep(min(GRACE_EVERYWHERE, GRACE_START + processes()[1] / 100))
            return
    with contextlib.suppress(OSError):  # nobody reads
        print(text, file=sys.stderr, flush=True)
    wait_until_read(sys.stderr)


def abort(code: int) -> None:
    """Ask a PMI-1 launcher to end the job with this exit code, without MPI, which may hang.

    MPICH's launcher otherwise returns any rank's code, even a killed rank's.
    """
    witness.tell()
    with contextlib.suppress(OSError, KeyError, ValueError):
        os.write(int(os.environ[HYDRA]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(GRACE_START)


def path_error(error: BaseException) -> str | None:
    if (
        not isinstance(error, OSError)
        or error.filename is None
        or error.errno not in _REFUSED_PATHS
    ):
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}: correct the path"


def output_error(error: BaseException) -> str | None:
    """Return a one-line message if standard output fails, "" if its reader has closed it."""
    if isinstance(error, BrokenPipeError):
        return ""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
    if isinstance(error, OSError) and error.filename is None and error.errno in full:
        return f"standard output: {error.strerror}"
    return None


def memory_error(error: BaseException) -> str | None:
    text = next(iter(str(error).splitlines()), "")
    kinds = (ImportError, OSError, RuntimeError)
    refused = isinstance(error, kinds) and any(words in text for words in _NO_MEMORY)
    if not isinstance(error, MemoryError) and not refused:
        return None
    said = f" ({text:.200})" if text else ""
    return f"out of memory{said}: {SAVE_MEMORY}"


def leave_alone(code: int) -> int:
    """Return `code` from a process that fails alone before MPI has started; kill the process if there are others.

    They wait in MPI_Init, and MPICH's launcher ends them only after a signal.
    """
    wait_until_read(sys.stderr)
    if processes()[1] > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def close_output() -> None:
    """Flush standard output, or drop the rest, so that Python reports no error at exit."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wait_until_read(stream: TextIO, limit: float = 2.0) -> None:
    """Wait, at most `limit` seconds, until the launcher has read the pipe behind `stream`.

    MPICH's launcher drops unread output when the abort arrives (3 in 60 reports).
    """
    try:
        pipe = stream.fileno()
        unread = array.array("i", [1])
        end = time.monotonic() + limit
        while stat.S_ISFIFO(os.fstat(pipe).st_mode) and unread[0] and time.monotonic() < end:
            time.sleep(0.01)
            fcntl.ioctl(pipe, termios.FIONREAD, unread)
    except (OSError, ValueError):  # not a file, or a system without FIONREAD
        pass
