"""Limits and events of this process's cgroup, version 1 or 2, and of its ancestors; the reader of files in /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PROC = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
# cgroup version -> files with limit and use, field of memory.stat with the reclaimable use
_MEMORY = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_EVENTS = {2: "memory.events", 1: "memory.oom_control"}
_CPUSET = {2: "cpuset.cpus.effective", 1: "cpuset.effective_cpus"}


def read_text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    try:
        return int(read_text(path) or "")
    except ValueError:
        return None


def _folders(controller: str) -> Iterator[tuple[int, Path]]:
    """Iterate over (version, directory) of the cgroup and its ancestors."""
    for line in (read_text(PROC) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        # In a container the path may be the host's, and only the mount exists.
        own = Path(path.lstrip("/"))
        folders = (own, *own.parents)
        if controllers == "":
            yield from ((2, ROOT / folder) for folder in folders)
        elif controller in controllers.split(","):
            # A version 1 mount is named "cpu,cpuacct" or has a link "cpu".
            for mount in (controllers, controller):
                yield from ((1, ROOT / mount / folder) for folder in folders)


def memory_limits() -> Iterator[int]:
    for version, folder in _folders("memory"):
        limit = _number(folder / _MEMORY[version][0])
        if limit is not None:
            yield limit


def memory_left() -> Iterator[int]:
    """Iterate over bytes left under each limit."""
    for version, folder in _folders("memory"):
        limit_file, used_file, reclaimable = _MEMORY[version]
        limit = _number(folder / limit_file)
        used = _number(folder / used_file)
        if limit is not None and used is not None:
            stat = (folder / "memory.stat").read_text()
            if match := re.search(rf"^{reclaimable} (\d+)$", stat, re.MULTILINE):
                used -= int(match[1])
            yield max(0, limit - used)


def oom_kills() -> int:
    """Return how many processes of the cgroup and its ancestors the kernel has killed for want of memory."""
    kills = 0
    for version, folder in _folders("memory"):
        events = read_text(folder / _EVENTS[version]) or ""
        if match := re.search(r"^oom_kill (\d+)$", events, re.MULTILINE):
            kills += int(match[1])
    return kills


def cpu_quota() -> float | None:
    """Return the lowest CPU quota of the cgroup and its ancestors, in CPUs; None: unlimited."""
    quotas = []
    for version, folder in _folders("cpu"):
        if version == 2:
            words = (read_text(folder / "cpu.max") or "max").split()
        else:
            words = [
                read_text(folder / name) or "0"
                for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            ]
        if words[0] != "max" and int(words[0]) > 0 and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def cpuset() -> str | None:
    """Return the CPUs as the kernel's list, independent of the launcher's mask."""
    texts = (read_text(folder / _CPUSET[version]) for version, folder in _folders("cpuset"))
    return next(filter(None, texts), None)
