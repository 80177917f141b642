"""This machine's bounds on a plan's automatic choices: node memory, ranks on a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..comm.agreement import Nodes, find_nodes, on_root
from ..comm.base import Comm
from ..config import batches
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import memory
from ..costs.attention import attention_workspace_bytes
from ..host.allocator import node_bytes
from ..observe.resources.memory_watch import PROCESS_BYTES

T = TypeVar("T")

MIB = 1 << 20
# Share of a node's memory that a choice may use: the system and the error of the model need the rest.
FIT = 0.9


@dataclass(frozen=True)
class MachineLimits:
    """Limits of `world`'s nodes; without a world, of this node for one rank."""

    world: Comm | None = None
    nodes: Nodes | None = None

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
        """Return --memory-per-rank, or the smallest share of any node, whose ranks share nine tenths of it."""
        fixed = PROCESS_BYTES + attention_workspace_bytes(config, torch.get_num_threads())
        if given := config.training.memory_per_rank:
            return given * MIB - fixed
        samples = batches.run_length(config, layout.global_batch_size(config))[1]
        share = int(FIT * node_bytes()) - memory.data_index_bytes(config, samples)
        if self.world is not None:
            ranks = (self.nodes or find_nodes(self.world)).ranks.size
            share = int(self.world.all_reduce(torch.tensor(share // ranks), "min"))
        return share - fixed

    def choose(self, choice: Callable[[], T]) -> T:
        return on_root(self.world, choice)
