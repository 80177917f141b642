"""The process and its machine: requests to stop, time limit, denormals, threads per rank, allocator, a summary line.

Left out: the allocator's tuning and the kernels' worker threads. Test: pytest tests/test_runtime.py
"""

from __future__ import annotations

import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType

import psutil
import torch

from .comm.base import Comm

# SIGUSR1 is what Slurm sends ahead of the time limit when a job asks for it (--signal=USR1@300)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

# library in /proc/self/maps -> allocator. libmpg, Fujitsu's with large pages, is last: a preload takes malloc from it
_ALLOCATORS = {"tcmalloc": "tcmalloc", "jemalloc": "jemalloc", "mimalloc": "mimalloc", "mpg": "libmpg"}

# (CPU implementer, CPU part) of /proc/cpuinfo on AArch64, which gives no model name there
_ARM_CPUS = {
    (0x46, 0x001): "Fujitsu A64FX",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4F): "Arm Neoverse V2",
}


class StopSignals:
    """While entered, a first signal only sets `stop_requested`, so the trainer can save and leave; a second ends it.

    Ranks do not get a signal at the same moment: decide by `any_rank(comm, signals.stop_requested)`. Outside the main
    thread, where Python allows no handlers, nothing is installed.
    """

    def __init__(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        self._previous: dict[int, object] = {}

    @property
    def stop_requested(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self.signals}
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


class ExitTimer:
    """--exit-duration-in-mins: `expired` once that many minutes have passed since it was made; never if None."""

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        if minutes is not None and minutes <= 0:
            raise ValueError(f"--exit-duration-in-mins must be above 0, got {minutes}")
        self._clock = clock
        self._end = None if minutes is None else clock() + 60 * minutes

    @property
    def expired(self) -> bool:
        return self._end is not None and self._clock() >= self._end


def any_rank(comm: Comm, flag: bool) -> bool:
    """Whether `flag` is set on any rank; the same answer on all. Collective."""
    return bool(comm.all_reduce(torch.tensor([int(flag)], dtype=torch.int32), op="max").item())


def flush_denormals() -> bool:
    """Let the calling thread take denormal numbers, which are slow, as zero. False if the CPU cannot.

    The mode belongs to a thread: worker threads must set it for themselves.
    """
    return torch.set_flush_denormal(True)


def threads_per_rank(ranks_on_node: int, environ: Mapping[str, str], affinity: Iterable[int],
                     quota: float | None = None, ranks_sharing: int | None = None) -> int:
    """Compute threads of one rank.

    OMP_NUM_THREADS decides if it is set. Otherwise the CPUs of this rank's mask over the ranks that share it
    (`ranks_sharing`, all `ranks_on_node` if None), and no more than this rank's part of a cgroup `quota` (in CPUs)
    that the whole node shares. At least 1. Raises ValueError for an OMP_NUM_THREADS that is no positive number.
    """
    given = environ.get("OMP_NUM_THREADS", "").strip()
    if given:
        outermost = given.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
        if not outermost.isdecimal() or int(outermost) < 1:
            raise ValueError(f"OMP_NUM_THREADS should be a positive number, it is {given!r}; correct or unset it")
        return int(outermost)
    threads = len(set(affinity)) // (ranks_sharing or ranks_on_node)
    if quota is not None:
        threads = min(threads, int(quota / ranks_on_node))
    return max(1, threads)


def ranks_sharing(mask: Iterable[int], masks: Iterable[Iterable[int]]) -> int:
    """How many of the node's ranks (`masks`: theirs, with this one's) may run on a CPU of `mask`: 1 if bound apart."""
    mine = set(mask)
    return sum(not mine.isdisjoint(other) for other in masks)


def physical_cores(affinity: Iterable[int], root: str | os.PathLike = "/sys/devices/system/cpu") -> set[int]:
    """One CPU of the mask for each core, without its hardware threads; the whole mask if the kernel does not say."""
    cores: dict[str, int] = {}
    for cpu in sorted(set(affinity)):
        siblings = _read(Path(root) / f"cpu{cpu}" / "topology" / "thread_siblings_list") or f"cpu {cpu} alone"
        cores.setdefault(siblings, cpu)
    return set(cores.values())


def cpu_quota(proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
              root: str | os.PathLike = "/sys/fs/cgroup") -> float | None:
    """The tightest limit of this process's cgroup (version 1 or 2) and its ancestors, in CPUs; None if none."""
    limits = []
    for line in (_read(Path(proc_cgroup)) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += [_limit_v2(folder) for folder in _ancestors(Path(root), path)]
        elif "cpu" in controllers.split(","):
            mounts = [Path(root) / name for name in (controllers, "cpu")]  # "cpu,cpuacct", or a link to it
            limits += [_limit_v1(folder) for mount in mounts for folder in _ancestors(mount, path)]
    return min((limit for limit in limits if limit is not None), default=None)


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


def allocator_name(maps: str | None = None) -> str:
    """The malloc in use, judged by the libraries loaded (`maps`: text of /proc/self/maps): "tcmalloc", "glibc 2.28" ...

    A library that was opened late, instead of preloaded, is loaded too and does not serve malloc: this cannot tell
    the two apart.
    """
    text = (_read(Path("/proc/self/maps")) or "") if maps is None else maps
    loaded = {match[1] for match in re.finditer(r"/lib([a-z]+)[^/\s]*\.so[^/\s]*$", text, re.MULTILINE)}
    for library, name in _ALLOCATORS.items():
        if library in loaded:
            return name
    return " ".join(filter(None, platform.libc_ver())) or "unknown"


def cpu_model(cpuinfo: str | None = None) -> str:
    """The CPU's name (`cpuinfo`: the text of /proc/cpuinfo)."""
    text = (_read(Path("/proc/cpuinfo")) or "") if cpuinfo is None else cpuinfo
    fields = dict(re.findall(r"^([^\t:]+?)\s*:\s*(\S.*)$", text, re.MULTILINE))
    if "model name" in fields:
        return fields["model name"].strip()
    if "CPU implementer" in fields and "CPU part" in fields:
        ids = int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
        return _ARM_CPUS.get(ids, f"Arm CPU, implementer {ids[0]:#x} part {ids[1]:#x}")
    return platform.machine()


def machine_summary(mpi_library: str, ranks_on_node: int, threads: int) -> str:
    """One line: what this node is and how the run uses it."""
    affinity = os.sched_getaffinity(0)
    gib = psutil.virtual_memory().total / (1 << 30)
    return (f"{platform.node()}: {cpu_model()}, {len(affinity)} of {os.cpu_count()} CPUs in this rank's mask,"
            f" {gib:.1f} GiB, {ranks_on_node} ranks x {threads} threads, allocator {allocator_name()},"
            f" torch {torch.__version__},"
            f" MPI {' '.join(mpi_library.split())}")
