"""Report section on communication between ranks; with the kernels' section it describes the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import product

import torch

from ..calibration import calibrate
from ..calibration.calibrate import NetworkRates
from ..comm.base import Comm
from ..comm.job import describe
from ..comm.node import share_node
from ..config.layout import Layout
from ..host import kernels
from ..host.allocator import node_bytes
from ..host.machine import measured_name
from ..host.timing import slowest_seconds
from ..planner import machine, software
from ..planner.cost import Network
from ..text.named_files import JsonObject
from .context import Context
from .kernel_rates import affordable_sizes, measure_rates

ROUNDS = 7  # of a collective
VERBS = ("all_reduce", "all_gather", "reduce_scatter")


def communication_section(context: Context) -> JsonObject:
    """Measure messages and collectives; describe the machine. Collective."""
    world = context.world
    numbers = world.all_gather_object(context.nodes.number)
    network = calibrate.measure_network(world, numbers, context.scale.reduced)
    context.machine = describe_machine(context, network)
    rows = list(collective_rows(context)) if world.size > 1 else []
    return {
        "library": describe(world),
        "ranks": world.size,
        "nodes": context.nodes.count,
        "inside": network.inside and asdict(network.inside),
        "between": network.between and asdict(network.between),
        "thread_level": getattr(world, "thread_level", None),
        "all_reduce_gbs": network.reduce_gbs,
        "collectives": rows,
    }


def describe_machine(context: Context, network: NetworkRates) -> JsonObject:
    """Return the machine in calibrate's format. Collective."""
    own = context.compute or measure_rates(context)  # --only without the section of kernels
    here = context.nodes.ranks.all_gather_object(own)
    threads = sum(rank.threads for rank in here)
    scale = context.scale
    seconds = context.left

    def of_team() -> calibrate.Rates:
        sizes = affordable_sizes(scale, seconds)
        return calibrate.measure_gemm(sizes, scale.cold_bytes) if len(sizes) > 1 else {}

    team: calibrate.Rates = {}
    # Pinned threads would share one core.
    if context.agreed(threads > own.threads and not context.pinned):
        team = calibrate.measure_team(context.world, threads, of_team)
    data = None
    if context.world.rank == 0:
        name = measured_name(threads)
        data = calibrate.describe(name, here, team, network, node_bytes() / 2**30, "report")
    agreed: JsonObject = context.agreed(data)
    return agreed


def collective_rows(context: Context) -> Iterator[JsonObject]:
    """Measure the trainer's collectives inside nodes and over all ranks. Collective."""
    assert context.machine is not None
    host = machine.from_data("here", context.machine)
    code = software.load(software.THIS_PROJECT)
    places = {"inside": context.world}
    if context.nodes.count > 1:
        places = {"inside": context.nodes.ranks, "between": context.world}
    for place, comm in places.items():
        if context.world.all_reduce(torch.tensor(comm.size), "min") < 2:
            continue
        shared = share_node(comm, kernels)
        network = Network(
            machine=host,
            parameters=code.parameters(host),
            layout=Layout(comm.size, 1, 1, comm.size),
            ranks_per_node=context.nodes.ranks.size,
        )
        for size, verb in product(context.scale.messages, VERBS):
            if not context.agreed(context.left > 0):
                return
            elements = size // 4 // comm.size * comm.size
            seconds, by_mpi = (
                timed(context.world, collective(each, verb, elements)) for each in (shared, comm)
            )
            own = size // comm.size if verb == "all_gather" else size
            modelled = network.seconds(verb, "dp", own)
            yield {
                "verb": verb,
                "where": place,
                "ranks": comm.size,
                "bytes": size,
                "seconds": seconds,
                "mpi_seconds": by_mpi,
                "model_seconds": modelled,
                "to_model": seconds / modelled,
            }


def collective(comm: Comm, verb: str, n: int) -> Callable[[], object]:
    """Return a call of the verb on n FP32 elements in all, a multiple of the ranks."""
    whole = torch.ones(n)
    part = torch.ones(n // comm.size)
    tensors = {
        "all_reduce": (whole,),
        "reduce_scatter": (part, whole),
        "all_gather": (whole, part),
    }[verb]
    return lambda: getattr(comm, verb)(*tensors)


def timed(world: Comm, call: Callable[[], object]) -> float:
    """Return median seconds from the last entry to the last exit, after a warm-up call. Collective."""
    times = [slowest_seconds(world, call) for _ in range(1 + ROUNDS)]
    return statistics.median(times[1:])
