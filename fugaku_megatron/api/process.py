"""The process that uses the library: which ranks there are, and what `init` sets up for all of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from ..comm import launcher
from ..comm.agreement import on_root
from ..comm.base import Comm
from ..comm.launch import end_job_with_exceptions
from ..comm.launch import init as start_mpi
from ..comm.solo import SoloComm
from ..host import runtime

T = TypeVar("T")
_signals: list[launcher.StopSignals] = []  # of `init`, at most one


@functools.cache
def world() -> Comm:
    """All ranks: those that a launcher such as mpiexec started, or this process alone, which then imports no MPI.

    With several ranks MPI starts here, on a thread of its own, and from then on an exception that nobody catches prints its
    traceback and ends all ranks, because the others would wait for this one for ever.
    """
    if launcher.processes()[1] == 1:
        return SoloComm()
    comm = start_mpi()
    end_job_with_exceptions(comm)
    return comm


def init(*, allocator: str = "tuned", thread_affinity: str = "auto", cpu_frequency: float | None = None,
         flush_denormals: bool = True, reserve_core: bool = False, stop_signals: bool = False) -> str:
    """Set up this process as the command train does; returns one line about the machine. Collective: every rank calls it.

    Call it before the first model, if at all. These are all of its effects, and each lasts as long as the process:

    allocator: "tuned" sets malloc's thresholds (mallopt) and gives torch's large CPU tensors an arena that keeps its pages; "stock"
    leaves both as they are. A preloaded allocator stays in either case.
    threads: the number of torch's and the kernels' threads becomes OMP_NUM_THREADS, or else this rank's share of the cores.
    thread_affinity: "pin" binds each thread to a core, "auto" does so on nodes of several NUMA domains, "none" does not.
    flush_denormals: all threads, torch's operations among them, take denormal numbers as zero.
    cpu_frequency: the clock in GHz, set where the system permits it; ValueError where the cores run at another.
    reserve_core: with several ranks, leave a core to the thread that calls MPI.
    stop_signals: a first SIGINT, SIGTERM or SIGUSR1 lets `Trainer.steps` end after the iteration that is under way, on all ranks;
    a second one ends the process. Only on the main thread.

    Without a call to `init` none of this is touched.
    """
    line = runtime.init(world(), allocator=allocator, thread_affinity=thread_affinity, cpu_frequency=cpu_frequency,
                        flush_denormals=flush_denormals, reserve_core=reserve_core)
    if stop_signals and not _signals:
        _signals.append(launcher.StopSignals().__enter__())
    return line


def on_first_rank(work: Callable[[], T]) -> T:
    """Run `work` on the first rank alone; its result, which can be pickled, on all ranks, once it is there. Collective.

    Where it raises, every rank raises ValueError with its message.
    """
    return on_root(world(), work)


def stop_requested() -> bool:
    """Whether a signal asked this rank to stop."""
    return any(signals.stop_requested for signals in _signals)
