"""Cores, NUMA domains and memory of a node.

Node.read()            this machine, from its /sys tree
Node.read("saved")     another machine, whose tree the command SAVE copied into the folder saved
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..text.named_files import StrPath
from ..text.numbers import plural
from . import cgroup
from .cgroup import read_text

SAVE = (
    "cp --parents /sys/devices/system/node/node*/{cpulist,meminfo} "
    "/sys/devices/system/cpu/cpu*/topology/{thread_siblings_list,physical_package_id} DIR"
)


def parse_list(text: str) -> list[int]:
    """Parse the kernel's CPU list: "0-2,8" -> [0, 1, 2, 8]."""
    ranges = [part.partition("-") for part in text.replace("\n", "").split(",") if part.strip()]
    return [cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)]


def format_list(cpus: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


@dataclass(frozen=True)
class Domain:
    """cores: CPUs (hardware threads) of each core
    memory_gib: None if unknown
    """

    number: int
    cores: tuple[tuple[int, ...], ...]
    memory_gib: float | None


@dataclass(frozen=True)
class Node:
    """NUMA domains that compute, by number. sockets: CPU packages"""

    domains: tuple[Domain, ...]
    sockets: int

    @classmethod
    def read(cls, root: StrPath = "/") -> Node:
        """Return the node of root/sys. ValueError for a folder without CPUs.

        Domains with less than half the largest domain's cores are ignored (Fugaku's assistant cores).
        """
        system = Path(root) / "sys" / "devices" / "system"
        cpus = {
            int(path.name[3:]): path / "topology" for path in (system / "cpu").glob("cpu[0-9]*")
        }
        if not cpus and Path(root) != Path("/"):
            raise ValueError(
                f"--sys-root {root}: there is no CPU in {system / 'cpu'}: save a machine's tree there with `{SAVE}`"
            )
        read = [*_domains(system, cpus)] or [
            _domain(0, cpus or range(os.cpu_count() or 1), cpus, None)
        ]
        size = max(len(domain.cores) for domain in read)
        domains = tuple(domain for domain in read if 2 * len(domain.cores) >= size)
        first_cpus = [core[0] for domain in domains for core in domain.cores]
        packages = {
            read_text(cpus[cpu] / "physical_package_id") for cpu in first_cpus if cpu in cpus
        }
        return cls(domains, max(1, len(packages)))

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for domain in self.domains for core in domain.cores for cpu in core)

    @property
    def smt(self) -> int:
        return max(len(core) for domain in self.domains for core in domain.cores)

    def parts(self, mask: Iterable[int]) -> dict[int, list[int]]:
        """Return a CPU in the mask for each core, by domain number; other domains are absent."""
        own = set(mask)
        parts = {}
        for domain in self.domains:
            allowed = (own.intersection(core) for core in domain.cores)
            if cpus := sorted(min(core) for core in allowed if core):
                parts[domain.number] = cpus
        if not parts:  # a mask with assistant cores only
            parts[self.domains[0].number] = sorted(own.difference(self.cpus))
        return parts

    def cores(self, mask: Iterable[int]) -> list[int]:
        """Return a CPU in the mask for each core, in NUMA order."""
        return [cpu for part in self.parts(mask).values() for cpu in part]

    @cached_property
    def _cores(self) -> dict[int, tuple[int, ...]]:
        return {cpu: core for domain in self.domains for core in domain.cores for cpu in core}

    def core_of(self, cpu: int) -> tuple[int, ...]:
        return self._cores.get(cpu, (cpu,))

    def describe(self) -> str:
        """Return sockets, NUMA domains, cores and GiB in words; ranges if the domains differ."""
        sizes = {len(domain.cores) for domain in self.domains}
        memory = {
            round(domain.memory_gib) for domain in self.domains if domain.memory_gib is not None
        }
        sockets = plural(self.sockets, "socket")
        domains = plural(len(self.domains), "NUMA domain")
        text = f"{sockets}, {domains} of {_span(sizes)} {'cores' if max(sizes) > 1 else 'core'}"
        if memory:
            text += f" and {_span(memory)} GiB"
        if self.smt > 1:
            text += f", {self.smt} hardware threads a core"
        return text


def _span(numbers: set[int]) -> str:
    if len(numbers) == 1:
        return str(min(numbers))
    return f"{min(numbers)} to {max(numbers)}"


def _domains(system: Path, cpus: dict[int, Path]) -> Iterator[Domain]:
    for path in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        if own := parse_list(read_text(path / "cpulist") or ""):
            kib = re.search(r"MemTotal:\s*(\d+) kB", read_text(path / "meminfo") or "")
            yield _domain(int(path.name[4:]), own, cpus, int(kib[1]) / 2**20 if kib else None)


def _domain(
    number: int, own: Iterable[int], cpus: dict[int, Path], memory_gib: float | None
) -> Domain:
    together: dict[str, list[int]] = {}
    for cpu in sorted(own):
        siblings = read_text(cpus[cpu] / "thread_siblings_list") if cpu in cpus else None
        together.setdefault(siblings or f"{cpu} alone", []).append(cpu)
    return Domain(number, tuple(map(tuple, together.values())), memory_gib)


def cpuset() -> set[int] | None:
    text = cgroup.cpuset()
    return set(parse_list(text)) if text else None


def allowed_memory() -> set[int] | None:
    found = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", read_text(Path("/proc/self/status")) or "", re.MULTILINE
    )
    return set(parse_list(found[1])) if found else None
