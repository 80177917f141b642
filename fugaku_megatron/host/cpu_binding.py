"""Cores of a node's ranks.

By default a rank has a NUMA domain to itself, with one thread on each core and idle hyper-threads.
Ranks that a launcher binds keep their masks; ranks with one mask share its cores in NUMA order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..text.numbers import plural
from .topology import Node, format_list

T = TypeVar("T")
Environment = Mapping[str, str]
# Cores of a rank from which a core for communication costs less than interruptions.
ENOUGH_CORES = 24
SHOWN_RANKS = 8  # ranks listed in the log
_PINNING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class CpuBinding:
    """cpus: empty if the system places the threads
    communication: core of the thread that calls MPI, if reserved
    why: limit on the threads, or reason for not pinning
    """

    threads: int
    cpus: tuple[int, ...]
    communication: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Rank:
    """number: in the job. needed: bytes of memory"""

    number: int
    mask: tuple[int, ...]
    binding: CpuBinding
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
) -> CpuBinding:
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
    binding = CpuBinding(threads, (), why=why)
    unpinned = _unpinned(node, masks, environ, affinity)
    if unpinned or not cores or threads > len(cores) or any(set(masks[i]) != own for i in sharers):
        return replace(binding, why=", ".join(filter(None, (why, unpinned))))
    communication = cores[threads] if threads < len(cores) else None
    return replace(binding, cpus=tuple(cores[:threads]), communication=communication)


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


def used(node: Node, rank: Rank) -> dict[int, list[int]]:
    return node.parts(rank.binding.cpus or rank.mask)


def rank_line(node: Node, rank: Rank) -> str:
    binding = rank.binding
    where = used(node, rank)
    words = "pinned to" if binding.cpus else "on"
    cores = format_list(cpu for part in where.values() for cpu in part)
    threads = plural(binding.threads, "thread")
    core_noun = "cores" if "," in cores or "-" in cores else "core"
    domain_noun = "domains" if len(where) > 1 else "domain"
    text = f"rank {rank.number}: {threads} {words} {core_noun} {cores} ({domain_noun} {format_list(where)})"
    return f"{text}, {binding.why}" if binding.why else text


def mapping(node: Node, ranks: Sequence[Rank]) -> str:
    few = ranks if len(ranks) <= SHOWN_RANKS else ranks[: SHOWN_RANKS - 1]
    lines = [rank_line(node, rank) for rank in few]
    if few is not ranks:
        lines.append(f"... {rank_line(node, ranks[-1])}")
    return f"cores: {node.describe()}; {'; '.join(lines)}"
