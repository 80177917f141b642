"""Measure this host and write it as a machine for predict and plan: clock, FMA peak, GEMM curve, bandwidth, MPI's latency and rate.

    mpiexec -n 2 python -m fugaku_megatron.perf calibrate --output host.json
    python -m fugaku_megatron.perf predict --machine host.json ...

Start as many ranks as a training run has on a node, or on several nodes: all measure at the same time, so that they share caches,
memory and network as they will. A node's rates are the sums over its ranks. Left out: 16-bit peaks (the kernels widen to FP32).
Test: pytest tests/test_perf_calibrate.py
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import check

if TYPE_CHECKING:
    from ..comm.base import Comm

SIZES = (128, 256, 512, 1024, 2048)  # of the square products
ROUNDS = 5
FMA_STEPS, CLOCK_STEPS = 2_000_000, 50_000_000
TRIAD_ELEMENTS = 1 << 25  # three arrays of 128 MiB: beyond the caches
SMALL, LARGE = 8, 4 << 20  # bytes of the messages whose times give latency and rate
USABLE = 0.9  # of a node's memory


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One rank's measurements. gemm: (n, GFLOP/s) of n x n x n products with the native kernel."""

    threads: int
    clock_ghz: float
    fma_gflops: float
    triad_gbs: float
    gemm: tuple[tuple[int, float], ...]


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

    from .. import kernels

    flops = kernels.bench_fma(FMA_STEPS)
    fma = flops / best_seconds(lambda: kernels.bench_fma(FMA_STEPS)) / 1e9
    clock = CLOCK_STEPS / best_seconds(lambda: kernels.bench_clock(CLOCK_STEPS)) / 1e9
    x, y, out = (torch.ones(TRIAD_ELEMENTS) for _ in range(3))
    triad = 12 * TRIAD_ELEMENTS / best_seconds(lambda: kernels.bench_triad(out, x, y, 2.0)) / 1e9
    return Compute(threads=torch.get_num_threads(), clock_ghz=clock, fma_gflops=fma, triad_gbs=triad,
                   gemm=tuple((n, gemm_gflops(n)) for n in SIZES))


def gemm_gflops(n: int) -> float:
    """GFLOP/s of an n x n x n product with a weight that was packed before, as in training."""
    import torch

    from .. import kernels

    x, weight, out = torch.randn(n, n), torch.randn(n, n), torch.empty(n, n)
    packed = torch.empty(kernels.packed_weight_size(n, n, weight.dtype, False), dtype=torch.uint8)
    kernels.pack_weight(weight, packed, False)
    repeats = max(1, (1 << 28) // n**3)

    def products() -> None:
        for _ in range(repeats):
            kernels.linear_forward(x, weight, out, packed=packed)

    return 2 * n**3 * repeats / best_seconds(products) / 1e9


def fit_curve(points: Sequence[tuple[int, float]], peak_gflops: float) -> tuple[float, float]:
    """(maximum, half) of share = maximum / (1 + half / n): least squares of relative errors over a grid of halves."""
    best = (math.inf, 0.0, 0.0)
    for step in range(0, 201):
        half = 2000.0 ** (step / 200)
        shapes = [(gflops / peak_gflops, 1 / (1 + half / n)) for n, gflops in points]
        maximum = sum(shape / share for share, shape in shapes) / sum((shape / share) ** 2 for share, shape in shapes)
        error = sum((maximum * shape / share - 1) ** 2 for share, shape in shapes)
        best = min(best, (error, maximum, half))
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

    vector = torch.zeros(LARGE)
    return 4 * LARGE / best_seconds(lambda: world.all_reduce(vector)) / 1e9


def describe(name: str, ranks: Sequence[Compute], inside: Messages | None, between: Messages | None, reduce_gbs: float,
             memory_gib: float) -> dict[str, Any]:
    """The machine's file. ranks: those of one node; inside, between: messages within a node and across nodes."""
    first, peak = ranks[0], sum(r.fma_gflops for r in ranks)
    maximum, half = fit_curve(first.gemm, first.fma_gflops)
    measured = "measured by perf calibrate"
    link, intra = between or inside, inside or between
    assumed = {True: measured, False: "not measured: all ranks shared one node; its own messages' value"}
    curve = [{"threads": first.threads, "maximum": maximum, "half": half, "exponent": 1.0}]
    values = {
        "units": (1, "not measured"), "threads": (sum(r.threads for r in ranks), measured),
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
        "gemm_curves": (curve, f"{measured}: native kernel, " + ", ".join(f"{n}: {g:.0f} GFLOP/s" for n, g in first.gemm)),
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

    from ..runtime import cpu_model

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
    if world.rank:
        return
    node = [c for host, c in zip(hosts, computed) if host == hosts[0]]
    name = f"{cpu_model()}, {sum(c.threads for c in node)} threads, measured {time.strftime('%Y-%m-%d')}"
    data = describe(name, node, inside, between, reduce, psutil.virtual_memory().total / 2**30)
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
    check(args.output.parent.is_dir(), f"--output {args.output}: {args.output.parent} is not a directory")
    run_or_abort(lambda world: calibrate(world, args.output))
    return 0
