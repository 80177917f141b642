"""Where a rank's threads run: how many threads, on which cores, each pinned to one; denormals are flushed in each.

A rank may be bound by its launcher (numactl, Fujitsu's mpiexec, srun), or share its mask with the other ranks of the node. In the
second case the cores are distributed in NUMA order, so that a rank's memory, which its own threads touch first, is near them.
Left out: memory itself (allocator.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import kernels

_CPUS = "/sys/devices/system/cpu"
ENOUGH_CORES = 24  # of a rank, from which on a core for communication costs less than its interruptions
_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


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
    """One CPU of the mask for each core; the whole mask if the system does not tell which CPUs share a core."""
    cores: dict[str, int] = {}
    for cpu in sorted(set(affinity)):
        siblings = _read(Path(root) / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu {cpu} alone"
        cores.setdefault(siblings, cpu)
    return set(cores.values())


def cpu_quota(proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
              root: str | os.PathLike = "/sys/fs/cgroup") -> float | None:
    """The smallest limit of this process's cgroup (version 1 or 2) and its ancestors, in CPUs; None without a limit."""
    folders = cgroup_folders("cpu", proc_cgroup, root)
    limits = (_limit_v2(folder) if version == 2 else _limit_v1(folder) for version, folder in folders)
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_folders(controller: str, proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
                   root: str | os.PathLike = "/sys/fs/cgroup") -> list[tuple[int, Path]]:
    """The directories that may limit this process: (version, 1 or 2, of the cgroup, its directory or that of an ancestor)."""
    folders: list[tuple[int, Path]] = []
    for line in (_read(Path(proc_cgroup)) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders += [(2, folder) for folder in _ancestors(Path(root), path)]
        elif controller in controllers.split(","):
            mounts = [Path(root) / name for name in (controllers, controller)]  # "cpu,cpuacct", or a link to it
            folders += [(1, folder) for mount in mounts for folder in _ancestors(mount, path)]
    return folders


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's directory and those above it. In a container the path may be the host's: only the mount exists."""
    folder = Path(path.lstrip("/"))
    return [mount / part for part in (folder, *folder.parents)]


def _limit_v2(folder: Path) -> float | None:
    words = (_read(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _limit_v1(folder: Path) -> float | None:
    quota, period = int(_read(folder / "cpu.cfs_quota_us") or -1), int(_read(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def numa_node(cpu: int, root: str | os.PathLike = _CPUS) -> int:
    """The NUMA node of a CPU; 0 if the system does not tell."""
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


def apply(placement: Placement, flush_denormals: bool) -> None:
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
