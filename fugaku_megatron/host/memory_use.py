"""What memory this process holds, and what its node or job has and has left. Linux; elsewhere less is known.

Left out: the peak (`logs.metrics`), what a run will need (`training.memory_watch`).
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from .placement import cgroup_folders

_FIELD = re.compile(rb"^(VmRSS|RssFile|RssShmem|HugetlbPages):\s+(\d+) kB", re.MULTILINE)
_FILES = {2: ("memory.max", "memory.current", "inactive_file"),  # by version: limit, use, what part of the use can be reclaimed
          1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}


@dataclass(frozen=True)
class Usage:
    """Bytes. resident: all that the process has in memory, large pages included. shared: of that, what other processes map as
    well: MPI's and this program's windows between the ranks of a node. held: resident without pages of files, which the system
    takes back.
    """

    resident: int
    shared: int
    held: int


def usage(status: str | os.PathLike = "/proc/self/status") -> Usage:
    """Of this process now."""
    try:
        fields = {name: int(kib) * 1024 for name, kib in _FIELD.findall(Path(status).read_bytes())}
    except OSError:
        resident = psutil.Process().memory_info().rss
        return Usage(resident, 0, resident)
    resident = fields.get(b"VmRSS", 0) + fields.get(b"HugetlbPages", 0)
    return Usage(resident, fields.get(b"RssShmem", 0), resident - fields.get(b"RssFile", 0))


def node_bytes(proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup") -> int:
    """What the processes of this node or job may hold in all: the machine's memory, or a control group's limit if that is less."""
    limits = [_number(folder / _FILES[version][0]) for version, folder in cgroup_folders("memory", proc_cgroup, root)]
    return min([psutil.virtual_memory().total, *(n for n in limits if n is not None)])


def free_bytes(proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup") -> int:
    """What the processes of this node or job may still take: of the machine, or of a control group's limit if that is less."""
    left = [_left(folder, *_FILES[version]) for version, folder in cgroup_folders("memory", proc_cgroup, root)]
    return min([psutil.virtual_memory().available, *(n for n in left if n is not None)])


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """Bytes below the limit of one control group; None where it has none."""
    most, now = _number(folder / limit), _number(folder / used)
    if most is None or now is None:
        return None
    stat = re.search(rf"^{reclaimable} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
    return max(0, most - now + (int(stat[1]) if stat else 0))


def _number(file: Path) -> int | None:
    """The number that a control group's file holds; None where it is absent or says "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def peak_memory_mib() -> float:
    """The largest resident memory of this process so far, MiB."""
    with contextlib.suppress(OSError):  # Linux, where ru_maxrss includes what the parent process held before exec
        if peak := re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE):
            return int(peak[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
