"""The cores, NUMA domains and memory of a node, read from its /sys tree or from a copy of one, and what limits this process.

    Node.read()            this machine
    Node.read("saved")     another one, whose tree the command SAVE has copied into the folder saved
Left out: which rank computes where (placement.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .allocator import cgroup_folders, read_text

SAVE = ("cp --parents /sys/devices/system/node/node*/{cpulist,meminfo} "
        "/sys/devices/system/cpu/cpu*/topology/{thread_siblings_list,physical_package_id} DIR")
_CPUSET = {2: "cpuset.cpus.effective", 1: "cpuset.effective_cpus"}  # by version of the cgroup


def parse_list(text: str) -> list[int]:
    """[0, 1, 2, 8] of "0-2,8", the kernel's form of a set of CPUs."""
    ranges = [part.partition("-") for part in text.replace("\n", "").split(",") if part.strip()]
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def format_list(cpus: Iterable[int]) -> str:
    """The inverse of `parse_list`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class Domain:
    """A NUMA domain with CPUs. cores: the CPUs of each core, its hardware threads. memory_gib: None where the tree has no size."""

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory_gib: float | None


@dataclass(frozen=True)
class Node:
    """The domains that compute, in the order of their numbers. sockets: CPU packages that they are on."""

    domains: tuple[Domain, ...]
    sockets: int

    @classmethod
    def read(cls, root: str | os.PathLike = "/") -> Node:
        """The node whose tree is root/sys. Raises ValueError for a folder without one.

        Domains with less than half the cores of the largest are left out: on Fugaku the assistant cores are domains of their own.
        Domains without CPUs (memory of GPUs, CXL) are left out as well.
        """
        system = Path(root) / "sys" / "devices" / "system"
        cpus = {int(path.name[3:]): path / "topology" for path in (system / "cpu").glob("cpu[0-9]*")}
        if not cpus and Path(root) != Path("/"):
            raise ValueError(f"--sys-root {root}: there is no CPU in {system / 'cpu'}: save a machine's tree there with `{SAVE}`")
        read = [*_domains(system, cpus)] or [_domain(0, cpus or range(os.cpu_count() or 1), cpus, None)]
        size = max(len(domain.cores) for domain in read)
        domains = tuple(domain for domain in read if 2 * len(domain.cores) >= size)
        packages = {read_text(cpus[core[0]] / "physical_package_id") for d in domains for core in d.cores if core[0] in cpus}
        return cls(domains, max(1, len(packages)))

    @property
    def cpus(self) -> list[int]:
        """All CPUs of the domains, hardware threads included."""
        return sorted(cpu for domain in self.domains for core in domain.cores for cpu in core)

    @property
    def smt(self) -> int:
        """Hardware threads of a core."""
        return max(len(core) for domain in self.domains for core in domain.cores)

    def parts(self, mask: Iterable[int]) -> dict[int, list[int]]:
        """One CPU of the mask for each of its cores, by the domain's number; domains of which the mask has none are left out."""
        own = set(mask)
        parts = {d.number: sorted(min(own.intersection(core)) for core in d.cores if own.intersection(core)) for d in self.domains}
        unknown = own.difference(self.cpus) if not any(parts.values()) else set()  # a mask of assistant cores alone
        return {number: cores for number, cores in parts.items() if cores} or {self.domains[0].number: sorted(unknown)}

    def cores(self, mask: Iterable[int]) -> list[int]:
        """One CPU of the mask for each of its cores, in NUMA order."""
        return [cpu for part in self.parts(mask).values() for cpu in part]

    @cached_property
    def _cores(self) -> dict[int, tuple[int, ...]]:
        return {cpu: core for domain in self.domains for core in domain.cores for cpu in core}

    def core_of(self, cpu: int) -> tuple[int, ...]:
        """The CPUs of this CPU's core."""
        return self._cores.get(cpu, (cpu,))

    def describe(self) -> str:
        """2 sockets, 8 NUMA domains of 24 cores and 94 GiB, 2 hardware threads a core."""
        sizes = {len(domain.cores) for domain in self.domains}
        memory = {round(domain.memory_gib) for domain in self.domains if domain.memory_gib is not None}
        count = len(self.domains)
        return (f"{self.sockets} socket{'s' * (self.sockets > 1)}, {count} NUMA domain{'s' * (count > 1)} of {_span(sizes)} "
                f"core{'s' * (max(sizes) > 1)}" + f" and {_span(memory)} GiB" * bool(memory)
                + f", {self.smt} hardware threads a core" * (self.smt > 1))


def _span(numbers: set[int]) -> str:
    return str(min(numbers)) if len(numbers) == 1 else f"{min(numbers)} to {max(numbers)}" if numbers else ""


def _domains(system: Path, cpus: dict[int, Path]) -> Iterator[Domain]:
    for path in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        if own := parse_list(read_text(path / "cpulist") or ""):
            kib = re.search(r"MemTotal:\s*(\d+) kB", read_text(path / "meminfo") or "")
            yield _domain(int(path.name[4:]), own, cpus, int(kib[1]) / 2**20 if kib else None)


def _domain(number: int, own: Iterable[int], cpus: dict[int, Path], memory_gib: float | None) -> Domain:
    """A domain of these CPUs; a CPU of which the tree does not say what shares its core has one of its own."""
    together: dict[str, list[int]] = {}
    for cpu in sorted(own):
        siblings = read_text(cpus[cpu] / "thread_siblings_list") if cpu in cpus else None
        together.setdefault(siblings or f"{cpu} alone", []).append(cpu)
    return Domain(number, tuple(map(tuple, together.values())), memory_gib)


def cpu_quota(proc_cgroup: str | os.PathLike = "/proc/self/cgroup",
              root: str | os.PathLike = "/sys/fs/cgroup") -> float | None:
    """The smallest limit of this process's cgroup (version 1 or 2) and its ancestors, in CPUs; None without a limit."""
    folders = cgroup_folders("cpu", proc_cgroup, root)
    limits = (_limit_v2(folder) if version == 2 else _limit_v1(folder) for version, folder in folders)
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _limit_v1(folder: Path) -> float | None:
    quota, period = int(read_text(folder / "cpu.cfs_quota_us") or -1), int(read_text(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def cpuset(proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup") -> set[int] | None:
    """The CPUs that the cgroup of this process may use, whatever mask a launcher has set; None where the system does not say."""
    texts = (read_text(folder / _CPUSET[version]) for version, folder in cgroup_folders("cpuset", proc_cgroup, root))
    return next((set(parse_list(text)) for text in texts if text), None)


def allowed_memory(status: str | os.PathLike = "/proc/self/status") -> set[int] | None:
    """The NUMA domains whose memory this process may use; None where the system does not say."""
    found = re.search(r"^Mems_allowed_list:\s*(\S+)$", read_text(Path(status)) or "", re.MULTILINE)
    return set(parse_list(found[1])) if found else None
