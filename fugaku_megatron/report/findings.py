"""A machine's defects for training, each with measurement, expectation and remedy.

A partial report works. Limits come from machines on which training runs well.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..text.named_files import JsonObject
from .record import rows_of

Sections = JsonObject
CLOCK_SHARE = 0.9  # of the nominal clock
SPREAD = 0.9  # of the ranks' median
GEMM_SHARE = 0.75  # of the FMA peak
ATTENTION_SHARE = 0.35  # of the FMA peak
TRIAD_SHARE = 0.6  # of STREAM's triad
TO_MODEL = 2.0  # times the model's seconds for a collective
FEW_BYTES = 1 << 20  # below: latency dominates a collective
SCALING = 0.8  # of the tokens per second of one rank, for each of many
SLOW_GBS = 0.3  # checkpoint rate
BUSY_LOAD = 0.3  # load per core before the start
FREE_SHARE = 0.5  # of the memory


class Finding(NamedTuple):
    """severe: wrong results, or most of the speed is lost."""

    what: str
    measured: str
    expected: str
    remedy: str
    severe: bool = False
    node: int | None = None


def findings(sections: Sections) -> list[JsonObject]:
    """Return severe findings first; a finding on several nodes is listed once."""
    found: dict[str, list[Finding]] = {}
    for look in LOOKS:
        for finding in look(sections):
            found.setdefault(finding.what, []).append(finding)
    return [
        alike[0]._replace(what=alike[0].what + _on_nodes(alike))._asdict()
        for alike in sorted(found.values(), key=lambda alike: not alike[0].severe)
    ]


def _on_nodes(alike: list[Finding]) -> str:
    numbers = [finding.node for finding in alike if finding.node is not None]
    if not numbers:
        return ""
    if len(numbers) == 1:
        return f" on node {numbers[0]}"
    shown = ", ".join(map(str, numbers[:4]))
    if len(numbers) > 4:
        shown += f" and {len(numbers) - 4} others"
    return f" on nodes {shown}"


def _nodes(sections: Sections) -> list[JsonObject]:
    return rows_of(sections, "host", "nodes")


def wrong_kernels(sections: Sections) -> Iterator[Finding]:
    """Find kernels outside the tolerance, and ranks whose checksums differ from rank 0."""
    checks = rows_of(sections, "kernels", "checks")
    ranks = rows_of(sections, "kernels", "differing_ranks")
    bad = [row for row in checks if not row["good"]]
    if bad:
        worst = max(bad, key=lambda row: row["difference"])
        yield Finding(
            what=f"kernels of {sections['kernels']['target']} compute wrong results",
            severe=True,
            measured=f"{len(bad)} of {len(checks)}; {worst['kernel']} {worst['dtype']} by {worst['difference']:.1e}",
            expected="the scalar reference's result up to rounding",
            remedy="do not train here; set FUGAKU_MEGATRON_TARGET=portable, repeat, and send this report",
        )
    if ranks:
        yield Finding(
            what="ranks compute different bits",
            severe=True,
            measured=f"ranks {', '.join(map(str, ranks[:8]))} and rank 0",
            expected="the same bits on all ranks",
            remedy="exclude the nodes of these ranks: a core or its memory is faulty, "
            "or the nodes have different CPUs",
        )


def slow_clocks(sections: Sections) -> Iterator[Finding]:
    """Find clocks that fall under load, slow ranks, and governors that lower the clock."""
    ranks = rows_of(sections, "kernels", "ranks")
    nodes = _nodes(sections)
    if not ranks or not nodes:
        return
    clocks = [rank["clock_ghz"] for rank in ranks]
    nominal = nodes[0]["nominal_ghz"]
    middle = statistics.median(clocks)
    lowest = min(clocks)
    if nominal and middle < CLOCK_SHARE * nominal and "hypervisor" not in nodes[0]["features"]:
        yield Finding(
            what="the clock falls under load",
            measured=f"{middle:.2f} GHz",
            expected=f"{nominal:.2f} GHz, the highest clock",
            remedy="set the governor to performance, and look at the cooling and the power limit",
        )
    if lowest < SPREAD * middle:
        slow = clocks.index(lowest)
        yield Finding(
            what="a rank is slower than the others",
            measured=f"rank {slow} on node {ranks[slow]['node']}: {lowest:.2f} GHz",
            expected=f"{middle:.2f} GHz, the median",
            remedy="end other processes on that node, or leave the node out of the job",
        )
    governor = nodes[0]["governor"]
    if governor in ("powersave", "ondemand", "conservative"):
        yield Finding(
            what="the governor may lower the clock",
            measured=f"governor {governor}",
            expected="performance",
            remedy="cpupower frequency-set -g performance, or ask for a fixed clock in the job",
        )


def busy_cores(sections: Sections) -> Iterator[Finding]:
    """Find nodes with load of other processes, and nodes with idle cores."""
    ranks = rows_of(sections, "kernels", "ranks")
    for number, node in enumerate(_nodes(sections)):
        cores = node["cores"]
        own = [rank["threads"] for rank in ranks if rank["node"] == number]
        if node["load"] > max(1.0, BUSY_LOAD * cores) + len(own):
            yield Finding(
                node=number,
                what="other processes compute",
                measured=f"load {node['load']:.1f}",
                expected="below 1",
                remedy="repeat the report on an idle machine: every rate in it is too low",
            )
        if own and sum(own) < 0.9 * min(cores, node["quota_cpus"] or cores) - 1:
            yield Finding(
                node=number,
                what="idle cores",
                measured=f"{sum(own)} threads",
                expected=f"{cores} cores",
                remedy="set OMP_NUM_THREADS to cores / ranks, and let the launcher bind a rank to all of its cores",
            )


def mapping(sections: Sections) -> Iterator[Finding]:
    """Turn the notes on the mapping of ranks to cores into findings."""
    for number, node in enumerate(_nodes(sections)):
        for line in node["mapping"]:
            if not line.startswith("note: "):
                continue
            problem, _, remedy = line.removeprefix("note: ").partition(": ")
            yield Finding(
                node=number,
                what="ranks and cores do not fit",
                measured=problem,
                severe=True,
                expected="one rank with a thread on each core of a NUMA domain",
                remedy=remedy,
            )


def memory_set_up(sections: Sections) -> Iterator[Finding]:
    """Find disabled huge pages, page migration by the system, and memory in use by others."""
    for number, node in enumerate(_nodes(sections)):
        if node["huge_pages"]["transparent"] == "never" and not node["huge_pages"]["xos"]:
            yield Finding(
                node=number,
                what="no huge pages",
                measured="transparent_hugepage is never",
                expected="madvise or always",
                remedy="echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as administrator",
            )
        if node["numa_balancing"] == "1" and len(node["domains"]) > 1:
            yield Finding(
                node=number,
                what="the system moves pages",
                measured="numa_balancing is 1",
                expected="0",
                remedy="sysctl kernel.numa_balancing=0, as administrator: ranks are bound already",
            )
        if node["free_gib"] < FREE_SHARE * node["job_memory_gib"]:
            yield Finding(
                what=f"others hold the memory of node {number}",
                measured=f"{node['free_gib']:.1f} GiB are free",
                expected=f"most of {node['job_memory_gib']:.1f} GiB",
                remedy="end other processes, or drop temporary files in memory",
            )


def slow_kernels(sections: Sections) -> Iterator[Finding]:
    """Find kernels below the expected share of peak or triad, and unused vector units."""
    kernels = sections.get("kernels")
    if not kernels or kernels["shrunk"]:
        return
    n, gflops, share = max(kernels["gemm"], key=lambda row: row[0])
    if share < GEMM_SHARE:
        yield Finding(
            what="matmuls are slow",
            measured=f"{gflops:.0f} GFLOP/s at {n}, {share:.0%} of the FMA peak",
            expected=f"{GEMM_SHARE:.0%}",
            remedy="look for other processes and huge pages above; then send this report",
        )
    s, *_, forward, backward = max(kernels["attention"], key=lambda row: row[0])
    if min(forward, backward) < ATTENTION_SHARE:
        yield Finding(
            what="attention is slow",
            measured=f"{forward:.0%} and {backward:.0%} of the FMA peak at {s} tokens",
            expected=f"{ATTENTION_SHARE:.0%}",
            remedy="set --kernels auto, which takes PyTorch's where they are faster",
        )
    slow = [row for row in kernels["elementwise"] if row["of_triad"] < TRIAD_SHARE]
    if slow:
        slowest = sorted(slow, key=lambda row: row["of_triad"])[:3]
        shown = ", ".join(f"{row['kernel']} {row['of_triad']:.0%}" for row in slowest)
        yield Finding(
            what=f"{len(slow)} element-wise kernels are below the memory's rate",
            measured=f"{shown} of the triad",
            expected=f"{TRIAD_SHARE:.0%} or more",
            remedy="a rank with one thread cannot draw the memory's rate; else send this report",
        )
    widest = {"amx_bf16": "amx", "avx512f": "avx512", "sve": "sve"}
    features = [name for node in _nodes(sections)[:1] for name in node["features"]]
    for feature, target in widest.items():
        # AMX includes AVX-512.
        if feature in features and not kernels["target"].startswith((target, "amx")):
            yield Finding(
                what="the kernels do not use this CPU's vectors",
                measured=f"target {kernels['target']}",
                expected=target,
                remedy="unset FUGAKU_MEGATRON_TARGET, or build with a compiler that knows the CPU",
                severe=True,
            )


def communication(sections: Sections) -> Iterator[Finding]:
    """Find an unmeasured network, limited MPI threads, and collectives slower than the model."""
    found = sections.get("communication", {})
    if found.get("ranks") == 1:
        yield Finding(
            what="communication was not measured",
            measured=f"one rank, {found['library']}",
            expected="one rank for each NUMA domain",
            remedy="pip install mpich, or load the site's MPI, and start mpiexec -n N fugaku-megatron report",
        )
    if found.get("thread_level") == "funneled":
        yield Finding(
            what="MPI grants few threads",
            measured="MPI_THREAD_FUNNELED",
            expected="MPI_THREAD_SERIALIZED",
            remedy="it works; an MPI that is built with threads overlaps more",
        )
    slow = [
        row
        for row in rows_of(sections, "communication", "collectives")
        if row["bytes"] >= FEW_BYTES and row["to_model"] > TO_MODEL
    ]
    if slow:
        row = max(slow, key=lambda row: row["to_model"])
        yield Finding(
            what=f"collectives {row['where']} nodes are slow",
            expected=f"{1e3 * row['model_seconds']:.3g} ms in the model",
            measured=f"{row['verb']} of {row['bytes'] / 2**20:.0f} MiB takes {1e3 * row['seconds']:.3g} ms",
            remedy="bind ranks to cores; see that /dev/shm has 2 MiB for each rank, and which network MPI uses",
        )


def training(sections: Sections) -> Iterator[Finding]:
    """Find ranks that slow each other down, and runs left out for lack of memory."""
    rows = [row for row in rows_of(sections, "training") if "tokens_per_s" in row]
    if len(rows) > 1:
        alone, *_, together = (row["tokens_per_s"] / row["ranks"] for row in rows)
        share = together / alone
        if share < SCALING:
            yield Finding(
                what="ranks slow each other down",
                measured=f"{rows[-1]['ranks']} ranks: {share:.0%} of one rank's tokens/s each",
                expected=f"{SCALING:.0%}",
                remedy="one rank for each NUMA domain; more micro-batches for each all-reduce",
            )
    left_out = [
        row["ranks"] for row in rows_of(sections, "training") if row.get("left_out") == "memory"
    ]
    if left_out:
        yield Finding(
            what="124M does not fit",
            measured=f"too little memory for {left_out[0]} ranks",
            expected="2.5 GiB for each rank",
            remedy="start fewer ranks on a node, with more threads each",
        )


def storage(sections: Sections) -> Iterator[Finding]:
    found = sections.get("storage", {})
    if found and found["bytes"] > 1 << 26 and found["write_gbs"] < SLOW_GBS:
        yield Finding(
            what="checkpoints are slow",
            measured=f"{found['write_gbs']:.2f} GB/s on {found['file_system']}",
            expected=f"{SLOW_GBS} GB/s",
            remedy="--async-save, --save-local on a local disk, or a parallel file system",
        )


LOOKS: tuple[Callable[[Sections], Iterator[Finding]], ...] = (
    wrong_kernels,
    slow_clocks,
    busy_cores,
    mapping,
    memory_set_up,
    slow_kernels,
    communication,
    training,
    storage,
)
