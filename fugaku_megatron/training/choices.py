"""What a run leaves to the program, --pipeline-schedule auto and --recompute-auto, settled before anything is built.

Left out: how it is chosen (`perf.choice`).
"""

from __future__ import annotations

import torch

from ..comm.agreement import on_root
from ..comm.base import Comm
from ..comm.topology import Nodes, find_nodes
from ..host.memory_use import node_bytes
from ..parts import AUTO
from ..perf import choice
from ..perf.model import System
from ..perf.software import THIS_PROJECT
from ..run import batches, memory
from ..run.config import RunConfig
from ..run.layout import Layout
from .forecast import PROCESS_BYTES

MIB = 1 << 20
FIT = 0.9  # of a node's memory may be used by what is chosen; the system and the error of the model need the rest
MACHINE = "a64fx"  # whose costs rank the schedules everywhere, so that a dry run on another machine chooses the same


def room(run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None) -> int:
    """Bytes that the tensors of a rank may have, the same on every rank. Collective over `world`.

    From --memory-per-rank, or where it is not given from the smallest share of any node of which the ranks share nine tenths.
    Without a world from this node's memory, for one rank.
    """
    if own := run.training.memory_per_rank:
        return own * MIB - PROCESS_BYTES
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    share = int(FIT * node_bytes()) - memory.data_index_bytes(run, samples)
    if world is not None:
        share = int(world.all_reduce(torch.tensor(share // (nodes or find_nodes(world)).ranks.size), "min"))
    return share - PROCESS_BYTES


def modelled_system(layout: Layout) -> System:
    """The nodes, of one rank each, whose costs stand for those of any machine."""
    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)


def settle(run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None) -> tuple[RunConfig, list[str]]:
    """The run with nothing left to choose, and the log's lines about it. Collective over `world`.

    Rank 0 computes the times, those of `modelled_system`, for all.
    """
    if not run.training.recompute_auto and run.parallel.pipeline_schedule != AUTO:
        return run, []
    space = room(run, layout, world, nodes)
    system = modelled_system(layout)
    return on_root(world, lambda: choice.settled(run, layout, system, space))
