"""The process: pinned threads, time limit, clock, and the log's first lines."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..comm.agreement import Nodes, differing, everywhere, find_nodes
from ..comm.base import Comm
from ..comm.job import describe
from ..comm.mpi import MPIComm
from ..text.named_files import StrPath
from . import allocator, kernels, machine
from .binding_problems import problems
from .cgroup import cpu_quota
from .cpu_binding import CpuBinding, Rank, mapping, place
from .energy import Counters
from .topology import Node, allowed_memory, cpuset

CLOCK_TOLERANCE = 0.03  # A64FX's clocks are 10 % apart; the measurement's spread is below 1 %


@dataclass(frozen=True)
class ProcessSettings:
    """A rank's process settings, from flags.

    reserve_core: leave a core to the thread that calls MPI
    """

    allocator: str = "tuned"
    thread_affinity: str = "auto"
    cpu_frequency: float | None = None
    flush_denormals: bool = True
    reserve_core: bool = False


def apply_binding(binding: CpuBinding, flush_denormals: bool) -> None:
    """Apply the binding to torch and the kernels (one thread pool), and every thread's denormal mode."""
    torch.set_num_threads(binding.threads)
    if binding.cpus:
        kernels.pin_threads(list(binding.cpus))
    kernels.flush_denormals(flush_denormals)


def apply_to_communication(binding: CpuBinding, node: Node) -> None:
    """Bind the calling thread, which calls MPI, to its core, or near the rank's pinned cores.

    Memory that it touches first, such as a shared window, is then in the rank's NUMA domain.
    """
    # torch sets a new thread's number of threads at its first parallel operation. With more than one, OpenMP would start
    # another set of threads on the cores in use.
    torch.empty(2**20).zero_()
    kernels.set_num_threads(1)
    cpus = {cpu for core in binding.cpus for cpu in node.core_of(core)}
    if binding.communication is not None:
        cpus = {binding.communication}
    if cpus:
        os.sched_setaffinity(0, cpus)


def init(
    world: Comm,
    settings: ProcessSettings = ProcessSettings(),
    nodes: Nodes | None = None,
    needed: int | None = None,
) -> str:
    """Set up this rank as `settings` say before its first large tensor; return the log's lines. Collective.

    ValueError if the clock differs from the requested one.

    needed: bytes of memory that this rank will need, if known
    """
    mask = sorted(os.sched_getaffinity(0))
    memory_text = allocator.tune(settings.allocator)
    here = (nodes or find_nodes(world)).ranks
    node = Node.read()
    masks = here.all_gather_object(mask)
    with everywhere():
        binding = place(
            node,
            masks,
            here.rank,
            environ=os.environ,
            quota=cpu_quota(),
            affinity=settings.thread_affinity,
            reserve=settings.reserve_core,
        )
        apply_binding(binding, settings.flush_denormals)
        if isinstance(world, MPIComm):
            world.engine.call(lambda: apply_to_communication(binding, node))
            world.engine.own_core = binding.communication is not None
        ghz = check_clock(settings.cpu_frequency, binding.cpus or mask)
    library = describe(world)
    if binding.communication is not None:
        library += f", communication on core {binding.communication}"
    ranks = here.all_gather_object(Rank(world.rank, tuple(mask), binding, needed))
    summary = machine.summary(
        library,
        len(mask),
        ranks_on_node=here.size,
        binding=binding,
        memory=memory_text,
        ghz=ghz,
        energy=Counters.find().describe(),
    )
    return "\n".join([summary, *mapping_lines(world, node, ranks)])


def mapping_lines(world: Comm, node: Node, ranks: list[Rank]) -> list[str]:
    """Return the log's lines about this node's cores, their problems, and differing nodes. Collective."""
    found = problems(node, ranks, os.environ, cpu_quota(), cpuset(), allowed_memory())
    threads = sorted({rank.binding.threads for rank in ranks})
    shape = f"{node.describe()}, {len(ranks)} ranks of {threads} threads, {len(found)} problems"
    lines = [mapping(node, ranks), *(f"note: {line}" for line in found)]
    if difference := differing(world, {"the mapping of a node": shape}):
        lines.append(f"note: nodes differ: {difference}")
    return lines


class ExitTimer:
    """--exit-duration-in-mins: `expired` after so many minutes since creation; never if None."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None and minutes <= 0:
            raise ValueError(f"--exit-duration-in-mins must be above 0, got {minutes}")
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    @property
    def expired(self) -> bool:
        return self._end is not None and self._clock() >= self._end


def set_clock(ghz: float, cpus: Iterable[int], root: StrPath = "/sys/devices/system/cpu") -> bool:
    """Fix the CPUs' clock through Linux's cpufreq; False if absent or denied."""
    try:
        for cpu in cpus:
            policy = Path(root) / f"cpu{cpu}" / "cpufreq"
            kilohertz = str(round(ghz * 1e6))
            lower_first = ghz * 1e6 < int((policy / "scaling_min_freq").read_text())
            for name in ("min", "max") if lower_first else ("max", "min"):
                (policy / f"scaling_{name}_freq").write_text(kilohertz)
    except OSError:
        return False
    return True


def check_clock(
    requested: float | None, cpus: Iterable[int], measured: float | None = None
) -> float:
    """Return the measured GHz, set to `requested` (--cpu-frequency) if permitted.

    ValueError if the clocks differ by more than CLOCK_TOLERANCE.
    """
    if requested is not None:
        set_clock(requested, cpus)
    measured = machine.clock_ghz() if measured is None else measured
    if requested is not None and abs(measured / requested - 1) > CLOCK_TOLERANCE:
        raise ValueError(
            f"--cpu-frequency {requested:g}: this core runs at {measured:.2f} GHz: ask the job for that clock "
            f"(freq={round(requested * 1000)},eco_state=0 on Fugaku), or pass --cpu-frequency {measured:.1f}"
        )
    return measured
