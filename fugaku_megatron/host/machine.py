"""The machine: facts that any user may read, and its measured limits."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import psutil
import torch

from ..text.named_files import JsonObject
from . import allocator, kernels
from .cgroup import cpu_quota, read_text
from .cpu_binding import CpuBinding
from .energy import Counters
from .timing import best_seconds, seconds
from .topology import Node

# (CPU implementer, CPU part) of /proc/cpuinfo on AArch64, which has no model name
_ARM_CPUS = {
    (0x46, 0x001): "Fujitsu A64FX",
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4F): "Arm Neoverse V2",
}
STEPS = 500_000  # iterations of the FMA loop: some tens of milliseconds
TRIAD_ROUNDS = 5
FEATURES = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "asimd",
    "sve",
    "sve2",
    "bf16",
    "svebf16",
    "i8mm",
    "hypervisor",
)
COMPILERS = ("gcc", "g++", "clang++", "FCC", "icpx", "mpicc")
SECONDS = 5  # for a compiler to say its version


def facts(root: Path = Path("/")) -> JsonObject:
    """Return hardware, limits and software of this node: memory in GiB, clock in GHz."""
    mask = os.sched_getaffinity(0)
    node = Node.read(root)
    cpus = root / "sys/devices/system/cpu"
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    features = flags[1].split() if flags else []
    return {
        "cpu": cpu_model(cpuinfo),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "allowed_cpus": len(mask),
        "cores": len(node.cores(mask)),
        "topology": node.describe(),
        "features": [name for name in FEATURES if name in features],
        "domains": [
            {
                "cores": len(d.cores),
                "allowed": len(node.parts(mask).get(d.number, ())),
                "gib": d.memory_gib,
            }
            for d in node.domains
        ],
        "caches": caches(cpus),
        "quota_cpus": cpu_quota(),
        "energy": Counters.find(str(root)).describe(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "job_memory_gib": allocator.node_bytes() / 2**30,
        "free_gib": allocator.free_bytes() / 2**30,
        "governor": read_text(cpus / "cpu0/cpufreq/scaling_governor"),
        "nominal_ghz": nominal_ghz(cpus),
        "load": os.getloadavg()[0],
        "huge_pages": allocator.huge_pages(root),
        "numa_balancing": read_text(root / "proc/sys/kernel/numa_balancing"),
        "kernel": platform.release().split("-")[0],
        "libc": " ".join(platform.libc_ver()),
        "allocator": allocator.allocator_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "target": kernels.active(),
        "targets": kernels.runnable_targets(),
        "compilers": compilers(),
    }


def caches(cpus: Path) -> list[str]:
    """Return CPU 0's caches: "L1 Data 32K" ..."""
    folders = sorted((cpus / "cpu0/cache").glob("index[0-9]*"))
    return [
        f"L{read_text(f / 'level')} {read_text(f / 'type') or ''} {read_text(f / 'size') or ''}"
        for f in folders
    ]


def nominal_ghz(cpus: Path) -> float | None:
    kilohertz = read_text(cpus / "cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz and kilohertz.isdecimal():
        return int(kilohertz) / 1e6
    try:
        return (psutil.cpu_freq().max or psutil.cpu_freq().current) / 1e3 or None
    except (AttributeError, NotImplementedError, OSError):
        return None


def compilers() -> dict[str, str]:
    """Return the first line of --version by compiler; omit compilers that fail to run."""
    found = {}
    for name in COMPILERS:
        if shutil.which(name) is None:
            continue
        try:
            done = subprocess.run(
                [name, "--version"],
                capture_output=True,
                text=True,
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        found[name] = next(iter((done.stdout or done.stderr).splitlines()), "no version")
    return found


def cpu_model(cpuinfo: str | None = None) -> str:
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    found: list[tuple[str, str]] = re.findall(r"^([^\t:]+?)\s*:\s*(\S.*)$", text, re.MULTILINE)
    fields = dict(found)
    if "model name" in fields:
        return fields["model name"].strip()
    if "CPU implementer" in fields and "CPU part" in fields:
        ids = int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
        return _ARM_CPUS.get(ids, f"Arm CPU, implementer {ids[0]:#x} part {ids[1]:#x}")
    return platform.machine()


def measured_name(threads: int) -> str:
    return f"{cpu_model()}, {threads} threads, measured {time.strftime('%Y-%m-%d')}"


def clock_ghz(steps: int = 1_000_000) -> float:
    """Measure this core's clock by dependent additions, one cycle each; the best result of three."""
    return steps / min(seconds(lambda: kernels.bench_clock(steps)) for _ in range(3)) / 1e9


def triad_gbs(elements: int) -> float:
    """Measure STREAM's triad over vectors of FP32 elements."""
    x, y, out = (torch.ones(elements) for _ in range(3))
    best = best_seconds([lambda: kernels.bench_triad(out, x, y, 2.0)], TRIAD_ROUNDS)
    return 12 * elements / best / 1e9


def fma_gflops(steps: int = STEPS, int8: bool = False) -> float:
    """Run the FMA loop; return GFLOP/s, multiply and add counted separately. int8: of INT8 matmuls, in Gop/s."""
    start = time.perf_counter()
    flops: float = kernels.bench_fma(steps, int8)
    return flops / (time.perf_counter() - start) / 1e9


def fma_peak_gflops(rounds: int, steps: int = STEPS, int8: bool = False) -> float:
    """Return the best `fma_gflops` of `rounds`; the first run raises the clock."""
    return max(fma_gflops(steps, int8) for _ in range(rounds))


def summary(
    mpi_library: str,
    cpus: int,
    ranks_on_node: int,
    binding: CpuBinding,
    memory: str,
    ghz: float,
    energy: str = "no energy counter",
) -> str:
    """Return the log's line on this rank's node. ghz: measured; memory, energy: in words"""
    gib = psutil.virtual_memory().total / (1 << 30)
    threads = f"{binding.threads} pinned" if binding.cpus else f"{binding.threads}"
    return (
        f"{platform.node()}: {cpu_model()} at {ghz:.2f} GHz (measured), {cpus} of {os.cpu_count()} CPUs in this rank's mask,"
        f" {gib:.1f} GiB, {ranks_on_node} ranks x {threads} threads, allocator {memory},"
        f" {energy}, torch {torch.__version__}, MPI {' '.join(mpi_library.split())}"
    )
