"""A machine's nodes and software, for a modelled run."""

from __future__ import annotations

from dataclasses import dataclass

from ..config.fields import check
from . import machine, software
from .machine import GIB, MIB, Machine
from .software import MemoryParameters, Parameters, Software


@dataclass(frozen=True, kw_only=True)
class System:
    """Machine and software of a modelled job, with nodes and ranks."""

    machine: Machine
    software: Software
    nodes: int
    ranks_per_node: int

    @staticmethod
    def from_names(
        machine_name: str,
        software_name: str,
        nodes: int,
        ranks_per_node: int | None = None,
        ghz: float | None = None,
        eco: bool = False,
    ) -> System:
        """Load machine and software. ValueError for a clock or ranks that a node does not have."""
        host = machine.load(machine_name).at(ghz, eco)
        code = software.load(software_name)
        ranks = host.ranks_per_node if ranks_per_node is None else ranks_per_node
        check(nodes >= 1, f"--nodes is {nodes}: pass a number above 0")
        check(
            1 <= ranks <= host.max_ranks,
            f"--ranks-per-node is {ranks}: pass 1 to {host.max_ranks}, what a node of {host.name} has",
        )
        return System(machine=host, software=code, nodes=nodes, ranks_per_node=ranks)

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def parameters(self) -> Parameters:
        return self.software.parameters(self.machine)

    @property
    def memory(self) -> MemoryParameters:
        return self.software.memory(self.machine)

    @property
    def limit_mib(self) -> float:
        """A rank's memory limit in MiB; caching allocators first return unused blocks."""
        room: float = 1 - self.software.counts["reclaimed"]
        return self.machine.memory_gib * GIB / MIB / self.ranks_per_node / room


def start_up(nodes: int) -> float:
    """Return the seconds before the first iteration.

    MPI's start (Fugaku MPI performance data: 2.8 s on 432 nodes, 13.5 s on 27648), an assumed 5
    minutes for staging, Python and the data index, and 2 minutes per 1000 nodes.
    """
    mpi: float = 2.8 * (nodes / 432) ** 0.38
    return 300 + 120 * nodes / 1000 + mpi
