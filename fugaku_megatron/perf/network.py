"""Time of MPI's and NCCL's operations from latency, bandwidth and the sharing of a node's network ports. Times are in seconds.

Collectives are rings, or recursive halving and doubling where that needs fewer latencies, as MPI libraries choose; a group with
several ranks on a node reduces inside the node first. Left out: routes through the torus; groups are assumed to be compact.
Test: pytest tests/test_perf_network.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..run.accounting import Layout
from .machine import GB, Machine
from .parameters import Parameters


@dataclass(frozen=True, kw_only=True)
class Network:
    """Communicators of one layout on one machine. ranks_per_node: ranks that share a node's ports."""

    machine: Machine
    parameters: Parameters
    layout: Layout
    ranks_per_node: int

    def seconds(self, verb: str, group: str, bytes: int) -> float:
        """Seconds of one call of `verb` on communicator `group` (tp, pp, dp, embedding) to which each rank passes `bytes`."""
        members, together = self._group(group)
        if members == 1:
            return 0.0
        if verb == "send":
            return self._transfer(bytes, members <= together)
        size = bytes * members if verb == "all_gather" else bytes
        passes = 2 if verb == "all_reduce" else 1
        inside, outside = min(members, together), -(-members // together)
        seconds = self._ring(size, inside, passes, self._intra_rate, self.machine.intra_alpha_us) if inside > 1 else 0.0
        if outside > 1:
            seconds += self._ring(size / inside, outside, passes, self._inter_rate, self.machine.link_alpha_us)
        return seconds

    def _group(self, group: str) -> tuple[int, int]:
        """(members, members that share a node): tensor-parallel ranks are neighbours, then stages, then data-parallel ranks."""
        layout, ranks = self.layout, self.ranks_per_node
        below = {"tp": 1, "pp": layout.tp, "embedding": layout.tp * (layout.pp - 1), "dp": layout.tp * layout.pp}[group]
        members = {"tp": layout.tp, "pp": layout.pp, "embedding": 2 if layout.pp > 1 else 1, "dp": layout.dp}[group]
        return members, max(1, ranks // max(1, below))

    @property
    def _intra_rate(self) -> float:
        return self.parameters.intra_reduce_gbs or self.machine.intra_gbs

    @property
    def _inter_rate(self) -> float:
        own = 2 * self.machine.large_allreduce_gbs  # each link of a ring carries the vector twice
        return min(self.parameters.reduce_gbs or own, self.machine.injection_gbs / self.ranks_per_node)

    @staticmethod
    def _ring(size: float, members: int, passes: int, rate: float, alpha_us: float) -> float:
        steps = passes * min(members - 1, 2 * math.ceil(math.log2(members)))
        return steps * alpha_us * 1e-6 + passes * (members - 1) / members * size / (rate * GB)

    def _transfer(self, bytes: int, within_node: bool) -> float:
        machine = self.machine
        if within_node:
            return machine.intra_alpha_us * 1e-6 + bytes / (machine.intra_gbs * GB)
        rate = min(machine.link_gbs, machine.injection_gbs / self.ranks_per_node) * self.parameters.transfer_fraction
        return machine.link_alpha_us * 1e-6 + bytes / (rate * GB)
