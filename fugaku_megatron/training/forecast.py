"""What a run will need, said before its first iteration: memory, time of an iteration, passes over the data.

Left out: other machines and communication (`fugaku-megatron predict`).
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from .. import schedule
from ..comm.agreement import agree
from ..comm.base import Comm
from ..comm.grid import Grid
from ..comm.topology import Nodes, find_nodes
from ..host.fma_peak import fma_peak_gflops
from ..host.memory_use import node_bytes
from ..run import accounting, batches, memory
from ..run.checks import check
from ..run.config import RunConfig
from ..run.layout import Layout

PROCESS_BYTES = 250 << 20  # of a rank before its first tensor: Python, torch, MPI
BEYOND_DOUBT = 1.1  # a run that needs this many times the memory of its node is refused
FMA_SHARE = (0.8, 0.3)  # of the FP32 peak of multiply-adds: what a step reaches at best and where little fits the caches
PEAK_ROUNDS = 3


def rank_bytes(run: RunConfig, layout: Layout, rank: int) -> int:
    """Memory of one rank at the peak of a step, as --dry-run has it, with the process itself."""
    stage = Grid(layout.world_size, layout.tp, layout.pp).coords(rank)[1]
    lists = schedule.of_run(run, layout.microbatches(run, layout.global_batch_size(run)))
    return memory.stage_memory(run, layout, stage, lists.held(stage)).total + PROCESS_BYTES


def check_memory(run: RunConfig, layout: Layout, world: Comm, nodes: Nodes | None = None) -> str:
    """The log's line. Raises ValueError on every rank when a node's ranks need more memory than it has. Collective."""
    own, has, here = rank_bytes(run, layout, world.rank), node_bytes(), (nodes or find_nodes(world)).ranks
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    needed = int(here.all_reduce(torch.tensor(own))) + memory.data_index_bytes(run, samples)
    agree(world, lambda: check(
        needed <= BEYOND_DOUBT * has, f"this run needs about {_gib(needed)} on node {platform.node()} for its {here.size} ranks "
        f"(--dry-run shows each rank's share) and the node has {_gib(has)}: give --checkpoint-activations or "
        "--recompute-auto, "
        "--sequence-parallel beside tensor parallelism, a smaller --micro-batch-size or model, more tensor- or pipeline-parallel "
        "ranks on other nodes, or --zero-stage 1"), name_rank=False)
    largest = int(world.all_reduce(torch.tensor(own), "max"))
    return (f"memory: about {_gib(largest)} for the largest rank, {_gib(needed)} for the {here.size} "
            f"ranks of this node, which has {_gib(has)} (model)")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def iteration_line(run: RunConfig, layout: Layout) -> str:
    """How long an iteration will take about, from the FMA peak measured here; communication is left out."""
    flops = accounting.hardware_flops(run, layout.global_batch_size(run)) / layout.world_size
    peak = fma_peak_gflops(PEAK_ROUNDS) * 1e9
    low, high = (_seconds(flops / peak / share) for share in FMA_SHARE)
    return (f"time: about {low} to {high} for an iteration, the log follows every {run.output.log_interval} (estimate from "
            f"{peak / 1e9:.0f} GFLOP/s of FP32 multiply-adds in this rank)")


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value < 100 else f"{value / 60:.0f} min"


def data_line(train: Any) -> str | None:
    """How often the data is read, from the rank's training set; None where it does not know."""
    epochs = getattr(train, "num_epochs", None)
    if epochs is None:
        return None
    once = "at most once" if epochs == 1 else f"{epochs:,} times (epochs)"
    return f"data: {len(train):,} samples of training read the data {once}"


def validation_line(valid: Any) -> str | None:
    """How much text validation has, from the rank's validation set; None where there is none, or it is random."""
    parts = getattr(valid, "datasets", [valid])
    if not all(hasattr(part, "num_tokens") for part in parts):
        return None
    documents, tokens = (sum(getattr(part, name) for part in parts) for name in ("num_documents", "num_tokens"))
    return f"data: validation has {documents:,} documents with {tokens:,} tokens"


def skip_line(run: RunConfig, train: Any) -> str | None:
    """What --skip-samples may do to the order of samples, which depends on how many a run of several epochs needs."""
    if not run.data.skip_samples or run.training.train_iters is None or getattr(train, "num_epochs", 1) == 1:
        return None
    return ("note: --skip-samples lengthens a run of --train-iters by the samples left out, and their number decides the order of "
            "data that is read several times: give --train-samples to keep the order")
