"""The process and its machine: threads and their cores, requests to stop, time limit, clock, FP32 peak, a summary line.

A rank may be bound to cores by its launcher (numactl, Fujitsu's mpiexec, srun), or share its mask with the other ranks of the node.
In the second case the cores are distributed in NUMA order, so that a rank's memory, which its own threads touch first, is near
them. Left out: memory (allocator.py).
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..comm.agreement import Nodes, everywhere, find_nodes
from ..comm.base import Comm
from ..comm.launch import describe
from ..comm.mpi import MPIComm
from . import allocator as memory
from . import kernels
from .allocator import cgroup_folders, read_text

_CPUS = "/sys/devices/system/cpu"
ENOUGH_CORES = 24  # of a rank, from which on a core for communication costs less than its interruptions
_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
CLOCK_TOLERANCE = 0.03  # A64FX's clocks are 10 % apart; the measurement's spread is below 1 %
# (CPU implementer, CPU part) of /proc/cpuinfo on AArch64, which has no model name
_ARM_CPUS = {
    (0x46, 0x001): "Fujitsu A64FX",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4F): "Arm Neoverse V2",
}
STEPS = 500_000  # iterations of the loop in one measurement: some tens of milliseconds


@dataclass(frozen=True)
class Placement:
    """Threads of this rank and the core of each; no cores: the system places them. communication: the core of the thread that
    calls MPI, where one is left for it."""

    threads: int
    cpus: tuple[int, ...]
    communication: int | None = None


def threads_per_rank(ranks_on_node: int, environ: Mapping[str, str], affinity: Iterable[int],
                     quota: float | None = None, ranks_sharing: int | None = None) -> int:
    """Compute threads of one rank.

    OMP_NUM_THREADS decides if it is set. Otherwise the CPUs of this rank's mask are divided by the number of ranks that share
    it (`ranks_sharing`, all `ranks_on_node` if None), limited to this rank's part of a cgroup `quota` (in CPUs) that the whole
    node shares. At least 1. Raises ValueError for an OMP_NUM_THREADS that is not a positive number.
    """
    variable = environ.get("OMP_NUM_THREADS", "").strip()
    if variable:
        outermost = variable.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
        if not outermost.isdecimal() or int(outermost) < 1:
            raise ValueError(f"OMP_NUM_THREADS should be a positive number, it is {variable!r}; correct or unset it")
        return int(outermost)
    threads = len(set(affinity)) // (ranks_sharing or ranks_on_node)
    if quota is not None:
        threads = min(threads, int(quota / ranks_on_node))
    return max(1, threads)


def physical_cores(affinity: Iterable[int], root: str | os.PathLike = _CPUS) -> set[int]:
    """One CPU of the mask for each core; the whole mask if the system does not show which CPUs share a core."""
    cores: dict[str, int] = {}
    for cpu in sorted(set(affinity)):
        siblings = read_text(Path(root) / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu {cpu} alone"
        cores.setdefault(siblings, cpu)
    return set(cores.values())


def cpu_quota(proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
              root: str | os.PathLike = "/sys/fs/cgroup") -> float | None:
    """The smallest limit of this process's cgroup (version 1 or 2) and its ancestors, in CPUs; None without a limit."""
    folders = cgroup_folders("cpu", proc_cgroup, root)
    limits = (_limit_v2(folder) if version == 2 else _limit_v1(folder) for version, folder in folders)
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _limit_v1(folder: Path) -> float | None:
    quota, period = int(read_text(folder / "cpu.cfs_quota_us") or -1), int(read_text(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def numa_node(cpu: int, root: str | os.PathLike = _CPUS) -> int:
    """The NUMA node of a CPU; 0 if the system does not show it."""
    return next((int(p.name[4:]) for p in (Path(root) / f"cpu{cpu}").glob("node[0-9]*")), 0)


def compute_cores(mask: Iterable[int], root: str | os.PathLike = _CPUS) -> list[int]:
    """Cores to compute on, in NUMA order. NUMA nodes with less than half the CPUs of the largest are left out: on Fugaku the
    assistant cores are NUMA nodes of their own, with one or two CPUs each."""
    nodes = {cpu: numa_node(cpu, root) for cpu in physical_cores(mask, root)}
    size = Counter(nodes.values())
    return sorted((cpu for cpu in nodes if 2 * size[nodes[cpu]] >= max(size.values())), key=lambda cpu: (nodes[cpu], cpu))


def place(mask: Iterable[int], masks: Sequence[Iterable[int]], index: int, environ: Mapping[str, str], quota: float | None,
          affinity: str, root: str | os.PathLike = _CPUS, reserve: bool = False) -> Placement:
    """The placement of rank `index` of the node's ranks, whose masks are `masks`; ValueError as in `threads_per_rank`.

    affinity: "pin", "none", or "auto", which pins where the node's cores lie in several NUMA nodes. Nothing is pinned when there
    are more threads than cores, when masks overlap without being equal, or when the user has set OMP_PROC_BIND, OMP_PLACES or
    GOMP_CPU_AFFINITY. reserve: a rank of ENOUGH_CORES or more computes on one core less, which the thread that calls MPI gets;
    a number of threads that the user has set stays.
    """
    own, cores = set(mask), compute_cores(mask, root)
    sharers = [i for i, other in enumerate(masks) if not own.isdisjoint(other)]
    threads = threads_per_rank(len(masks), environ, cores, quota, len(sharers))
    cores_per_rank = len(cores) // len(sharers)
    if reserve and not environ.get("OMP_NUM_THREADS", "").strip() and threads == cores_per_rank >= ENOUGH_CORES:
        threads -= 1
    set_by_user = any(environ.get(name) for name in _PINNING_VARIABLES)
    domains = {numa_node(cpu, root) for other in masks for cpu in compute_cores(other, root)}
    pin = affinity == "pin" or affinity == "auto" and len(domains) > 1
    if not pin or set_by_user or threads > cores_per_rank or any(set(masks[i]) != own for i in sharers):
        return Placement(threads, ())
    first = sharers.index(index) * cores_per_rank
    own_cores = cores[first : first + cores_per_rank]
    return Placement(threads, tuple(own_cores[:threads]), own_cores[threads] if threads < cores_per_rank else None)


def apply_placement(placement: Placement, flush_denormals: bool) -> None:
    """Apply it to torch and the kernels, which share one pool of threads; the denormal mode is set in each thread."""
    torch.set_num_threads(placement.threads)
    if placement.cpus:
        kernels.pin_threads(list(placement.cpus))
    kernels.flush_denormals(flush_denormals)


def apply_to_communication(placement: Placement) -> None:
    """Called by the thread that calls MPI: it runs on its core, or on any of the mask, and computes alone."""
    torch.empty(2**20).zero_()  # torch sets a new thread's number of threads at its first parallel operation
    kernels.set_num_threads(1)  # otherwise OpenMP starts a second set of threads for it, on the cores of the first
    if placement.communication is not None:
        os.sched_setaffinity(0, {placement.communication})


def init(world: Comm, *, allocator: str = "tuned", thread_affinity: str = "auto", cpu_frequency: float | None = None,
         flush_denormals: bool = True, reserve_core: bool = False, nodes: Nodes | None = None) -> str:
    """Memory, threads, cores, clock and denormals of this rank, before its first large tensor; returns the log's line.

    reserve_core: leave a core to the thread that calls MPI. nodes: those of `world`, where they are known. Collective; ValueError
    on every rank for a clock that is not the one asked for.
    """
    mask = sorted(os.sched_getaffinity(0))
    memory_text = memory.tune(allocator)
    here = (nodes or find_nodes(world)).ranks
    masks = here.all_gather_object(mask)
    with everywhere():
        placement = place(mask, masks, here.rank, os.environ, cpu_quota(), thread_affinity, reserve=reserve_core)
        apply_placement(placement, flush_denormals)
        if isinstance(world, MPIComm):
            world.engine.call(lambda: apply_to_communication(placement))
        ghz = check_clock(cpu_frequency, placement.cpus or mask)
    library = describe(world) + ("" if placement.communication is None else f", communication on core {placement.communication}")
    return machine_summary(library, len(mask), here.size, placement.threads, bool(placement.cpus), memory_text, ghz)


class ExitTimer:
    """--exit-duration-in-mins: `expired` once that many minutes have passed since the timer was created; never if None."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None and minutes <= 0:
            raise ValueError(f"--exit-duration-in-mins must be above 0, got {minutes}")
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    @property
    def expired(self) -> bool:
        return self._end is not None and self._clock() >= self._end


def cpu_model(cpuinfo: str | None = None) -> str:
    """The CPU's name (`cpuinfo`: the text of /proc/cpuinfo)."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(\S.*)$", text, re.MULTILINE))
    if "model name" in fields:
        return fields["model name"].strip()
    if "CPU implementer" in fields and "CPU part" in fields:
        ids = int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
        return _ARM_CPUS.get(ids, f"Arm CPU, implementer {ids[0]:#x} part {ids[1]:#x}")
    return platform.machine()


def clock_ghz(steps: int = 1_000_000) -> float:
    """The clock of this core in GHz: a chain of dependent additions, one cycle each, the best of three."""
    return max(_chain_ghz(steps) for _ in range(3))


def _chain_ghz(steps: int) -> float:
    begin = time.perf_counter()
    kernels.bench_clock(steps)
    return steps / (time.perf_counter() - begin) / 1e9


def fma_gflops(steps: int = STEPS) -> float:
    """GFLOP/s of one run of the loop, multiply and add counted separately."""
    start = time.perf_counter()
    flops = kernels.bench_fma(steps)
    return flops / (time.perf_counter() - start) / 1e9


def fma_peak_gflops(rounds: int, steps: int = STEPS) -> float:
    """The best of `rounds` runs in GFLOP/s; the first run wakes the threads and the clock."""
    return max(fma_gflops(steps) for _ in range(rounds))


def set_clock(ghz: float, cpus: Iterable[int], root: str | os.PathLike = "/sys/devices/system/cpu") -> bool:
    """Hold the CPUs at a clock in GHz through Linux's cpufreq. False where the system has none or denies writing to it."""
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


def check_clock(requested: float | None, cpus: Iterable[int], measured: float | None = None) -> float:
    """The measured clock in GHz, after setting it to `requested` (--cpu-frequency) where the system permits that.

    Raises ValueError when it differs from `requested` by more than the part CLOCK_TOLERANCE.
    """
    if requested is not None:
        set_clock(requested, cpus)
    measured = clock_ghz() if measured is None else measured
    if requested is not None and abs(measured / requested - 1) > CLOCK_TOLERANCE:
        raise ValueError(f"--cpu-frequency {requested:g}: this core runs at {measured:.2f} GHz: ask the job for that clock "
                         f"(freq={round(requested * 1000)},eco_state=0 on Fugaku), or pass --cpu-frequency {measured:.1f}")
    return measured


def machine_summary(mpi_library: str, cpus: int, ranks_on_node: int, threads: int, pinned: bool, allocator: str,
                    ghz: float) -> str:
    """One line: what this node is and how the run uses it. cpus: number of CPUs in this rank's mask."""
    gib = psutil.virtual_memory().total / (1 << 30)
    return (f"{platform.node()}: {cpu_model()} at {ghz:.2f} GHz (measured), {cpus} of {os.cpu_count()} CPUs in this rank's mask,"
            f" {gib:.1f} GiB, {ranks_on_node} ranks x {threads} {'pinned ' if pinned else ''}threads, allocator {allocator},"
            f" torch {torch.__version__}, MPI {' '.join(mpi_library.split())}")
