"""The memory of a rank: an arena that keeps its pages for torch's large tensors, and malloc with tuned parameters for the rest.

glibc returns every block of more than 32 MiB (and, at first, of more than 128 KiB) to the kernel when it is freed, and the next
micro-batch faults the same pages in again. A preloaded tcmalloc avoids that, and so does this module without a preload. An
allocator that the user preloads is not changed.
Left out: the arena itself (kernels_sve/arena.h). Comparison: python -m benchmarks alloc
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import resource
from pathlib import Path

import psutil

from . import kernels

# library in /proc/self/maps -> allocator. libmpg (Fujitsu's large pages) is last: a preloaded library replaces its malloc
_LIBRARIES = {"tcmalloc": "tcmalloc", "jemalloc": "jemalloc", "mimalloc": "mimalloc", "mpg": "libmpg"}
_MAPS = Path("/proc/self/maps")

# malloc.h: parameter -> value. The heap grows by 16 MiB at a time and shrinks only when 1 GiB of its top is free
_MALLOPT = {"M_TRIM_THRESHOLD": (-1, 1 << 30), "M_TOP_PAD": (-2, 16 << 20), "M_MMAP_THRESHOLD": (-3, 32 << 20)}
RESERVED_PER_RAM = 2  # reserved addresses cost no memory; twice the installed memory allows for fragmentation


def allocator_name(maps: str | None = None) -> str:
    """The allocator in use, judged by the loaded libraries (`maps`: text of /proc/self/maps): "tcmalloc", "glibc 2.28" ...

    A library that was opened later, instead of preloaded, does not serve malloc but is in the list too: this function cannot
    tell the two apart.
    """
    text = _read_maps() if maps is None else maps
    loaded = {match[1] for match in re.finditer(r"/lib([a-z]+)[^/\s]*\.so[^/\s]*$", text, re.MULTILINE)}
    for library, name in _LIBRARIES.items():
        if library in loaded:
            return name
    return " ".join(filter(None, platform.libc_ver())) or "unknown"


def _read_maps() -> str:
    try:
        return _MAPS.read_text()
    except OSError:
        return ""


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
    _tune_malloc()
    if not kernels.use_arena(RESERVED_PER_RAM * psutil.virtual_memory().total):
        return f"{name}, heap tuned; the system refused addresses for the tensor arena (ulimit -v?)"
    return f"{name}, tuned: tensors in an arena that keeps its pages{_large_pages()}"


def return_large_blocks() -> None:
    """Return every block of more than 1 MiB to the system as soon as it is freed: for work of which the peak counts, not the speed.

    Without it glibc keeps up to 64 MiB of freed tensors at the top of its heap.
    """
    _mallopt((_MALLOPT["M_MMAP_THRESHOLD"][0], 1 << 20))


def _tune_malloc() -> None:
    _mallopt(*_MALLOPT.values())


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
    xos = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("XOS_MMM_L_")]
    try:
        choice = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
    except OSError:
        choice = None
    pages = [f"transparent huge pages {choice[1]}"] if choice else []
    return "".join(f", {text}" for text in pages + xos)


def page_faults() -> tuple[int, float]:
    """(minor page faults, seconds of system time) of this process since its start."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_minflt, usage.ru_stime
