"""What a node is: its CPU, NUMA domains, memory, huge pages, limits and compilers, from files that any user may read.

Left out: what is measured by running something, except the compilers' names (rates.py).
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psutil
import torch

from ..host import allocator, kernels, runtime
from ..host.allocator import read_text
from ..host.energy import Counters
from ..host.topology import Node, cpu_quota

FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "asimd", "sve", "sve2", "bf16", "svebf16", "i8mm",
            "hypervisor")
COMPILERS = ("gcc", "g++", "clang++", "FCC", "icpx", "mpicc")
SECONDS = 5  # for a compiler to say its version


def facts(root: Path = Path("/")) -> dict[str, Any]:
    """Of this node, without names. root: of another file system, for tests."""
    mask, node = os.sched_getaffinity(0), Node.read(root)
    cpus, cpuinfo = root / "sys/devices/system/cpu", read_text(root / "proc/cpuinfo") or ""
    flags = set(re.findall(r"\w+", " ".join(re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)[:1])))
    return {
        "cpu": runtime.cpu_model(cpuinfo), "architecture": platform.machine(), "cpus": os.cpu_count(), "allowed_cpus": len(mask),
        "cores": len(node.cores(mask)), "topology": node.describe(), "features": [name for name in FEATURES if name in flags],
        "domains": [{"cores": len(d.cores), "allowed": len(node.parts(mask).get(d.number, ())), "gib": d.memory_gib}
                    for d in node.domains],
        "caches": caches(cpus), "quota_cpus": cpu_quota(), "energy": Counters.find(str(root)).describe(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "job_memory_gib": allocator.node_bytes() / 2**30, "free_gib": allocator.free_bytes() / 2**30,
        "governor": read_text(cpus / "cpu0/cpufreq/scaling_governor"), "nominal_ghz": nominal_ghz(cpus),
        "load": os.getloadavg()[0], "huge_pages": huge_pages(root),
        "numa_balancing": read_text(root / "proc/sys/kernel/numa_balancing"), "kernel": platform.release().split("-")[0],
        "libc": " ".join(platform.libc_ver()), "allocator": allocator.allocator_name(), "python": platform.python_version(),
        "torch": torch.__version__, "target": kernels.active(), "targets": kernels.runnable_targets(), "compilers": compilers(),
    }


def caches(cpus: Path) -> list[str]:
    """Of CPU 0: "L1 Data 32K" ..."""
    folders = sorted((cpus / "cpu0/cache").glob("index[0-9]*"))
    return [" ".join([f"L{read_text(f / 'level')}", read_text(f / "type") or "", read_text(f / "size") or ""]) for f in folders]


def nominal_ghz(cpus: Path) -> float | None:
    """The highest clock that the system says CPU 0 has; None where it does not say."""
    kilohertz = read_text(cpus / "cpu0/cpufreq/cpuinfo_max_freq")
    if kilohertz and kilohertz.isdecimal():
        return int(kilohertz) / 1e6
    try:
        return (psutil.cpu_freq().max or psutil.cpu_freq().current) / 1e3 or None
    except (AttributeError, NotImplementedError, OSError):
        return None


def huge_pages(root: Path = Path("/")) -> dict[str, Any]:
    """The setting of transparent huge pages, and the reserved pages of each size."""
    choice = re.search(r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    pools = sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*"))
    reserved = {pool.name.removeprefix("hugepages-"): int(read_text(pool / "nr_hugepages") or 0) for pool in pools}
    xos = {name: value for name, value in sorted(os.environ.items()) if name.startswith("XOS_MMM_L_")}
    return {"transparent": choice[1] if choice else None, "reserved": reserved, "xos": xos}


def compilers() -> dict[str, str]:
    """Compiler -> the first line of its version, of those on the PATH."""
    found = {}
    for name in COMPILERS:
        if shutil.which(name) is None:
            continue
        try:
            done = subprocess.run([name, "--version"], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError):
            continue
        found[name] = next(iter((done.stdout or done.stderr).splitlines()), "no version")
    return found
