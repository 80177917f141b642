"""Size and rank that an MPI launcher (mpiexec, srun) passes to a process, and the process's limits and streams."""

from __future__ import annotations

import codecs
import io
import os
import resource
import sys

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


MAX_PROCESSES = 10**7


FILES_OF_RANK, FILES_OF_NEIGHBOUR = (
    64,
    4,
)  # open files: at most 31 and 3 were needed by MPICH 5.0 and 1 to 8 ranks (tried)


# KiB of a file of shared memory: MPICH 5.0 started with 7,000 and not with 4,000, 8 ranks with 12,000 and not with 8,000 (tried).
SHARED_KIB, SHARED_KIB_OF_RANK = 8192, 2048


MAX_THREADS_PER_CPU, MAX_THREADS = 8, 64  # OMP_NUM_THREADS above both hangs or ends without a word


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
