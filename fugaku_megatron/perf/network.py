"""Time of MPI's and NCCL's operations from latency, bandwidth and the sharing of a node's network ports. Times are in seconds.

Collectives are rings, or recursive halving and doubling where that needs fewer latencies, as MPI libraries choose. MPI's ring does
not know nodes: it runs over all ranks at the rate of its slowest link. Software that sums inside a node first has a ring inside
and one between nodes, where every node has as many of the ranks. Sums of BF16, which MPI does not know, travel as all-to-alls.
Left out: routes through the torus; groups are assumed to be compact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import features
from ..config.layout import Layout
from .machine import GB, Machine
from .parameters import Parameters

LARGE_SUMS = ("dp", "embedding")  # communicators whose sums are large: gradients, once per iteration


@dataclass(frozen=True, kw_only=True)
class Network:
    """Communicators of one layout on one machine. ranks_per_node: ranks that share a node's ports.

    active: offers in use (config/features.py). slow: large sums at the pessimistic rate that the machine knows.
    """

    machine: Machine
    parameters: Parameters
    layout: Layout
    ranks_per_node: int
    active: frozenset[str] = frozenset()
    slow: bool = False

    def seconds(self, verb: str, group: str, bytes: int) -> float:
        """Seconds of one call of `verb` on communicator `group` (tp, pp, dp, embedding) to which each rank passes `bytes`."""
        members, together = self._group(group)
        if members == 1:
            return 0.0
        if verb == "send":
            return self._transfer(bytes, members <= together)
        size = bytes * members if verb == "all_gather" else bytes
        passes = 2 if verb == "all_reduce" else 1
        inside = min(members, together)
        levels = members == inside or features.TWO_LEVEL_SUMS in self.active and members % inside == 0
        within = self._inside_rate(shared=levels and features.NODE_SUMS in self.active)
        if not levels:
            between = self._between_rate(group, self.ranks_per_node // inside)
            rate = min(between, within) if inside > 1 else between
            return self._ring(size, members, passes, rate, self.machine.link_alpha_us)
        between = self._between_rate(group, self.ranks_per_node)
        return (self._ring(size, inside, passes, within, self.machine.intra_alpha_us)
                + self._ring(size / inside, members // inside, passes, between, self.machine.link_alpha_us))

    def messages(self, verb: str, group: str, bytes: int) -> float:
        """Seconds of a gather or a reduce_scatter as messages between each two ranks of `group`, to which each passes `bytes`.

        Nothing is passed on, so what reaches a node's ranks from other nodes crosses its ports once for each of them.
        """
        members, together = self._group(group)
        part = bytes if verb == "all_gather" else bytes / members
        inside = min(members, together)
        near, far = (inside - 1) * part, (members - inside) * part
        between, machine = self._between_rate(group, self.ranks_per_node), self.machine
        return (near / (machine.intra_gbs * GB) + far / (between * GB)
                + ((inside - 1) * machine.intra_alpha_us + (members - inside) * machine.link_alpha_us) * 1e-6)

    def _group(self, group: str) -> tuple[int, int]:
        """(members, members that share a node): tensor-parallel ranks are neighbours, then stages, then data-parallel ranks."""
        layout, ranks = self.layout, self.ranks_per_node
        below = {"tp": 1, "pp": layout.tp, "embedding": layout.tp * (layout.pp - 1), "dp": layout.tp * layout.pp}[group]
        members = {"tp": layout.tp, "pp": layout.pp, "embedding": 2 if layout.pp > 1 else 1, "dp": layout.dp}[group]
        return members, max(1, ranks // max(1, below))

    def _inside_rate(self, shared: bool) -> float:
        """GB/s of a link of a ring inside a node: fitted or measured, or that of all cores' copies, or what MPI's sums reach.

        shared: summed in memory that the ranks share.
        """
        by_mpi = self.machine.intra_reduce_gbs or self.machine.intra_gbs
        return self.parameters.intra_reduce_gbs or (self.machine.intra_gbs if shared else by_mpi)

    def _between_rate(self, group: str, rings: int) -> float:
        """GB/s of a link of a ring between nodes when `rings` of them leave a node at the same time."""
        own = self.parameters.reduce_gbs or 2 * self.machine.large_allreduce_gbs  # each link of a ring carries the vector twice
        if self.slow and group in LARGE_SUMS and self.machine.slow_reduce_gbs:
            own = min(own, self.machine.slow_reduce_gbs)
        if features.GRAD_REDUCE_IN_BF16 in self.active and group in LARGE_SUMS and self.machine.all_to_all_gbs:
            own = min(own, self.machine.all_to_all_gbs / self.ranks_per_node)
        return min(own, self.machine.injection_gbs / rings)

    @staticmethod
    def _ring(size: float, members: int, passes: int, rate: float, alpha_us: float) -> float:
        """Seconds; 0 for one member."""
        steps = passes * min(members - 1, 2 * math.ceil(math.log2(members)))
        return steps * alpha_us * 1e-6 + passes * (members - 1) / members * size / (rate * GB)

    def _transfer(self, bytes: int, within_node: bool) -> float:
        machine = self.machine
        if within_node:
            return machine.intra_alpha_us * 1e-6 + bytes / (machine.intra_gbs * GB)
        rate = min(machine.link_gbs, machine.injection_gbs / self.ranks_per_node) * self.parameters.transfer_fraction
        return machine.link_alpha_us * 1e-6 + bytes / (rate * GB)
