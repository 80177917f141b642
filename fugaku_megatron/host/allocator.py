"""Memory of a rank: allocator settings, the process's use, and the memory left on its node or in its
job.

An arena (kernels_sve/arena/arena.h) keeps its pages for torch's large tensors, and malloc is tuned for
the rest: glibc returns freed blocks above 32 MiB to the kernel, and the next micro-batch faults
their pages in again.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

from ..text.named_files import JsonObject, StrPath
from . import cgroup, kernels
from .cgroup import read_text

# Library in /proc/self/maps -> allocator. A preloaded library replaces the malloc of libmpg (Fujitsu's large pages), so it is last.
_LIBRARIES = {
    "tcmalloc": "tcmalloc",
    "jemalloc": "jemalloc",
    "mimalloc": "mimalloc",
    "mpg": "libmpg",
}
_MAPS = Path("/proc/self/maps")

# malloc.h: (parameter, value). The heap grows by 16 MiB and shrinks when 1 GiB at its top is free.
_MALLOPT = {
    "M_TRIM_THRESHOLD": (-1, 1 << 30),
    "M_TOP_PAD": (-2, 16 << 20),
    "M_MMAP_THRESHOLD": (-3, 32 << 20),
}
RESERVED_PER_RAM = 2  # address space of the arena over installed memory; allows for fragmentation
_FIELD = re.compile(rb"^(VmRSS|RssFile|RssShmem|HugetlbPages):\s+(\d+) kB", re.MULTILINE)


def allocator_name(maps: str | None = None) -> str:
    text = (read_text(_MAPS) or "") if maps is None else maps
    loaded = {
        match[1] for match in re.finditer(r"/lib([a-z]+)[^/\s]*\.so[^/\s]*$", text, re.MULTILINE)
    }
    for library, name in _LIBRARIES.items():
        if library in loaded:
            return name
    return " ".join(filter(None, platform.libc_ver())) or "unknown"


def tune(mode: str) -> str:
    """Set up memory before the first large tensor; return a description for the log.

    mode: "tuned" or "stock" (no change). An allocator other than glibc's is never changed.
    """
    name = allocator_name()
    if name in _LIBRARIES.values():
        return f"{name} (preloaded: --allocator tuned is off)" if mode == "tuned" else name
    if mode == "stock":
        return f"{name}, stock"
    _mallopt(*_MALLOPT.values())
    if reason := kernels.use_arena(RESERVED_PER_RAM * psutil.virtual_memory().total):
        return f"{name}, heap tuned; no tensor arena: {reason}"
    pages = huge_pages()
    words = [f"{name}, tuned: tensors in an arena that keeps its pages"]
    if pages["transparent"]:
        words.append(f"transparent huge pages {pages['transparent']}")
    return ", ".join(words + [f"{variable}={value}" for variable, value in pages["xos"].items()])


def return_large_blocks() -> None:
    """Let malloc return freed blocks above 1 MiB at once: a lower peak costs speed. glibc keeps up to 64 MiB."""
    _mallopt((_MALLOPT["M_MMAP_THRESHOLD"][0], 1 << 20))


def _mallopt(*values: tuple[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
    if mallopt is not None:
        for parameter, value in values:
            mallopt(parameter, value)


def trim() -> None:
    """Return the heap's freed memory to the system, for example the tokenizer's (20 MiB)."""
    gc.collect()
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim:
        malloc_trim(0)


def huge_pages(root: Path = Path("/")) -> JsonObject:
    """Return transparent huge pages, reserved pages by size, and the variables of Fujitsu's XOS."""
    choice = re.search(
        r"\[(\w+)\]", read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    )
    pools = sorted((root / "sys/kernel/mm/hugepages").glob("hugepages-*"))
    reserved = {
        pool.name.removeprefix("hugepages-"): int(read_text(pool / "nr_hugepages") or 0)
        for pool in pools
    }
    xos = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith("XOS_MMM_L_")
    }
    return {"transparent": choice[1] if choice else None, "reserved": reserved, "xos": xos}


def page_faults() -> tuple[int, float]:
    """Return (minor page faults, seconds of system time) in this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_stime


@dataclass(frozen=True)
class Usage:
    """A process's memory, bytes.

    resident: large pages included
    shared: resident memory mapped by other processes as well (MPI windows)
    held: without file pages, which the system can reclaim
    """

    resident: int
    shared: int
    held: int


def usage(status: StrPath = "/proc/self/status") -> Usage:
    try:
        fields = {name: int(kib) * 1024 for name, kib in _FIELD.findall(Path(status).read_bytes())}
    except OSError:
        resident = psutil.Process().memory_info().rss
        return Usage(resident, 0, resident)
    resident = fields.get(b"VmRSS", 0) + fields.get(b"HugetlbPages", 0)
    return Usage(resident, fields.get(b"RssShmem", 0), resident - fields.get(b"RssFile", 0))


def node_bytes() -> int:
    """Return the machine's memory or a smaller cgroup limit."""
    return min([int(psutil.virtual_memory().total), *cgroup.memory_limits()])


def free_bytes() -> int:
    return min([int(psutil.virtual_memory().available), *cgroup.memory_left()])


def peak_memory_mib() -> float:
    # On Linux, ru_maxrss includes the parent process's memory before exec.
    status = read_text(Path("/proc/self/status")) or ""
    if peak := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
        return int(peak[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
