"""World size and rank from an MPI launcher (mpiexec, srun), resource limits, and standard streams."""

from __future__ import annotations

import codecs
import contextlib
import gc
import io
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

# Variables with the number of processes: Open MPI, MPICH and derivatives, Slurm, MVAPICH, jsrun, Flux.
SIZES = (
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "FLUX_JOB_SIZE",
)

HYDRA = "PMI_FD"  # MPICH's launcher, or another one with its protocol
LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")  # processes on this node
LOCAL_RANKS = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
RANKS = (
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "SLURM_PROCID",
    "MV2_COMM_WORLD_RANK",
    "JSM_NAMESPACE_RANK",
    "FLUX_TASK_RANK",
)

# Variables of torchrun, accelerate and deepspeed, which start processes without MPI.
TORCH_SIZE = "WORLD_SIZE"
TORCH_RANK = "RANK"
TORCH_LOCAL_RANK = "LOCAL_RANK"

MAX_PROCESSES = 10**7


TORCH_KIB = 589824  # by which the import of torch's CPU library enlarges the address space (measured: 578,700)


def _address_space_kib() -> int:
    """Return the size of this process's address space in KiB with torch, 0 if the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
    except OSError:
        return 0
    own = pages * resource.getpagesize() // 1024
    return own if "torch" in sys.modules else own + TORCH_KIB


class Limit(NamedTuple):
    """A resource limit: `base` units, `per_rank` more for each rank on the node, and those in use before MPI starts."""

    kind: int
    name: str
    command: str
    unit: int
    base: int
    per_rank: int
    used: Callable[[], int] = int


LIMITS = (
    # MPICH 5.0 with 1 to 8 ranks needed at most 31 files, and 3 more for each rank on the node (measured).
    Limit(resource.RLIMIT_NOFILE, "open files", "ulimit -n", unit=1, base=64, per_rank=4),
    # MPICH 5.0 started with 7,000 KiB but not 4,000; 8 ranks with 12,000 but not 8,000 (measured).
    Limit(
        resource.RLIMIT_FSIZE,
        "the size of a file in KiB",
        "ulimit -f",
        unit=1024,
        base=8192,
        per_rank=2048,
    ),
    # MPICH 5.0 with 1 to 8 ranks enlarged the address space by at most 245,900 KiB (measured).
    Limit(
        resource.RLIMIT_AS,
        "the address space in KiB",
        "ulimit -v",
        unit=1024,
        base=262144,
        per_rank=0,
        used=_address_space_kib,
    ),
)

SHARED_MEMORY = "/dev/shm"  # of MPI libraries, and of heartbeats
# KiB there. MPICH 5.0 started with 1,040 for a rank and 2,100 for two, but not with 900 and 2,048 (measured).
SHARED_BASE = 128
SHARED_PER_RANK = 1056

# With OMP_NUM_THREADS above both limits a process hangs or ends without a message.
MAX_THREADS_PER_CPU = 8
MAX_THREADS = 64


def first_set(names: tuple[str, ...]) -> str | None:
    """Return the value of the first variable that is set."""
    return next((os.environ[name] for name in names if name in os.environ), None)


def _first_set(names: tuple[str, ...], minimum: int, default: int) -> tuple[str, int]:
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
    """Return the launcher's variable for the number of processes, and its value; ("", 1) without a launcher."""
    return _first_set(SIZES, 1, 1)


def rank() -> int:
    return _first_set((*RANKS, TORCH_RANK) if _started_by_torch() else RANKS, 0, 0)[1]


def _started_by_torch() -> bool:
    variables = (TORCH_SIZE, TORCH_RANK, TORCH_LOCAL_RANK)
    has_torch = all(name in os.environ for name in variables)
    return has_torch and not any(name in os.environ for name in SIZES)


def check_launcher() -> None:
    """Raise ValueError for a launcher unknown to MPI: each process would run alone."""
    size = os.environ.get(TORCH_SIZE, "1")
    if _started_by_torch() and size != "1":
        raise ValueError(
            f"{TORCH_SIZE}={size:.40} is set by torchrun or a launcher like it, which MPI does not "
            "know: every process would train alone; start with mpiexec "
            f"-n {size:.40}, or with srun and the site's --mpi"
        )


def without_launcher() -> dict[str, str]:
    """Return the environment of a process that a rank starts, which is no rank."""
    names = (*SIZES, *RANKS, *LOCAL_SIZES, TORCH_SIZE, TORCH_RANK, TORCH_LOCAL_RANK)
    return {name: value for name, value in os.environ.items() if name not in names}


def processes_of_node() -> int:
    return _first_set(LOCAL_SIZES, 1, 1)[1]


def check_environment() -> None:
    """Raise ValueError for variables that mislead MPI or OpenMP."""
    processes()
    rank()
    check_launcher()
    # The variable has one number for each nesting level.
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    limit = max(MAX_THREADS, MAX_THREADS_PER_CPU * (os.cpu_count() or 1))
    if first.isdecimal() and (len(first) > 9 or int(first) > limit):
        raise ValueError(
            f"OMP_NUM_THREADS={first:.40}, but this node has {os.cpu_count()} CPUs: set it to the CPUs of one "
            "rank, or unset it"
        )


def check_limits() -> None:
    """Raise MPI's resource limits; ValueError if a hard limit or the free shared memory is too low."""
    ranks = processes_of_node()
    _check_shared_memory(ranks)
    for limit in LIMITS:
        needed = limit.used() + limit.base + limit.per_rank * ranks
        soft, hard = resource.getrlimit(limit.kind)
        if resource.RLIM_INFINITY not in (soft, hard) and hard < needed * limit.unit:
            raise ValueError(
                f"the limit of {limit.name} is {hard // limit.unit}, and MPI needs {needed} with {_ranks(ranks)} "
                f"on a node: raise it by `{limit.command} {needed}` before the start, or ask the administrator of the "
                "system"
            )
        if soft != resource.RLIM_INFINITY and soft < needed * limit.unit:
            resource.setrlimit(limit.kind, (needed * limit.unit, hard))


def _ranks(count: int) -> str:
    return f"{count} rank" if count == 1 else f"{count} ranks"


def _check_shared_memory(ranks: int) -> None:
    """Raise ValueError without room for MPI: a process that touches a page beyond it ends by SIGBUS."""
    needed = SHARED_BASE + SHARED_PER_RANK * ranks
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free // 1024
    except OSError:  # MPI uses another folder, or none
        return
    if free < needed:
        raise ValueError(
            f"{SHARED_MEMORY} has {free} KiB left, and MPI needs {needed} with {_ranks(ranks)} on a node: remove what "
            "killed jobs left there, or enlarge it (mount -o remount,size=1G /dev/shm; --shm-size of a container)"
        )


# Controls other than tab, line feed, form feed, carriage return and the two colours of chat/chat_examples.py, and the marks that
# change the direction of text: a name in a foreign file could move the cursor or hide what a line says.
_CONTROL = re.compile(
    "\x1b(?!\\[(?:32|0)m)|[\0-\x08\x0b\x0e-\x1a\x1c-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class _Escaped(io.TextIOWrapper):
    """Standard stream that prints control characters as escapes, such as \\x1b."""

    escapes = True

    def write(self, text: str) -> int:
        shown = text
        if self.escapes:
            shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
        super().write(shown)
        return len(text)


def print_as_is() -> None:
    """Leave control characters in standard output, whose text is the result, unless it is a terminal."""
    if isinstance(sys.stdout, _Escaped) and not sys.stdout.isatty():
        sys.stdout.escapes = False


def open_streams() -> None:
    """Open closed standard streams on the null device, and let all streams print any path and no control character.

    Otherwise the next opened file would get a closed stream's descriptor, and library output.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # `open` returns the lowest free descriptor, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = open(os.devnull, "r" if name == "stdin" else "w")  # never closed
            setattr(sys, name, null)
            setattr(sys, f"__{name}__", null)
    # Path bytes that are invalid in the locale's encoding are surrogates.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        encoding = stream.encoding
        errors = "backslashreplace"
        if codecs.lookup(encoding).name in ("ascii", "utf-8"):
            encoding = "utf-8"
            errors = "surrogateescape"
        escaped = _Escaped(
            stream.buffer,
            encoding,
            errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, escaped)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection during an import."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
