"""Measure this host and write it as a machine for predict and plan: clock, FMA peak, bandwidth, kernels, MPI latency and rates.

    mpiexec -n 2 fugaku-megatron calibrate --output host.json
    fugaku-megatron predict --machine host.json ...

Start as many ranks as a training run has: all measure at the same time and share caches, memory and network as in training.
A node's rates are the sums over its ranks; matmuls are also measured by one rank with all threads of the node.
Left out: matmuls in 16 bits, which predict counts as FP32's.
"""

from __future__ import annotations

import argparse
import json
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..cli.output_files import check_file, writing
from ..config.fields import check
from ..text.written_files import named_file

if TYPE_CHECKING:
    from ..comm.base import Comm
    from .calibrate import Compute, Scale

MIN_CLOCK_SHARE = 0.8  # of the clock that the system reports, or of the fastest core's


def disturbances(ranks: Sequence[Compute], nominal_ghz: float) -> list[str]:
    """Return a line for each sign of other processes' disturbance. nominal_ghz: 0 if unknown"""
    clocks = [rank.clock_ghz for rank in ranks]
    lines = []
    if nominal_ghz and min(clocks) < MIN_CLOCK_SHARE * nominal_ghz:
        lines.append(
            f"a core was measured at {min(clocks):.2f} GHz, the system says {nominal_ghz:.2f} GHz"
        )
    if min(clocks) < MIN_CLOCK_SHARE * max(clocks):
        lines.append(f"cores were measured at {min(clocks):.2f} to {max(clocks):.2f} GHz")
    return [
        f"note: {line}: other processes may have disturbed the measurement; repeat it on an idle machine"
        for line in lines
    ]


def check_world(world: Comm) -> None:
    check(
        world.size > 1,
        "fugaku-megatron calibrate measures MPI too: start it as mpiexec -n 2 fugaku-megatron calibrate",
    )


def calibrate(world: Comm, output: Path, scale: Scale) -> None:
    """Measure and write `output`. Collective. ValueError for one rank."""
    from ..host.machine import measured_name
    from . import calibrate as rates

    check_world(world)
    hosts = world.all_gather_object(socket.gethostname())
    world.barrier()
    computed = world.all_gather_object(rates.measure_compute(scale))
    network = rates.measure_network(world, hosts, scale.reduced)
    node = [c for host, c in zip(hosts, computed) if host == hosts[0]]
    threads = sum(c.threads for c in node)
    team = rates.measure_team(
        world, threads, partial(rates.measure_gemm, scale.sizes, scale.cold_bytes)
    )
    if world.rank:
        return
    memory_gib = psutil.virtual_memory().total / 2**30
    data = rates.describe(measured_name(threads), node, team, network, memory_gib)
    with writing("--output", output), open(output, "w", opener=named_file) as file:
        file.write(json.dumps(data, indent=1) + "\n")
    try:
        nominal_ghz = psutil.cpu_freq().current / 1e3
    except (AttributeError, NotImplementedError, OSError):  # unknown
        nominal_ghz = 0.0
    print(f"wrote {output}", *disturbances(node, nominal_ghz), sep="\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("host.json"),
        metavar="FILE",
        help="the machine's file (default: host.json)",
    )


def main(args: argparse.Namespace) -> int:
    from ..comm.job import init, run_or_abort
    from .calibrate import Scale

    check_file("--output", args.output)
    check(args.output.suffix == ".json", f"--output {args.output}: pass a name that ends in .json")
    world = init()
    check_world(world)  # the mistake of a single process must not end a program that called this
    run_or_abort(lambda world: calibrate(world, args.output, Scale()), world)
    return 0
