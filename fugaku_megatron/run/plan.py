"""Automatic choices of a run that need no tensors: schedule, recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..comm.agreement import Nodes, find_nodes, on_root
from ..comm.base import Comm
from ..config import batches
from ..config.layout import Layout
from ..config.parallel import EITHER, P2P
from ..config.run_config import RunConfig
from ..costs import memory, run_schedule
from ..host.allocator import node_bytes
from ..observe.memory import PROCESS_BYTES
from ..pipeline.schedule_names import AUTO

if TYPE_CHECKING:
    from ..planner.model import System


MIB = 1 << 20


FIT = 0.9  # of a node's memory may be used by what is chosen; the system and the error of the model need the rest


MACHINE = "a64fx"  # whose costs rank the schedules everywhere, so that a dry run on another machine chooses the same


def tensor_bytes(
    run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None
) -> int:
    """Bytes that the tensors of a rank may have, the same on every rank. Collective over `world`.

    From --memory-per-rank, or where it is not given from the smallest share of any node of which the ranks share nine tenths.
    Without a world from this node's memory, for one rank.
    """
    fixed = PROCESS_BYTES + memory.attention_bytes(run, layout.tp, torch.get_num_threads())
    if own := run.training.memory_per_rank:
        return own * MIB - fixed
    samples = batches.run_length(run, layout.global_batch_size(run))[1]
    share = int(FIT * node_bytes()) - memory.data_index_bytes(run, samples)
    if world is not None:
        share = int(
            world.all_reduce(torch.tensor(share // (nodes or find_nodes(world)).ranks.size), "min")
        )
    return share - fixed


def modelled_system(layout: Layout) -> System:
    """The nodes, of one rank each, whose costs stand for those of any machine."""
    from ..planner.model import System
    from ..planner.software import THIS_PROJECT

    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)


def settle(
    run: RunConfig, layout: Layout, world: Comm | None = None, nodes: Nodes | None = None
) -> tuple[RunConfig, list[str]]:
    """The run with nothing left to choose, and the log's lines about it. Collective over `world`.

    Rank 0 chooses for all. Only --pipeline-schedule auto needs times, those of `modelled_system`: a run without it does not load
    the performance model.
    """
    ranks_schedules = run.parallel.pipeline_schedule == AUTO and layout.pp > 1
    if world is not None and nodes is not None and layout.cp > 1 and not run.data.masks_attention:
        run = between_nodes(run, layout, world, nodes)
    if not run.training.recompute_auto and not ranks_schedules:
        return run, []
    space = tensor_bytes(run, layout, world, nodes)
    if not ranks_schedules:
        return on_root(world, lambda: run_schedule.resolve_recompute(run, layout, space))
    from ..planner import search

    system = modelled_system(layout)
    return on_root(world, lambda: search.resolve(run, layout, system, space))


def between_nodes(run: RunConfig, layout: Layout, world: Comm, nodes: Nodes) -> RunConfig:
    """The run whose layers pass keys and values, which attention hides, where ranks of a sequence are on several nodes.

    Not those layers for which --cp-comm-type says otherwise. For sequences that are not cut into documents, so that ranks have the
    same work. Collective.
    """
    sharing = layout.tp * layout.cp  # ranks, which follow one another
    own = torch.tensor([world.rank // sharing])
    near = nodes.ranks.all_gather(own.new_empty(nodes.ranks.size), own)
    together = int((near == own).sum()) == sharing
    if world.all_reduce(torch.tensor(together, dtype=torch.int64), "min"):
        return run
    ways = tuple(P2P if way == EITHER else way for way in run.parallel.cp_comm_type or (EITHER,))
    return replace(run, parallel=replace(run.parallel, cp_comm_type=ways))
