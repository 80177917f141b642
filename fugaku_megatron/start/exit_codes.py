"""Exit codes, and how a process below an MPI launcher reports an error and ends."""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import gc
import os
import signal
import stat
import sys
import termios
import time
from collections.abc import Iterator
from enum import IntEnum
from typing import TextIO

from .environment import processes, rank

GRACE_EVERYWHERE = (
    10.0  # s that other ranks leave to rank 0 where it is known to fail as well; its end ends them
)


GRACE_START = (
    2.0  # s, the same where processes have just started: rank 0 may still be loading Python
)


# Words of the loader, torch, C, C++ and Python.
_NO_MEMORY = ("failed to map segment", "llocate memory", "bad_alloc", "can't start new thread")


_REFUSED_PATHS = (
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
)


class ExitCode(IntEnum):
    """How a job ended, for a job script to decide by. A launcher has codes of its own: above 128, a signal ended a rank.

    FINISHED is also an orderly stop: a signal or a time limit came, the run was saved, and the next start continues it.
    """

    FINISHED = 0
    FAILED = 1  # a bug with its traceback, or memory that the system refuses; of `verify`: something is damaged
    USER_ERROR = 2  # refused in one line; a restart would be refused as well
    DIVERGED = 3  # gradients hold an Inf or NaN; a restart would run into them again
    HANG = 4  # a rank stopped moving
    LOST_RANK = 5  # a rank's process or node is gone
    # a fault of a machine: ranks that hold the same state have other bits, or a core computes wrong
    # results
    REPLICAS_DIFFER = 6
    STORAGE = 7  # a file system failed in a way that may pass: an I/O error, a stale handle, a server that does not answer
    INTERRUPTED = 130  # by Control-C, as shells have it: 128 + SIGINT
    OUTPUT = 141  # standard output takes nothing more: its reader has left (as shells have it: 128 + SIGPIPE), or its disk is full


def report_everywhere(text: str) -> None:
    """Print `text` on stderr, once, where every process of a job fails alike before MPI has started.

    Rank 0 prints. The others leave it the time to do so, because some launchers kill all processes when the first one fails; many
    processes start further apart than a few.
    """
    with contextlib.suppress(
        ValueError
    ):  # of misleading variables, which is what `text` may be about
        if rank():
            time.sleep(min(GRACE_EVERYWHERE, GRACE_START + processes()[1] / 100))
            return
    with contextlib.suppress(OSError):  # nobody reads
        print(text, file=sys.stderr, flush=True)
    wait_until_read(sys.stderr)


def abort(code: int) -> None:
    """Ask the launcher to end the job with this exit code, without MPI, which may hang; nothing where it does not speak PMI-1.

    MPICH's launcher also notices the end of each rank, but it then ends with the code of any rank, even of one that it killed.
    """
    with contextlib.suppress(OSError, KeyError, ValueError):
        os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={code}\n".encode())
        time.sleep(GRACE_START)


def path_error(error: BaseException) -> str | None:
    """One line for a path that the system refuses before anybody has looked at it; None for another error."""
    if (
        not isinstance(error, OSError)
        or error.filename is None
        or error.errno not in _REFUSED_PATHS
    ):
        return None
    return f"{os.fsdecode(error.filename)}: {error.strerror}: correct the path"


def output_error(error: BaseException) -> str | None:
    """One line for standard output that takes nothing more; None for another error, "" where its reader, such as head, has left."""
    if isinstance(error, BrokenPipeError):
        return ""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)
    if isinstance(error, OSError) and error.filename is None and error.errno in full:
        return f"standard output: {error.strerror}"
    return None


def memory_error(error: BaseException) -> str | None:
    """One line for memory that the system refuses, also to a library that is loaded; None for another error."""
    text = next(iter(str(error).splitlines()), "")
    kinds = (ImportError, OSError, RuntimeError)
    refused = isinstance(error, kinds) and any(words in text for words in _NO_MEMORY)
    if not isinstance(error, MemoryError) and not refused:
        return None
    said = f" ({text:.200})" if text else ""
    return f"out of memory{said}: start fewer ranks on a node, or save memory by --recompute-granularity full"


def leave_alone(code: int) -> int:
    """The exit code of a process that fails alone, before MPI has started; one of several ends by SIGKILL instead.

    The others wait for it in MPI_Init, and MPICH's launcher ends them for a signal only.
    """
    wait_until_read(sys.stderr)
    if processes()[1] > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return code


def close_output() -> None:
    """Flush standard output; where that fails, drop what is left, so that Python's end does not report it again."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wait_until_read(stream: TextIO, limit: float = 2.0) -> None:
    """Wait until the launcher has read the pipe that `stream` writes to, for at most `limit` seconds.

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


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """No collection within; afterwards the collector is as it was. What an import creates stays, so that it has nothing to find."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
