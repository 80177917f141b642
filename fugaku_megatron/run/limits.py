"""A plan's automatic choices within this machine's bounds: node memory, ranks on a node."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..comm.agreement import Nodes, find_nodes, on_root
from ..comm.base import Comm
from ..config import batches
from ..config.layout import Layout
from ..config.parallel import EITHER, P2P
from ..config.run_config import RunConfig
from ..costs import memory, run_schedule
from ..costs.attention import attention_workspace_bytes
from ..costs.plan import Plan
from ..host.allocator import node_bytes
from ..observe.resources.memory_watch import PROCESS_BYTES
from ..pipeline.schedule_names import AUTO

if TYPE_CHECKING:
    from ..planner.system import System

MIB = 1 << 20
# Share of a node's memory that a choice may use: the system and the error of the model need the rest.
FIT = 0.9
# Costs of this machine rank the schedules everywhere, so that a dry run on another machine makes the same choice.
MACHINE = "a64fx"


class MachineLimits(NamedTuple):
    """Limits of `world`'s nodes; without a world, of this node for one rank."""

    world: Comm | None = None
    nodes: Nodes | None = None

    def resolve(self, plan: Plan) -> Plan:
        """Return the plan with every automatic choice made. Collective.

        Only --pipeline-schedule auto loads the performance model.
        """
        config = plan.config
        layout = plan.layout
        # Keys and values pass between nodes, behind attention, in layers without --cp-comm-type; not if sequences are cut into
        # documents, with which ranks have unequal work.
        if layout.cp > 1 and not config.data.masks_attention and self.sequence_spans_nodes(layout):
            given = config.parallel.cp_comm_type or (EITHER,)
            resolved = tuple(P2P if comm_type == EITHER else comm_type for comm_type in given)
            config = replace(config, parallel=replace(config.parallel, cp_comm_type=resolved))
        choices: list[str] = []
        ranks_schedules = config.parallel.pipeline_schedule == AUTO and layout.pp > 1
        if ranks_schedules or config.training.recompute_auto:
            space = self.tensor_bytes(config, layout)
            resolve = partial(run_schedule.resolve_recompute, config, layout, space)
            if ranks_schedules:
                from ..planner import search

                system = modelled_system(layout)
                resolve = partial(search.resolve, config, layout, system, space)
            config, choices = on_root(self.world, resolve)
        return replace(plan, config=config, choices=tuple(choices))

    def sequence_spans_nodes(self, layout: Layout) -> bool:
        if self.world is None or self.nodes is None:
            return False
        sharing = layout.tp * layout.cp  # consecutive ranks
        own = torch.tensor([self.world.rank // sharing])
        here = self.nodes.ranks
        sequences = here.all_gather(own.new_empty(here.size), own)
        together = torch.tensor(int((sequences == own).sum()) == sharing, dtype=torch.int64)
        return not self.world.all_reduce(together, "min")

    def tensor_bytes(self, config: RunConfig, layout: Layout) -> int:
        """Return the bytes that a rank's tensors may have, the same on every rank.

        --memory-per-rank, or the smallest share of any node, whose ranks share nine tenths of it
        """
        fixed = PROCESS_BYTES + attention_workspace_bytes(config, torch.get_num_threads())
        if given := config.training.memory_per_rank:
            return given * MIB - fixed
        samples = batches.run_length(config, layout.global_batch_size(config))[1]
        share = int(FIT * node_bytes()) - memory.data_index_bytes(config, samples)
        if self.world is not None:
            ranks = (self.nodes or find_nodes(self.world)).ranks.size
            share = int(self.world.all_reduce(torch.tensor(share // ranks), "min"))
        return share - fixed


def modelled_system(layout: Layout) -> System:
    """Return nodes of one rank each, a model of any machine."""
    from ..planner.software import THIS_PROJECT
    from ..planner.system import System

    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)
