"""The memory of a rank: how it is allocated, what the process holds, and what its node or job has left.

An arena keeps its pages for torch's large tensors, and malloc has tuned parameters for the rest. glibc returns every block of more
than 32 MiB (and, at first, of more than 128 KiB) to the kernel when it is freed, and the next micro-batch faults the same pages in
again. A preloaded tcmalloc avoids that, and so does this module without a preload. An allocator that the user preloads is not
changed. Left out: the arena itself (kernels_sve/arena.h), what a run will need (`observe.memory`). Comparison of allocators:
python -m benchmarks alloc
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import kernels

# library in /proc/self/maps -> allocator. libmpg (Fujitsu's large pages) is last: a preloaded library replaces its malloc
_LIBRARIES = {
    "tcmalloc": "tcmalloc",
    "jemalloc": "jemalloc",
    "mimalloc": "mimalloc",
    "mpg": "libmpg",
}
_MAPS = Path("/proc/self/maps")

# malloc.h: parameter -> value. The heap grows by 16 MiB at a time and shrinks only when 1 GiB of its top is free
_MALLOPT = {
    "M_TRIM_THRESHOLD": (-1, 1 << 30),
    "M_TOP_PAD": (-2, 16 << 20),
    "M_MMAP_THRESHOLD": (-3, 32 << 20),
}
RESERVED_PER_RAM = (
    2  # reserved addresses cost no memory; twice the installed memory allows for fragmentation
)
_FIELD = re.compile(rb"^(VmRSS|RssFile|RssShmem|HugetlbPages):\s+(\d+) kB", re.MULTILINE)
_FILES = {
    2: (
        "memory.max",
        "memory.current",
        "inactive_file",
    ),  # by version: limit, use, what part of the use can be reclaimed
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def allocator_name(maps: str | None = None) -> str:
    """The allocator in use, judged by the loaded libraries (`maps`: text of /proc/self/maps): "tcmalloc", "glibc 2.28" ...

    A library that was opened later, instead of preloaded, does not serve malloc but is in the list too: this function cannot
    distinguish the two.
    """
    text = (read_text(_MAPS) or "") if maps is None else maps
    loaded = {
        match[1] for match in re.finditer(r"/lib([a-z]+)[^/\s]*\.so[^/\s]*$", text, re.MULTILINE)
    }
    for library, name in _LIBRARIES.items():
        if library in loaded:
            return name
    return " ".join(filter(None, platform.libc_ver())) or "unknown"


def tune(mode: str) -> str:
    """Set up the memory of this process before its first large tensor; returns a description for the log.

    mode: "tuned", or "stock", which changes nothing. If the allocator is not glibc's, the user has chosen it by LD_PRELOAD or by
    linking, and both modes leave it unchanged.
    """
    name = allocator_name()
    if name in _LIBRARIES.values():
        return f"{name} (preloaded: --allocator tuned is off)" if mode == "tuned" else name
    if mode == "stock":
        return f"{name}, stock"
    _mallopt(*_MALLOPT.values())
    if not kernels.use_arena(RESERVED_PER_RAM * psutil.virtual_memory().total):
        return f"{name}, heap tuned; the system refused the address space of the tensor arena (see ulimit -v)"
    return f"{name}, tuned: tensors in an arena that keeps its pages{_large_pages()}"


def return_large_blocks() -> None:
    """Return every block of more than 1 MiB to the system as soon as it is freed: for work of which the peak counts, not the speed.

    Without it glibc keeps up to 64 MiB of freed tensors at the top of its heap.
    """
    _mallopt((_MALLOPT["M_MMAP_THRESHOLD"][0], 1 << 20))


def _mallopt(*values: tuple[int, int]) -> None:
    """Set parameters of malloc to values."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in values:
            mallopt(parameter, value)


def trim() -> None:
    """Return the heap's freed memory to the system, such as the tokenizer's after start-up (20 MiB)."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim:
        malloc_trim(0)


def _large_pages() -> str:
    """The system's huge pages, for the log; Fujitsu's XOS has its own, which variables configure."""
    xos = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("XOS_MMM_L_")
    ]
    try:
        choice = re.search(
            r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        )
    except OSError:
        choice = None
    pages = [f"transparent huge pages {choice[1]}"] if choice else []
    return "".join(f", {text}" for text in pages + xos)


def page_faults() -> tuple[int, float]:
    """(minor page faults, seconds of system time) of this process since its start."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_stime


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


def node_bytes(
    proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> int:
    """What the processes of this node or job may hold in all: the machine's memory, or a control group's limit if that is less."""
    limits = [
        _number(folder / _FILES[version][0])
        for version, folder in cgroup_folders("memory", proc_cgroup, root)
    ]
    return min([psutil.virtual_memory().total, *(n for n in limits if n is not None)])


def free_bytes(
    proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> int:
    """What the processes of this node or job may still take: of the machine, or of a control group's limit if that is less."""
    left = [
        _left(folder, *_FILES[version])
        for version, folder in cgroup_folders("memory", proc_cgroup, root)
    ]
    return min([psutil.virtual_memory().available, *(n for n in left if n is not None)])


def cgroup_folders(
    controller: str,
    proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
    root: str | os.PathLike = "/sys/fs/cgroup",
) -> list[tuple[int, Path]]:
    """The directories that may limit this process: (version, 1 or 2, of the cgroup, its directory or that of an ancestor)."""
    folders: list[tuple[int, Path]] = []
    for line in (read_text(Path(proc_cgroup)) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folders += [(2, folder) for folder in _ancestors(Path(root), path)]
        elif controller in controllers.split(","):
            mounts = [
                Path(root) / name for name in (controllers, controller)
            ]  # "cpu,cpuacct", or a link to it
            folders += [(1, folder) for mount in mounts for folder in _ancestors(mount, path)]
    return folders


def _ancestors(mount: Path, path: str) -> list[Path]:
    """The cgroup's directory and those above it. In a container the path may be the host's: only the mount exists."""
    folder = Path(path.lstrip("/"))
    return [mount / part for part in (folder, *folder.parents)]


def read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _left(folder: Path, limit: str, used: str, reclaimable: str) -> int | None:
    """Bytes below the limit of one control group; None where it has none."""
    most = _number(folder / limit)
    now = _number(folder / used)
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
    with contextlib.suppress(
        OSError
    ):  # Linux, where ru_maxrss includes what the parent process held before exec
        if peak := re.search(
            r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE
        ):
            return int(peak[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 << 20 if sys.platform == "darwin" else 1 << 10
    )
