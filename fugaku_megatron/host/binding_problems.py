"""Defects in the binding of a node's ranks to CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..text.numbers import plural
from .cpu_binding import Environment, Rank, proposed_ranks, used
from .topology import Node, format_list

SMALL_MEMORY = 0.5  # of the largest domain's memory


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
        threads = sum(rank.binding.threads for rank in members)
        if threads > len(cores):
            numbers = [rank.number for rank in members]
            return (
                f"{_compute(numbers)} with {threads} threads on {plural(len(cores), 'core')}, where they wait for each other: "
                "start fewer ranks, lower OMP_NUM_THREADS, or bind ranks to cores of their own "
                "(mpiexec -bind-to core, srun --cpu-bind=cores)"
            )
    return None


def _over_quota(ranks: Sequence[Rank], quota: float | None) -> str | None:
    threads = sum(rank.binding.threads for rank in ranks)
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
