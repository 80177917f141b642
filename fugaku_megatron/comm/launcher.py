"""What an MPI launcher (mpiexec, srun) passes to its processes, and how a process reports, handles signals and ends below it.

It also keeps signals while a command starts an interrupt ends it with one line, and a request to stop is kept for the trainer.
Python would raise KeyboardInterrupt in the middle of an import, where libraries swallow it or print a traceback. SIGTERM and
SIGUSR1 would kill a rank that is still importing, and with it the job. Needs neither torch nor MPI, so that a command line can be
refused, or its help printed, before either is loaded. Left out: a trainer's orderly stop (host/runtime.py).
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from types import FrameType
from typing import Any, TextIO, TypeVar

# Variables with the number of processes: Open MPI, MPICH and its relatives, Slurm, MVAPICH, jsrun, Flux.
SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
)
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # variables with those of this node
RANKS = (  # variables with this process's number
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)
# Variables of torchrun, accelerate and deepspeed, which start processes without MPI.
TORCH_SIZE, TORCH_RANK, TORCH_LOCAL_RANK = "WORLD_SIZE", "RANK", "LOCAL_RANK"
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
MAX_PROCESSES = 10**7
FILES_OF_RANK, FILES_OF_NEIGHBOUR = (
    64,
    4,
)  # open files: at most 31 and 3 were needed by MPICH 5.0 and 1 to 8 ranks (tried)
# KiB of a file of shared memory: MPICH 5.0 started with 7,000 and not with 4,000, 8 ranks with 12,000 and not with 8,000 (tried).
SHARED_KIB, SHARED_KIB_OF_RANK = 8192, 2048
MAX_THREADS_PER_CPU, MAX_THREADS = 8, 64  # OMP_NUM_THREADS above both hangs or ends without a word
# SIGUSR1 is what Slurm sends ahead of the time limit when a job asks for it (--signal=USR1@300)
STOPS = (signal.SIGTERM, signal.SIGUSR1)
Handler = (
    Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
)  # what signal.signal takes and returns
STOP_SIGNALS = (*STOPS, signal.SIGINT)
Signals = TypeVar("Signals", bound="StopSignals")
STOPPED_IN_ORDER = ("train", "supervise")  # commands that save and leave when a signal asks them to


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


def _first_set(names: tuple[str, ...], minimum: int, default: int) -> tuple[str, int]:
    """The first variable that is set, and its value. Raises ValueError for one that is not a number of processes."""
    name = next((name for name in names if name in os.environ), "")
    text = os.environ[name] if name else str(default)
    if (
        not text.isdecimal()
        or len(text) > len(str(MAX_PROCESSES))
        or not minimum <= int(text) <= MAX_PROCESSES
    ):
        raise ValueError(
            f"{name}={text:.40} is not a number that a launcher sets: unset it, or start with mpiexec or srun"
        )
    return name, int(text)


def processes() -> tuple[str, int]:
    """The variable that says how many processes were started, and its value; ("", 1) when no launcher started this one."""
    return _first_set(SIZES, 1, 1)


def rank() -> int:
    """This process's number among those started; 0 when no launcher started it."""
    return _first_set((*RANKS, TORCH_RANK) if _started_by_torch() else RANKS, 0, 0)[1]


def _started_by_torch() -> bool:
    """Return True in a process that torchrun or a launcher like it started, and no launcher of MPI."""
    variables = (TORCH_SIZE, TORCH_RANK, TORCH_LOCAL_RANK)
    has_torch = all(name in os.environ for name in variables)
    return has_torch and not any(name in os.environ for name in SIZES)


def check_launcher() -> None:
    """Raise ValueError for a launcher that MPI does not know: each process would run alone."""
    size = os.environ.get(TORCH_SIZE, "1")
    if _started_by_torch() and size != "1":
        raise ValueError(
            f"{TORCH_SIZE}={size:.40} is set by torchrun or a launcher like it, which MPI does not "
            "know: every process would train alone; start with mpiexec "
            f"-n {size:.40}, or with srun and the site's --mpi"
        )


def processes_of_node() -> int:
    """How many processes were started on this node; 1 where nothing says so."""
    return _first_set(LOCAL_SIZES, 1, 1)[1]


def check_environment() -> None:
    """Raises ValueError for variables that mislead MPI or OpenMP, before either is loaded."""
    processes()
    rank()
    check_launcher()
    first = (
        os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    )  # one number for each level of nesting
    limit = max(MAX_THREADS, MAX_THREADS_PER_CPU * (os.cpu_count() or 1))
    if first.isdecimal() and (len(first) > 9 or int(first) > limit):
        raise ValueError(
            f"OMP_NUM_THREADS={first:.40}, but this node has {os.cpu_count()} CPUs: set it to the CPUs of one "
            "rank, or unset it"
        )


def check_limits() -> None:
    """Raises ValueError for a limit of the system with which MPI would abort, where this process may not raise it itself."""
    ranks = processes_of_node()
    _raise_limit(
        resource.RLIMIT_NOFILE,
        "open files",
        "ulimit -n",
        FILES_OF_RANK + FILES_OF_NEIGHBOUR * ranks,
        ranks,
    )
    shared = SHARED_KIB + SHARED_KIB_OF_RANK * ranks
    _raise_limit(
        resource.RLIMIT_FSIZE, "the size of a file in KiB", "ulimit -f", shared, ranks, 1024
    )


def _raise_limit(
    kind: int, what: str, command: str, needed: int, ranks: int, unit: int = 1
) -> None:
    """See that a limit is at least `needed` units."""
    soft, hard = resource.getrlimit(kind)
    if resource.RLIM_INFINITY not in (soft, hard) and hard < needed * unit:
        raise ValueError(
            f"the limit of {what} is {hard // unit}, and MPI needs {needed} with {ranks} rank{'s' * (ranks > 1)} on a "
            f"node: raise it by `{command} {needed}` before the start, or ask the administrator of the system"
        )
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
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # gets the lowest free descriptor, which is this one
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = open(os.devnull, "r" if name == "stdin" else "w")  # noqa: SIM115 - stays open as long as the process
            setattr(sys, name, null)
            setattr(sys, f"__{name}__", null)
    for stream in (
        sys.stdout,
        sys.stderr,
    ):  # the bytes of a path that is not valid in the locale's encoding are surrogates
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


class EarlyStop:
    """A handler that keeps the first signal as `received`; a second has the default effect, which ends the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)


def handle_signals(program: str, words: Sequence[str]) -> None:
    """What signals do until the command of these words, its name first, has handlers of its own. A second call changes nothing."""
    report_interrupts(program)
    if words[:1] and words[0] in STOPPED_IN_ORDER and "--dry-run" not in words:
        keep_stops()


def keep_stops() -> None:
    """From now on SIGTERM and SIGUSR1 are kept, until whoever handles them asks for them by `kept_stop`."""
    handler = EarlyStop()
    for number in STOPS:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(number) is signal.SIG_DFL
        ):
            signal.signal(number, handler)


def kept_stop(handlers: Iterable[Handler]) -> signal.Signals | None:
    """The signal that one of these handlers has kept; None if none has."""
    return next(
        (
            handler.received
            for handler in handlers
            if isinstance(handler, EarlyStop) and handler.received
        ),
        None,
    )


def report_interrupts(program: str) -> None:
    """Report interrupts under the name of `program` from now on; nothing outside the main thread or where SIGINT is ignored."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_importing(frame):
            raise KeyboardInterrupt
        report_everywhere(f"{program}: interrupted")
        os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGINT, handle)


def is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in this frame or a caller of it, or Python itself is ending."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return sys.is_finalizing()


class StopSignals:
    """Inside the block a first signal only sets `stop_requested`, so that the trainer can save and exit; a second ends it.

    Ranks do not receive a signal at the same moment, so they must decide together. Outside the main thread, where Python
    allows no handlers, nothing is installed. A signal that came while the process started counts as the first.
    """

    def __init__(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        self._previous: dict[int, Handler] = {}

    @property
    def stop_requested(self) -> bool:
        return self.received is not None

    def __enter__(self: Signals) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle) for number in self.signals
            }
            self.received = self.received or kept_stop(self._previous.values())
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)
