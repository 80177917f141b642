"""Cores, NUMA domains and memory of a node, and its ranks' cores.

    Node.read()            this machine, from its /sys tree
    Node.read("saved")     another machine, whose tree the command SAVE copied into the folder saved

By default a rank has a NUMA domain to itself, with one thread on each core and idle hyper-threads.
Ranks that a launcher binds keep their masks; ranks with one mask share its cores in NUMA order.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from ..text.named_files import StrPath
from . import cgroup
from .cgroup import read_text

T = TypeVar("T")
Environment = Mapping[str, str]
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
    """A NUMA domain with CPUs.

    cores: CPUs (hardware threads) of each core
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


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


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


# Cores of a rank from which a core for communication costs less than interruptions.
ENOUGH_CORES = 24
SHOWN_RANKS = 8  # ranks listed in the log
SMALL_MEMORY = 0.5  # of the largest domain's memory
_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class Placement:
    """A rank's threads and cores.

    cpus: empty if the system places the threads
    communication: core of the thread that calls MPI, if reserved
    why: limit on the threads, or reason for not pinning
    """

    threads: int
    cpus: tuple[int, ...]
    communication: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Rank:
    """A rank on the node. number: in the job. needed: bytes of memory"""

    number: int
    mask: tuple[int, ...]
    placement: Placement
    needed: int | None = None


def limits(environ: Environment, ranks: int, quota: float | None) -> dict[str, float]:
    """Return limits on a rank's threads, apart from its mask. The node's ranks share a cgroup's quota and SLURM_CPUS_ON_NODE."""
    found = {} if quota is None else {f"the cgroup's quota of {quota:g} CPUs": quota / ranks}
    for name, sharers in (("SLURM_CPUS_ON_NODE", ranks), ("SLURM_CPUS_PER_TASK", 1)):
        if (text := environ.get(name, "").strip()).isdecimal() and int(text):
            found[f"{name}={text}"] = int(text) / sharers
    return found


def requested_threads(environ: Environment) -> int | None:
    """Return OMP_NUM_THREADS, if set. ValueError unless it is a positive number."""
    variable = environ.get("OMP_NUM_THREADS", "").strip()
    if not variable:
        return None
    outermost = variable.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
    if not outermost.isdecimal() or int(outermost) < 1:
        raise ValueError(
            f"OMP_NUM_THREADS should be a positive number, it is {variable!r}; correct or unset it"
        )
    return int(outermost)


def part(domains: Sequence[list[int]], sharers: int, position: int) -> list[int]:
    if sharers % len(domains) == 0:
        each = sharers // len(domains)
        return _slice(domains[position // each], each, position % each)
    if len(domains) % sharers == 0:
        domains = _slice(list(domains), sharers, position)
        sharers = 1
        position = 0
    return _slice([cpu for domain in domains for cpu in domain], sharers, position)


def _slice(items: list[T], count: int, position: int) -> list[T]:
    size = len(items) // count
    return items[position * size : (position + 1) * size]


def place(
    node: Node,
    masks: Sequence[Sequence[int]],
    index: int,
    environ: Environment,
    quota: float | None = None,
    affinity: str = "auto",
    reserve: bool = False,
) -> Placement:
    """Place rank `index` on a node with these masks. ValueError as in `requested_threads`.

    Nothing is pinned with more threads than cores, if masks overlap without being equal, or if the user set OMP_PROC_BIND,
    OMP_PLACES or GOMP_CPU_AFFINITY.

    affinity: "pin", "none", or "auto": pin if the node's cores are in several NUMA domains
    reserve: as `reserve_core`, if the rank has ENOUGH_CORES and no number of threads is set
    """
    own = set(masks[index])
    sharers = [i for i, other in enumerate(masks) if not own.isdisjoint(other)]
    cores = part([*node.parts(own).values()], len(sharers), sharers.index(index))
    requested = requested_threads(environ)
    found = [(int(n), name) for name, n in limits(environ, len(masks), quota).items()]
    limit, why = min(found, default=(len(cores), ""))
    threads = requested or max(1, min(len(cores), limit))
    if reserve and not requested and threads == len(cores) >= ENOUGH_CORES:
        threads -= 1
    why = f"limited by {why}" if why and not requested and limit < len(cores) else ""
    placement = Placement(threads, (), why=why)
    unpinned = _unpinned(node, masks, environ, affinity)
    if unpinned or not cores or threads > len(cores) or any(set(masks[i]) != own for i in sharers):
        return replace(placement, why=", ".join(filter(None, (why, unpinned))))
    communication = cores[threads] if threads < len(cores) else None
    return replace(placement, cpus=tuple(cores[:threads]), communication=communication)


def _unpinned(
    node: Node, masks: Sequence[Sequence[int]], environ: Environment, affinity: str
) -> str | None:
    if variable := next((name for name in _PINNING_VARIABLES if environ.get(name)), None):
        return f"placed by {variable}"
    domains = node.parts({cpu for mask in masks for cpu in mask})
    if affinity == "pin" or affinity == "auto" and len(domains) > 1:
        return None
    return "not pinned"


def proposed_ranks(
    node: Node, masks: Sequence[Sequence[int]], environ: Environment, quota: float | None
) -> int:
    parts = node.parts({cpu for mask in masks for cpu in mask})
    of_node = {name: value for name, value in environ.items() if name != "SLURM_CPUS_PER_TASK"}
    cores = min(limits(of_node, 1, quota).values(), default=node.smt * len(node.cpus))
    return max(1, min(len(parts), math.ceil(cores / max(map(len, parts.values())))))


def map_ranks(node: Node, count: int, needed: int | None = None) -> list[Rank]:
    """Place `count` unbound ranks on a node without limits. needed: bytes per rank"""
    masks = [node.cpus for _ in range(count)]
    return [
        Rank(i, tuple(node.cpus), place(node, masks, i, {}, affinity="pin"), needed)
        for i in range(count)
    ]


# Lines for the log ----------------------------------------------------------------------------------------------------------------


def used(node: Node, rank: Rank) -> dict[int, list[int]]:
    return node.parts(rank.placement.cpus or rank.mask)


def rank_line(node: Node, rank: Rank) -> str:
    placement = rank.placement
    where = used(node, rank)
    words = "pinned to" if placement.cpus else "on"
    cores = format_list(cpu for part in where.values() for cpu in part)
    threads = plural(placement.threads, "thread")
    core_noun = "cores" if "," in cores or "-" in cores else "core"
    domain_noun = "domains" if len(where) > 1 else "domain"
    text = f"rank {rank.number}: {threads} {words} {core_noun} {cores} ({domain_noun} {format_list(where)})"
    return f"{text}, {placement.why}" if placement.why else text


def mapping(node: Node, ranks: Sequence[Rank]) -> str:
    few = ranks if len(ranks) <= SHOWN_RANKS else ranks[: SHOWN_RANKS - 1]
    lines = [rank_line(node, rank) for rank in few]
    if few is not ranks:
        lines.append(f"... {rank_line(node, ranks[-1])}")
    return f"cores: {node.describe()}; {'; '.join(lines)}"


def problems(
    node: Node,
    ranks: Sequence[Rank],
    environ: Environment,
    quota: float | None = None,
    cpuset: set[int] | None = None,
    memory: set[int] | None = None,
) -> list[str]:
    """Return a line with problem and remedy for each defect.

    cpuset, memory: CPUs and memory domains that the job's cgroup allows
    """
    found = (
        _spanning(node, ranks, environ, quota),
        _sharing(node, ranks),
        _over_quota(ranks, quota),
        _outside_masks(node, ranks, cpuset),
        *_domain_memory(node, ranks, memory),
    )
    return [line for line in found if line]


def _spanning(
    node: Node, ranks: Sequence[Rank], environ: Environment, quota: float | None
) -> str | None:
    spanning = [rank.number for rank in ranks if len(used(node, rank)) > 1]
    if not spanning:
        return None
    proposed = proposed_ranks(node, [rank.mask for rank in ranks], environ, quota)
    text = f"{_compute(spanning)} on several NUMA domains, where a part of the memory is slower"
    bind = "bind each rank to one domain (mpiexec -bind-to numa, srun --cpu-bind=ldoms)"
    if proposed == 1:
        return f"{text}: {bind}"
    if len(ranks) == proposed:
        return f"{text}: pass --thread-affinity pin, or {bind}"
    cpus = max(len(domain.cores) for domain in node.domains) * node.smt
    start = f"mpiexec -n {proposed} on one node; srun --ntasks-per-node {proposed} --cpus-per-task {cpus}"
    return f"{text}: this node suits {proposed} ranks, one for each domain ({start}), and has {len(ranks)}"


def _sharing(node: Node, ranks: Sequence[Rank]) -> str | None:
    groups: list[tuple[list[Rank], set[tuple[int, ...]]]] = []
    for rank in ranks:
        members = [rank]
        cores = {node.core_of(cpu) for part in used(node, rank).values() for cpu in part}
        for group in [group for group in groups if group[1] & cores]:
            groups.remove(group)
            members = group[0] + members
            cores = group[1] | cores
        groups.append((members, cores))
    for members, cores in groups:
        threads = sum(rank.placement.threads for rank in members)
        if threads > len(cores):
            numbers = [rank.number for rank in members]
            return (
                f"{_compute(numbers)} with {threads} threads on {plural(len(cores), 'core')}, where they wait for each other: "
                "start fewer ranks, lower OMP_NUM_THREADS, or bind ranks to cores of their own "
                "(mpiexec -bind-to core, srun --cpu-bind=cores)"
            )
    return None


def _over_quota(ranks: Sequence[Rank], quota: float | None) -> str | None:
    threads = sum(rank.placement.threads for rank in ranks)
    if quota is None or threads <= quota:
        return None
    return (
        f"{threads} threads compute under the cgroup's quota of {quota:g} CPUs, which stops them for a part of the time: start "
        f"at most {max(1, int(quota))} ranks, or lower OMP_NUM_THREADS"
    )


def _outside_masks(node: Node, ranks: Sequence[Rank], cpuset: set[int] | None) -> str | None:
    if cpuset is None:
        return None
    usable = {node.core_of(cpu) for cpu in cpuset.intersection(node.cpus)}
    masked = {node.core_of(cpu) for rank in ranks for cpu in rank.mask} & usable
    if len(masked) == len(usable):
        return None
    return (
        f"the masks of this node's ranks hold {len(masked)} of the {len(usable)} cores that the job may use: let the launcher "
        "bind ranks to NUMA domains or not at all (mpiexec -bind-to numa, srun --cpus-per-task), and omit taskset"
    )


def _domain_memory(node: Node, ranks: Sequence[Rank], allowed: set[int] | None) -> Iterator[str]:
    occupied = {number for rank in ranks for number in used(node, rank)}
    largest = max((domain.memory_gib or 0.0 for domain in node.domains), default=0.0)
    needs: dict[int, float] = {}
    for rank in ranks:
        where = used(node, rank)
        for number in where:
            needs[number] = needs.get(number, 0.0) + (rank.needed or 0) / 2**30 / len(where)
    for domain in (domain for domain in node.domains if domain.number in occupied):
        own = domain.memory_gib
        name = f"NUMA domain {domain.number}"
        if allowed is not None and domain.number not in allowed:
            yield f"the job may not use the memory of {name}, on which ranks compute: allow it (cpuset.mems, numactl --membind)"
        elif own is not None and own < SMALL_MEMORY * largest:
            yield f"{name} has {own:.3g} GiB where another has {largest:.3g}: start fewer ranks on it, or install memory modules"
        elif own is not None and needs[domain.number] > own:
            yield (
                f"the ranks of {name} need {needs[domain.number]:.3g} GiB and it has {own:.3g}: the rest will be on other "
                "domains, where it is slower"
            )


def _compute(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"rank {numbers[0]} computes"
    return f"ranks {format_list(numbers)} compute"
