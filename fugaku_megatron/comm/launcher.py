"""What an MPI launcher (mpiexec, srun) tells its processes, and how a process reports so that its launcher shows it.

Needs neither torch nor MPI, so that a command line can be refused, or its help printed, before either is loaded.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import errno
import fcntl
import gc
import io
import os
import resource
import signal
import stat
import sys
import termios
import time
from collections.abc import Iterator
from typing import TextIO

SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # variables with the number of processes
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # variables with those of this node
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")  # variables with this process's number
GRACE_EVERYWHERE = 10.0  # s that other ranks leave to rank 0 where it is known to fail as well; its end ends them
GRACE_START = 2.0  # s, the same where processes have just started: rank 0 may still be loading Python


# Words of the loader, torch, C, C++ and Python.
_NO_MEMORY = ("failed to map segment", "llocate memory", "bad_alloc", "can't start new thread")
_REFUSED_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)
MAX_PROCESSES = 10**7
FILES_OF_RANK, FILES_OF_NEIGHBOUR = 64, 4  # open files: at most 31 and 3 were needed by MPICH 5.0 and 1 to 8 ranks (tried)
# KiB of a file of shared memory: MPICH 5.0 started with 7,000 and not with 4,000, 8 ranks with 12,000 and not with 8,000 (tried).
SHARED_KIB, SHARED_KIB_OF_RANK = 8192, 2048
MAX_THREADS_PER_CPU, MAX_THREADS = 8, 64  # OMP_NUM_THREADS above both hangs or ends without a word


def _first_set(names: tuple[str, ...], minimum: int, default: int) -> tuple[str, int]:
    """The first variable that is set, and its value. Raises ValueError for one that is not a number of processes."""
    name = next((name for name in names if name in os.environ), "")
    text = os.environ[name] if name else str(default)
    if not text.isdecimal() or len(text) > len(str(MAX_PROCESSES)) or not minimum <= int(text) <= MAX_PROCESSES:
        raise ValueError(f"{name}={text:.40} is not a number that a launcher sets: unset it, or start with mpiexec or srun")
    return name, int(text)


def processes() -> tuple[str, int]:
    """The variable that says how many processes were started, and its value; ("", 1) when no launcher started this one."""
    return _first_set(SIZES, 1, 1)


def rank() -> int:
    """This process's number among those started; 0 when no launcher started it."""
    return _first_set(RANKS, 0, 0)[1]


def processes_of_node() -> int:
    """How many processes were started on this node; 1 where nothing says so."""
    return _first_set(LOCAL_SIZES, 1, 1)[1]


def check_environment() -> None:
    """Raises ValueError for variables that mislead MPI or OpenMP, before either is loaded."""
    processes()
    rank()
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each level of nesting
    limit = max(MAX_THREADS, MAX_THREADS_PER_CPU * (os.cpu_count() or 1))
    if first.isdecimal() and (len(first) > 9 or int(first) > limit):
        raise ValueError(f"OMP_NUM_THREADS={first:.40}, but this node has {os.cpu_count()} CPUs: set it to the CPUs of one "
                         "rank, or unset it")


def check_limits() -> None:
    """Raises ValueError for a limit of the system with which MPI would abort, where this process may not raise it itself."""
    ranks = processes_of_node()
    _raise_limit(resource.RLIMIT_NOFILE, "open files", "ulimit -n", FILES_OF_RANK + FILES_OF_NEIGHBOUR * ranks, ranks)
    shared = SHARED_KIB + SHARED_KIB_OF_RANK * ranks
    _raise_limit(resource.RLIMIT_FSIZE, "the size of a file in KiB", "ulimit -f", shared, ranks, 1024)


def _raise_limit(kind: int, what: str, command: str, needed: int, ranks: int, unit: int = 1) -> None:
    """See that a limit is at least `needed` units."""
    soft, hard = resource.getrlimit(kind)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed * unit:
        raise ValueError(f"the limit of {what} is {hard // unit}, and MPI needs {needed} with {ranks} rank{'s' * (ranks > 1)} on a "
                         f"node: raise it by `{command} {needed}` before the start, or ask the administrator of the system")
    if soft != resource.RLIM_INFINITY and soft < needed * unit:
        resource.setrlimit(kind, (needed * unit, hard))


def open_streams() -> None:
    """Make the standard streams take every line: a closed one leads to the null device, and no character of a path is refused.

    The next file that is opened would get the descriptor of a closed stream, and what libraries print would be written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free descriptor, which is this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115 - stays open as long as the process
            setattr(sys, name, null)
            setattr(sys, f"__{name}__", null)
    for stream in (sys.stdout, sys.stderr):  # the bytes of a path that is not valid in the locale's encoding are surrogates
        if not isinstance(stream, io.TextIOWrapper):
            continue
        if codecs.lookup(stream.encoding).name in ("ascii", "utf-8"):
            stream.reconfigure(encoding="utf-8", errors="surrogateescape")
        else:
            stream.reconfigure(errors="backslashreplace")


def report_everywhere(text: str) -> None:
    """Print `text` on stderr, once, where every process of a job fails alike before MPI has started.

    Rank 0 prints. The others leave it the time to do so, because some launchers kill all processes when the first one fails; many
    processes start further apart than a few.
    """
    with contextlib.suppress(ValueError):  # of misleading variables, which is what `text` may be about
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
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _REFUSED_PATHS:
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
