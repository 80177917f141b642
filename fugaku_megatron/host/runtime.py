"""The process and its machine: what a command sets up for all of it, requests to stop, time limit, clock, a summary line.

Left out: threads and cores (placement.py), memory (allocator.py).
"""

from __future__ import annotations

import os
import platform
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType

import psutil
import torch

from ..comm import interrupt
from ..comm.agreement import Nodes, everywhere, find_nodes
from ..comm.base import Comm
from ..comm.launch import describe
from ..comm.mpi import MPIComm
from . import allocator as memory
from . import kernels, placement

STOP_SIGNALS = (*interrupt.STOPS, signal.SIGINT)

CLOCK_TOLERANCE = 0.03  # A64FX's clocks are 10 % apart; the measurement's spread is below 1 %

# (CPU implementer, CPU part) of /proc/cpuinfo on AArch64, which has no model name
_ARM_CPUS = {
    (0x46, 0x001): "Fujitsu A64FX",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4F): "Arm Neoverse V2",
}


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
        place = placement.place(mask, masks, here.rank, os.environ, placement.cpu_quota(), thread_affinity, reserve=reserve_core)
        placement.apply(place, flush_denormals)
        if isinstance(world, MPIComm):
            world.engine.call(lambda: placement.apply_to_communication(place))
        ghz = check_clock(cpu_frequency, place.cpus or mask)
    library = describe(world) + ("" if place.communication is None else f", communication on core {place.communication}")
    return machine_summary(library, len(mask), here.size, place.threads, bool(place.cpus), memory_text, ghz)


class StopSignals:
    """Inside the block a first signal only sets `stop_requested`, so that the trainer can save and exit; a second ends it.

    Ranks do not receive a signal at the same moment, so they must decide together. Outside the main thread, where Python
    allows no handlers, nothing is installed. A signal that came while the process started counts as the first.
    """

    def __init__(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
        self._previous: dict[int, interrupt.Handler] = {}

    @property
    def stop_requested(self) -> bool:
        return self.received is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self.signals}
            self.received = self.received or interrupt.kept_stop(self._previous.values())
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
