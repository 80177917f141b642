"""Measure this host and write it as a machine for predict and plan: clock, FMA peak, bandwidth, kernels, MPI's latency and rates.

    mpiexec -n 2 python -m fugaku_megatron.perf calibrate --output host.json
    python -m fugaku_megatron.perf predict --machine host.json ...

Start as many ranks as a training run has on a node, or on several nodes: all measure at the same time, so that they share caches,
memory and network as they will. A node's rates are the sums over its ranks; products are measured by one rank with all threads of
the node, too. Left out: 16-bit peaks (the kernels widen to FP32), the kernels' measurements themselves (host_kernels.py).
Test: pytest tests/test_perf_calibrate.py
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..run.config import check
from ..run.outputs import check_file, writing

if TYPE_CHECKING:
    from ..comm.base import Comm

SIZES = (128, 256, 512, 1024, 2048)  # of the square products
ROUNDS = 5
FMA_STEPS, CLOCK_STEPS = 2_000_000, 50_000_000
TRIAD_ELEMENTS = 1 << 25  # three arrays of 128 MiB: beyond the caches
SMALL, LARGE = 8, 4 << 20  # bytes of the messages whose times give latency and rate
REDUCED = 128 << 20  # bytes of the vector whose all-reduce is timed: as gradients, beyond the caches
USABLE = 0.9  # of a node's memory


Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One rank's measurements. gemm: (n, GFLOP/s) of n x n x n products; attention: (s, forward's, backward's) over s tokens.

    elementwise_gbs: the optimizer's update. call_us: an operator call apart from its data. iteration_s: an iteration apart from its
    calls. process_mib: before any tensor.
    """

    threads: int
    clock_ghz: float
    fma_gflops: float
    triad_gbs: float
    gemm: Points
    attention: tuple[tuple[int, float, float], ...]
    elementwise_gbs: float
    call_us: float
    iteration_s: float
    process_mib: float


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Latency in us, rate in GB/s of one pair of ranks; rate of a large all-reduce over all ranks."""

    alpha_us: float
    gbs: float


def best_seconds(f: Callable[[], object], rounds: int = ROUNDS) -> float:
    """The fastest of a few calls, after one that warms up."""
    f()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_compute() -> Compute:
    """This rank's threads."""
    import torch

    from ..host import kernels
    from ..logs.metrics import peak_memory_mib
    from . import host_kernels

    process = peak_memory_mib()
    flops = kernels.bench_fma(FMA_STEPS)
    fma = flops / best_seconds(lambda: kernels.bench_fma(FMA_STEPS)) / 1e9
    clock = CLOCK_STEPS / best_seconds(lambda: kernels.bench_clock(CLOCK_STEPS)) / 1e9
    x, y, out = (torch.ones(TRIAD_ELEMENTS) for _ in range(3))
    triad = 12 * TRIAD_ELEMENTS / best_seconds(lambda: kernels.bench_triad(out, x, y, 2.0)) / 1e9
    call_us, iteration_s = host_kernels.step_overhead()
    return Compute(threads=torch.get_num_threads(), clock_ghz=clock, fma_gflops=fma, triad_gbs=triad, gemm=measure_gemm(),
                   attention=tuple((s, *host_kernels.attention_gflops(s)) for s in host_kernels.LENGTHS), call_us=call_us,
                   elementwise_gbs=host_kernels.elementwise_gbs(), iteration_s=iteration_s, process_mib=process)


def measure_gemm() -> Points:
    """Square products of every size."""
    from . import host_kernels

    return tuple((n, host_kernels.gemm_gflops(n)) for n in SIZES)


def measure_team(world: Comm, threads: int) -> Points:
    """Square products by rank 0 with `threads` threads, while the node's other ranks sleep; () on them. Collective."""
    import torch

    handle, name = tempfile.mkstemp() if world.rank == 0 else (None, None)
    awake = Path(world.broadcast_object(name))
    if world.rank:
        while awake.exists():  # a barrier would poll, and take a core
            time.sleep(0.01)
        return ()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        return measure_gemm()
    finally:
        torch.set_num_threads(before)
        os.close(handle)
        awake.unlink()


def fit_curve(points: Sequence[tuple[int, float]], peak_gflops: float) -> tuple[float, float]:
    """(maximum, half) of share = maximum / (1 + half / n), the least sum of relative errors over a grid of halves.

    Errors are not squared: a size that another process disturbed would bend the whole curve.
    """
    best = (math.inf, 0.0, 0.0)
    for step in range(0, 201):
        half = 2000.0 ** (step / 200)
        ratios = [peak_gflops / gflops / (1 + half / n) for n, gflops in points]
        for ratio in ratios:  # the best maximum meets one of the points
            best = min(best, (sum(abs(other / ratio - 1) for other in ratios), 1 / ratio, half))
    return min(best[1], 1.0), best[2]


def ping_pong(world: Comm, partner: int, bytes: int) -> float:
    """Seconds of one message between rank 0 and `partner`; meaningless on other ranks."""
    import torch

    tensor, repeats = torch.zeros(bytes, dtype=torch.uint8), 100 if bytes < 1 << 16 else 10
    world.barrier()
    if world.rank not in (0, partner):
        return 0.0

    def exchange() -> None:
        for _ in range(repeats):
            if world.rank == 0:
                world.send(tensor, partner)
                world.recv(tensor, partner)
            else:
                world.recv(tensor, 0)
                world.send(tensor, 0)

    return best_seconds(exchange) / repeats / 2


def measure_messages(world: Comm, partner: int) -> Messages:
    """Latency and rate between rank 0 and `partner`."""
    small, large = ping_pong(world, partner, SMALL), ping_pong(world, partner, LARGE)
    return Messages(alpha_us=small * 1e6, gbs=LARGE / max(large - small, 1e-12) / 1e9)


def all_reduce_gbs(world: Comm) -> float:
    """Bytes of the vector over the time of a large all-reduce over all ranks."""
    import torch

    vector = torch.zeros(REDUCED // 4)
    return REDUCED / best_seconds(lambda: world.all_reduce(vector)) / 1e9


def native(ranks: Sequence[Compute], reduce_gbs: float | None) -> dict[str, float]:
    """What this project's kernels reach here, under the names of parameters.Parameters. reduce_gbs: all-reduce within the node."""
    first, members = ranks[0], len(ranks)
    found = {"call_us": first.call_us, "iteration_s": first.iteration_s,
             "elementwise_fraction": first.elementwise_gbs / first.triad_gbs}
    for name, column in (("attention_forward", 1), ("attention_backward", 2)):
        points = [(row[0], row[column]) for row in first.attention]
        found[name], found[f"{name}_half"] = fit_curve(points, first.fma_gflops)
    if reduce_gbs is not None and members > 1:
        found["intra_reduce_gbs"] = 2 * (members - 1) / members * reduce_gbs  # of a ring's link
    return found


def gemm_curve(threads: int, points: Points, peak_gflops: float) -> dict[str, float]:
    """A curve as machines have it."""
    maximum, half = fit_curve(points, peak_gflops)
    return {"threads": threads, "maximum": maximum, "half": half, "exponent": 1.0}


def describe(name: str, ranks: Sequence[Compute], team: Points, inside: Messages | None, between: Messages | None,
             reduce_gbs: float, memory_gib: float) -> dict[str, Any]:
    """The machine's file. ranks: those of one node; team: products with all its threads in one rank; inside, between: messages
    within a node and across nodes."""
    first, peak, threads = ranks[0], sum(r.fma_gflops for r in ranks), sum(r.threads for r in ranks)
    measured = "measured by perf calibrate"
    link, intra = between or inside, inside or between
    assumed = {True: measured, False: "not measured: all ranks shared one node; its own messages' value"}
    curves = [gemm_curve(first.threads, first.gemm, first.fma_gflops)]
    curves += [gemm_curve(threads, team, peak)] if threads > first.threads else []
    shown = ", ".join(f"{n}: {g:.0f}" for n, g in first.gemm) + "; one rank with all threads " + ", ".join(
        f"{n}: {g:.0f}" for n, g in team)
    values = {
        "units": (1, "not measured"), "threads": (threads, measured),
        "ranks_per_node": (len(ranks), measured),
        "nominal_ghz": (first.clock_ghz, measured), "clocks_ghz": ([first.clock_ghz], measured),
        "clock_gain_limit": (1.0, "one clock"), "eco_fraction": (1.0, "no power modes"),
        "peak_tflops": ({name: peak / 1e3 for name in ("fp32", "fp16", "bf16")},
                        f"{measured}: FP32 multiply-adds; 16 bits are widened"),
        "memory_gib": (memory_gib * USABLE, f"{USABLE:.0%} of what the system reports"),
        "stream_gbs": (sum(r.triad_gbs for r in ranks), measured), "link_gbs": (link.gbs, assumed[between is not None]),
        "injection_gbs": (link.gbs * (1 if between else len(ranks)), assumed[between is not None]),
        "link_alpha_us": (link.alpha_us, assumed[between is not None]), "large_allreduce_gbs": (reduce_gbs, measured),
        "intra_gbs": (intra.gbs, measured), "intra_alpha_us": (intra.alpha_us, measured),
        "gemm_curves": (curves, f"{measured}: native kernels, operands not in the caches, GFLOP/s at {shown}"),
        "native": (native(ranks, None if between else reduce_gbs), measured), "process_mib": (first.process_mib, measured),
        "host_factor": (1.0, "none known"),
    }
    return {"title": name, "kind": "cpu",
            "constants": {key: {"value": _short(value), "source": source} for key, (value, source) in values.items()}}


def _short(value: Any) -> Any:
    """Four digits of every number."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, list):
        return [_short(v) for v in value]
    return {k: _short(v) for k, v in value.items()} if isinstance(value, dict) else value


def calibrate(world: Comm, output: Path) -> None:
    """Measure and write. Collective. Raises ValueError for a world of one."""
    import psutil

    from ..host.runtime import cpu_model

    check(world.size > 1, "perf calibrate measures MPI too: start it as mpiexec -n 2 python -m fugaku_megatron.perf calibrate")
    hosts = world.all_gather_object(socket.gethostname())
    world.barrier()
    mine = measure_compute()
    computed = world.all_gather_object(mine)
    near = next((r for r in range(1, world.size) if hosts[r] == hosts[0]), None)
    far = next((r for r in range(1, world.size) if hosts[r] != hosts[0]), None)
    inside = None if near is None else measure_messages(world, near)
    between = None if far is None else measure_messages(world, far)
    reduce = all_reduce_gbs(world)
    node = [c for host, c in zip(hosts, computed) if host == hosts[0]]
    team = measure_team(world, sum(c.threads for c in node))
    if world.rank:
        return
    name = f"{cpu_model()}, {sum(c.threads for c in node)} threads, measured {time.strftime('%Y-%m-%d')}"
    data = describe(name, node, team, inside, between, reduce, psutil.virtual_memory().total / 2**30)
    with writing("--output", output):
        output.write_text(json.dumps(data, indent=1) + "\n")
    for key, constant in data["constants"].items():
        print(f"{key:<20} {constant['value']}   ({constant['source']})")
    print(f"wrote {output}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("host.json"), metavar="FILE",
                        help="the machine's file (default: host.json)")


def main(args: argparse.Namespace) -> int:
    """Calibrate; every rank of mpiexec comes here."""
    from ..comm.launch import run_or_abort

    check(args.output.suffix == ".json", f"--output {args.output}: give a name that ends in .json")
    check_file("--output", args.output)
    run_or_abort(lambda world: calibrate(world, args.output))
    return 0
