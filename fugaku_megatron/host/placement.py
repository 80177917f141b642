"""The cores, NUMA domains and memory of a node, and on which of the cores its ranks compute.

    Node.read()            this machine, from its /sys tree
    Node.read("saved")     another one, whose tree the command SAVE has copied into the folder saved

By default a rank has a NUMA domain to itself, with one thread on each core, hyper-threads idle. The number of ranks is the
launcher's: where it does not fit the domains, the log proposes another. A rank may be bound to cores by its launcher (numactl,
Fujitsu's mpiexec, srun), or share its mask with the other ranks of the node. In the second case the cores are distributed in NUMA
order. A rank's memory, which its own threads touch first, is then near them. Left out: how threads are pinned
(runtime.py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from .allocator import cgroup_folders, read_text

SAVE = (
    "cp --parents /sys/devices/system/node/node*/{cpulist,meminfo} "
    "/sys/devices/system/cpu/cpu*/topology/{thread_siblings_list,physical_package_id} DIR"
)
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
        packages = {
            read_text(cpus[core[0]] / "physical_package_id")
            for d in domains
            for core in d.cores
            if core[0] in cpus
        }
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
        parts = {
            d.number: sorted(
                min(own.intersection(core)) for core in d.cores if own.intersection(core)
            )
            for d in self.domains
        }
        unknown = (
            own.difference(self.cpus) if not any(parts.values()) else set()
        )  # a mask of assistant cores alone
        return {number: cores for number, cores in parts.items() if cores} or {
            self.domains[0].number: sorted(unknown)
        }

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
        memory = {
            round(domain.memory_gib) for domain in self.domains if domain.memory_gib is not None
        }
        count = len(self.domains)
        return (
            f"{self.sockets} socket{'s' * (self.sockets > 1)}, {count} NUMA domain{'s' * (count > 1)} of {_span(sizes)} "
            f"core{'s' * (max(sizes) > 1)}"
            + f" and {_span(memory)} GiB" * bool(memory)
            + f", {self.smt} hardware threads a core" * (self.smt > 1)
        )


def _span(numbers: set[int]) -> str:
    return (
        str(min(numbers))
        if len(numbers) == 1
        else f"{min(numbers)} to {max(numbers)}"
        if numbers
        else ""
    )


def _domains(system: Path, cpus: dict[int, Path]) -> Iterator[Domain]:
    for path in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        if own := parse_list(read_text(path / "cpulist") or ""):
            kib = re.search(r"MemTotal:\s*(\d+) kB", read_text(path / "meminfo") or "")
            yield _domain(int(path.name[4:]), own, cpus, int(kib[1]) / 2**20 if kib else None)


def _domain(
    number: int, own: Iterable[int], cpus: dict[int, Path], memory_gib: float | None
) -> Domain:
    """A domain of these CPUs; a CPU of which the tree does not say what shares its core has one of its own."""
    together: dict[str, list[int]] = {}
    for cpu in sorted(own):
        siblings = read_text(cpus[cpu] / "thread_siblings_list") if cpu in cpus else None
        together.setdefault(siblings or f"{cpu} alone", []).append(cpu)
    return Domain(number, tuple(map(tuple, together.values())), memory_gib)


def cpu_quota(
    proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> float | None:
    """The smallest limit of this process's cgroup (version 1 or 2) and its ancestors, in CPUs; None without a limit."""
    folders = cgroup_folders("cpu", proc_cgroup, root)
    limits = (
        _limit_v2(folder) if version == 2 else _limit_v1(folder) for version, folder in folders
    )
    return min((limit for limit in limits if limit is not None), default=None)


def _limit_v2(folder: Path) -> float | None:
    words = (read_text(folder / "cpu.max") or "max").split()
    return None if words[0] == "max" else int(words[0]) / int(words[1])


def _limit_v1(folder: Path) -> float | None:
    quota = int(read_text(folder / "cpu.cfs_quota_us") or -1)
    period = int(read_text(folder / "cpu.cfs_period_us") or 0)
    return quota / period if quota > 0 and period > 0 else None


def cpuset(
    proc_cgroup: str | os.PathLike = "/proc/self/cgroup", root: str | os.PathLike = "/sys/fs/cgroup"
) -> set[int] | None:
    """The CPUs that the cgroup of this process may use, whatever mask a launcher has set; None where the system does not say."""
    texts = (
        read_text(folder / _CPUSET[version])
        for version, folder in cgroup_folders("cpuset", proc_cgroup, root)
    )
    return next((set(parse_list(text)) for text in texts if text), None)


def allowed_memory() -> set[int] | None:
    """The NUMA domains whose memory this process may use; None where the system does not say."""
    found = re.search(
        r"^Mems_allowed_list:\s*(\S+)$", read_text(Path("/proc/self/status")) or "", re.MULTILINE
    )
    return set(parse_list(found[1])) if found else None


ENOUGH_CORES = (
    24  # of a rank, from which on a core for communication costs less than its interruptions
)
SHOWN_RANKS = 8  # that the log names one by one
SMALL_MEMORY = 0.5  # of the memory of the largest domain
_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class Placement:
    """Threads of this rank and the core of each; no cores: the system places them. communication: the core of the thread that
    calls MPI, where one is left for it. why: what limits the threads, or why they are not pinned."""

    threads: int
    cpus: tuple[int, ...]
    communication: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Rank:
    """A rank of the node: its number in the job, its CPU mask, its placement, and the bytes that it needs, where that is known."""

    number: int
    mask: tuple[int, ...]
    placement: Placement
    needed: int | None = None


def limits(environ: Mapping[str, str], ranks: int, quota: float | None) -> dict[str, float]:
    """What limits the threads of a rank, apart from its mask -> how many it allows.

    A cgroup's quota and Slurm's CPUs of a node are shared by all its ranks.
    """
    found = {} if quota is None else {f"the cgroup's quota of {quota:g} CPUs": quota / ranks}
    for name, sharers in (("SLURM_CPUS_ON_NODE", ranks), ("SLURM_CPUS_PER_TASK", 1)):
        if (text := environ.get(name, "").strip()).isdecimal() and int(text):
            found[f"{name}={text}"] = int(text) / sharers
    return found


def requested_threads(environ: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS; None where it is not set. Raises ValueError when it is not a positive number."""
    variable = environ.get("OMP_NUM_THREADS", "").strip()
    outermost = variable.split(",")[0].strip()  # OpenMP allows a list, one number per nesting level
    if variable and (not outermost.isdecimal() or int(outermost) < 1):
        raise ValueError(
            f"OMP_NUM_THREADS should be a positive number, it is {variable!r}; correct or unset it"
        )
    return int(outermost) if variable else None


def part(domains: Sequence[list[int]], sharers: int, position: int) -> list[int]:
    """The cores of one of the ranks that share these domains' cores, without crossing a domain's border where that is possible."""
    if sharers % len(domains) == 0:
        each = sharers // len(domains)
        return _slice(domains[position // each], each, position % each)
    if len(domains) % sharers == 0:
        domains = _slice(list(domains), sharers, position)
        sharers = 1
        position = 0
    return _slice([cpu for domain in domains for cpu in domain], sharers, position)


def _slice(items: list, count: int, position: int) -> list:
    size = len(items) // count
    return items[position * size : (position + 1) * size]


def place(
    node: Node,
    masks: Sequence[Sequence[int]],
    index: int,
    environ: Mapping[str, str],
    quota: float | None = None,
    affinity: str = "auto",
    reserve: bool = False,
) -> Placement:
    """The placement of rank `index` of the node's ranks, whose masks are `masks`; ValueError as in `requested_threads`.

    affinity: "pin", "none", or "auto", which pins where the node's cores lie in several NUMA domains. Nothing is pinned when there
    are more threads than cores, when masks overlap without being equal, or when the user has set OMP_PROC_BIND, OMP_PLACES or
    GOMP_CPU_AFFINITY. reserve: a rank of ENOUGH_CORES or more computes on one core less, which the thread that calls MPI gets;
    a number of threads that the user has set stays.
    """
    own = set(masks[index])
    sharers = [i for i, other in enumerate(masks) if not own.isdisjoint(other)]
    cores = part([*node.parts(own).values()], len(sharers), sharers.index(index))
    requested = requested_threads(environ)
    limit, why = min(
        ((int(n), name) for name, n in limits(environ, len(masks), quota).items()),
        default=(len(cores), ""),
    )
    threads = requested or max(1, min(len(cores), limit))
    if reserve and not requested and threads == len(cores) >= ENOUGH_CORES:
        threads -= 1
    why = f"limited by {why}" if why and not requested and limit < len(cores) else ""
    placement = Placement(threads, (), why=why)
    unpinned = _unpinned(node, masks, environ, affinity)
    if unpinned or not cores or threads > len(cores) or any(set(masks[i]) != own for i in sharers):
        return replace(placement, why=", ".join(filter(None, (why, unpinned))))
    return replace(
        placement,
        cpus=tuple(cores[:threads]),
        communication=cores[threads] if threads < len(cores) else None,
    )


def _unpinned(
    node: Node, masks: Sequence[Sequence[int]], environ: Mapping[str, str], affinity: str
) -> str | None:
    """Why threads are not pinned, whatever their number; None where they are."""
    if variable := next((name for name in _PINNING_VARIABLES if environ.get(name)), None):
        return f"placed by {variable}"
    domains = node.parts({cpu for mask in masks for cpu in mask})
    return None if affinity == "pin" or affinity == "auto" and len(domains) > 1 else "not pinned"


def proposed_ranks(
    node: Node, masks: Sequence[Sequence[int]], environ: Mapping[str, str], quota: float | None
) -> int:
    """Ranks of the node with which each has a domain to itself, of the CPUs that these masks and limits allow."""
    parts = node.parts({cpu for mask in masks for cpu in mask})
    of_node = {name: value for name, value in environ.items() if name != "SLURM_CPUS_PER_TASK"}
    cores = min(limits(of_node, 1, quota).values(), default=node.smt * len(node.cpus))
    return max(1, min(len(parts), math.ceil(cores / max(map(len, parts.values())))))


def map_ranks(node: Node, count: int, needed: int | None = None) -> list[Rank]:
    """So many ranks on a node that nothing limits, as a launcher starts them that binds none. needed: bytes of memory of a rank."""
    masks = [node.cpus] * count
    return [
        Rank(i, tuple(node.cpus), place(node, masks, i, {}, affinity="pin"), needed)
        for i in range(count)
    ]


# What the log says ----------------------------------------------------------------------------------------------------------------


def used(node: Node, rank: Rank) -> dict[int, list[int]]:
    """The cores that the threads of a rank may run on, by domain."""
    return node.parts(rank.placement.cpus or rank.mask)


def rank_line(node: Node, rank: Rank) -> str:
    """rank 1: 24 threads pinned to cores 24-47 (domain 1)."""
    placement = rank.placement
    where = used(node, rank)
    words = "pinned to" if placement.cpus else "on"
    cores = format_list(cpu for part in where.values() for cpu in part)
    return (
        f"rank {rank.number}: {placement.threads} thread{'s' * (placement.threads > 1)} {words} core"
        f"{'s' * (',' in cores or '-' in cores)} {cores} (domain{'s' * (len(where) > 1)} {format_list(where)})"
        + (f", {placement.why}" if placement.why else "")
    )


def mapping(node: Node, ranks: Sequence[Rank]) -> str:
    """One line: the node and the cores of its ranks; of many ranks the first ones and the last."""
    few = ranks if len(ranks) <= SHOWN_RANKS else ranks[: SHOWN_RANKS - 1]
    lines = [rank_line(node, rank) for rank in few]
    if few is not ranks:
        lines.append(f"... {rank_line(node, ranks[-1])}")
    return f"cores: {node.describe()}; {'; '.join(lines)}"


def problems(
    node: Node,
    ranks: Sequence[Rank],
    environ: Mapping[str, str],
    quota: float | None = None,
    cpuset: set[int] | None = None,
    memory: set[int] | None = None,
) -> list[str]:
    """A line for each kind of problem of this mapping, with its remedy.

    cpuset, memory: CPUs and domains whose memory the cgroup of this job allows.
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
    node: Node, ranks: Sequence[Rank], environ: Mapping[str, str], quota: float | None
) -> str | None:
    spanning = [rank.number for rank in ranks if len(used(node, rank)) > 1]
    if not spanning:
        return None
    proposed = proposed_ranks(node, [rank.mask for rank in ranks], environ, quota)
    text = f"{_names(spanning)} compute{'s' * (len(spanning) == 1)} on several NUMA domains, where a part of the memory is slower"
    if proposed == 1:
        return (
            f"{text}: bind each rank to one domain (mpiexec -bind-to numa, srun --cpu-bind=ldoms)"
        )
    if len(ranks) == proposed:
        return f"{text}: pass --thread-affinity pin, or bind each rank to one domain (mpiexec -bind-to numa, srun --cpu-bind=ldoms)"
    cpus = max(len(domain.cores) for domain in node.domains) * node.smt
    start = f"mpiexec -n {proposed} on one node; srun --ntasks-per-node {proposed} --cpus-per-task {cpus}"
    return f"{text}: this node suits {proposed} ranks, one for each domain ({start}), and has {len(ranks)}"


def _sharing(node: Node, ranks: Sequence[Rank]) -> str | None:
    """The first group of ranks that have more threads than cores."""
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
            return (
                f"{_names([rank.number for rank in members])} compute{'s' * (len(members) == 1)} with {threads} threads on "
                f"{len(cores)} core{'s' * (len(cores) > 1)}, where they wait for each other: start fewer ranks, lower "
                "OMP_NUM_THREADS, or bind ranks to cores of their own (mpiexec -bind-to core, srun --cpu-bind=cores)"
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
    held = {node.core_of(cpu) for rank in ranks for cpu in rank.mask} & usable
    if len(held) == len(usable):
        return None
    return (
        f"the masks of this node's ranks hold {len(held)} of the {len(usable)} cores that the job may use: let the launcher "
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


def _names(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {format_list(numbers)}"
