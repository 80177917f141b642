"""Rates of one rank, of a node and of its network, and the machine's description that follows from them."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..comm.base import Comm
from ..host.allocator import peak_memory_mib
from ..host.machine import clock_ghz, fma_peak_gflops, triad_gbs
from ..host.timing import best_seconds
from ..planner.machine import FP32, INT8
from ..text.numbers import rounded
from . import host_kernels

FMA_STEPS = 2_000_000  # iterations of the FMA loop
CLOCK_STEPS = 25  # iterations of the clock loop for each of the FMA loop
MESSAGE_ROUNDS = 5
SMALL = 8  # bytes of the message that measures latency
LARGE = 4 << 20  # bytes of the message that measures bandwidth
ALONE_ALPHA_US = 1.0  # assumed latency if there is one rank
ALONE_COPIES = 4  # memory passes of its messages: two copies, each reads and writes
USABLE = 0.9  # share of a node's memory that a job may use
NEXT_LENGTH = 4  # times the attention of a length, for the next one, which is twice as long

Points = tuple[tuple[int, float], ...]  # (n, GFLOP/s) of n x n x n matmuls
Rates = dict[str, Points]  # by precision
PRECISIONS = (FP32, INT8)  # that predict distinguishes


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes of the measured operations, beyond the caches.

    sizes: square matmuls; cold_bytes: all their operands
    lengths: sequences of attention
    triad, elements: vectors of STREAM and of the optimizer
    reduced: bytes of the large all-reduce
    fma_steps: iterations of the FMA loop
    """

    sizes: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    cold_bytes: int = 256 << 20
    lengths: tuple[int, ...] = (512, 1024, 2048)
    triad: int = 1 << 25
    elements: int = 1 << 24
    reduced: int = 128 << 20
    rounds: int = 5
    fma_steps: int = FMA_STEPS


@dataclass(frozen=True, kw_only=True)
class Compute:
    """One rank's measurements.

    attention: (s, forward GFLOP/s, backward GFLOP/s) over s tokens, without dropout
    fma_gflops, int8_gops: peaks, of multiply-adds in a loop
    call_us: an operator call without its data
    iteration_s: an iteration without its operator calls
    process_mib: without tensors
    dropout_flops, bf16x3: see planner.software
    """

    threads: int
    clock_ghz: float
    fma_gflops: float
    int8_gops: float
    triad_gbs: float
    gemm: Rates
    attention: tuple[tuple[int, float, float], ...]
    dropout_flops: float
    elementwise_gbs: float
    call_us: float
    iteration_s: float
    process_mib: float
    bf16x3: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Latency in us and GB/s between two ranks, one direction."""

    alpha_us: float
    gbs: float


class NetworkRates(NamedTuple):
    """Measured communication.

    inside, between: messages within a node and between nodes; None for one rank, whose messages are
        copies in memory
    """

    inside: Messages | None = None
    between: Messages | None = None
    reduce_gbs: float | None = None


def measure_compute(
    scale: Scale,
    precisions: Sequence[str] = PRECISIONS,
    choose_sizes: Callable[[], Sequence[int]] | None = None,
    left: Callable[[], float] = lambda: math.inf,
) -> Compute:
    """Measure this rank's FLOP rates, memory bandwidth, kernel rates and step overhead.

    choose_sizes: called before the matmuls; None: the scale's sizes
    left: seconds; longer sequences need half of them
    """
    process = peak_memory_mib()
    fma = fma_peak_gflops(1 + scale.rounds, scale.fma_steps)
    clock = clock_ghz(CLOCK_STEPS * scale.fma_steps)
    triad = triad_gbs(scale.triad)
    attention = []
    for s in scale.lengths:
        before = left()
        attention.append((s, *host_kernels.attention_gflops(s)))
        if left() / 2 < NEXT_LENGTH * (before - left()):
            break
    sizes = choose_sizes() if choose_sizes else scale.sizes
    gemm = measure_gemm(sizes, scale.cold_bytes, precisions)
    call_us, iteration_s = host_kernels.step_overhead()
    return Compute(
        threads=torch.get_num_threads(),
        clock_ghz=clock,
        fma_gflops=fma,
        int8_gops=fma_peak_gflops(1 + scale.rounds, scale.fma_steps, int8=True),
        triad_gbs=triad,
        gemm=gemm,
        attention=tuple(attention),
        call_us=call_us,
        dropout_flops=host_kernels.dropout_flops(attention[:2][-1][0], fma),
        elementwise_gbs=host_kernels.elementwise_gbs(scale.elements),
        iteration_s=iteration_s,
        process_mib=process,
        bf16x3=host_kernels.bf16x3_share(),
    )


def measure_gemm(
    sizes: Sequence[int], cold_bytes: int, precisions: Sequence[str] = PRECISIONS
) -> Rates:
    """Return (n, GFLOP/s) of n x n x n matmuls by precision. cold_bytes: as in `gemm_gflops`"""
    return {
        precision: tuple((n, host_kernels.gemm_gflops(n, cold_bytes, precision)) for n in sizes)
        for precision in precisions
    }


def measure_team(world: Comm, threads: int, measure: Callable[[], Rates]) -> Rates:
    """Measure square matmuls on rank 0 with `threads` threads; the node's other ranks sleep and return {}. Collective."""
    name = None
    if world.rank == 0:
        handle, name = tempfile.mkstemp()
        os.close(handle)
    awake = Path(world.broadcast_object(name))
    if world.rank:
        while awake.exists():  # a barrier would poll and occupy a core
            time.sleep(0.01)
        return {}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        return measure()
    finally:
        torch.set_num_threads(before)
        awake.unlink()


def fit_curve(points: Sequence[tuple[int, float]], peak_gflops: float) -> tuple[float, float]:
    """Return (maximum, half) of share = maximum / (1 + half / n) with the smallest sum of absolute relative errors.

    A disturbed measurement would bend a least-squares curve.
    """
    best = (math.inf, 0.0, 0.0)
    for step in range(0, 201):
        half = 2000.0 ** (step / 200)
        ratios = [peak_gflops / gflops / (1 + half / n) for n, gflops in points]
        for ratio in ratios:  # the best curve goes through one of the points
            best = min(best, (sum(abs(other / ratio - 1) for other in ratios), 1 / ratio, half))
    return min(best[1], 1.0), best[2]


def ping_pong(world: Comm, partner: int, bytes: int) -> float:
    """Return seconds of a message between rank 0 and `partner`; meaningless on others. Collective."""
    tensor = torch.zeros(bytes, dtype=torch.uint8)
    repeats = 100 if bytes < 1 << 16 else 10
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

    return best_seconds([exchange], MESSAGE_ROUNDS) / repeats / 2


def measure_messages(world: Comm, partner: int) -> Messages:
    """Measure latency and rate between rank 0 and `partner`. Collective.

    A disturbed small message takes at most half of the large one's time.
    """
    small = ping_pong(world, partner, SMALL)
    large = ping_pong(world, partner, LARGE)
    return Messages(alpha_us=small * 1e6, gbs=LARGE / max(large - small, large / 2) / 1e9)


def measure_network(world: Comm, places: Sequence[object], reduced: int) -> NetworkRates:
    """Measure messages of rank 0 to a rank on its node and to a rank on another, and an all-reduce. Collective.

    places: each rank's node
    reduced: bytes of the all-reduce
    """

    def messages(inside: bool) -> Messages | None:
        for rank in range(1, world.size):
            if (places[rank] == places[0]) == inside:
                return measure_messages(world, rank)
        return None

    inside = messages(inside=True)
    between = messages(inside=False)
    return NetworkRates(inside, between, all_reduce_gbs(world, reduced) if world.size > 1 else None)


def all_reduce_gbs(world: Comm, bytes: int) -> float:
    """Return GB/s of a large all-reduce: vector bytes over time. Collective."""
    vector = torch.zeros(bytes // 4)
    best = best_seconds([lambda: world.all_reduce(vector)], MESSAGE_ROUNDS)
    return bytes / best / 1e9


def native(ranks: Sequence[Compute], reduce_gbs: float | None) -> dict[str, float]:
    """Return planner.software.Parameters on this host, by name.

    reduce_gbs: within the node, None if it crossed nodes
    """
    first = ranks[0]
    members = len(ranks)
    values = {
        "call_us": first.call_us,
        "dropout_flops": first.dropout_flops,
        "iteration_s": first.iteration_s,
        "elementwise_fraction": first.elementwise_gbs / first.triad_gbs,
    }
    for name, column in (("attention_forward", 1), ("attention_backward", 2)):
        points = [(row[0], row[column]) for row in first.attention]
        values[name], values[f"{name}_half"] = fit_curve(points, first.fma_gflops)
    if first.bf16x3:
        values["bf16x3"] = first.bf16x3
    if reduce_gbs is not None and members > 1:
        values["intra_reduce_gbs"] = 2 * (members - 1) / members * reduce_gbs  # a link of the ring
    return values


def gemm_curve(threads: int, points: Points, peak_gflops: float) -> dict[str, float]:
    maximum, half = fit_curve(points, peak_gflops)
    return {"threads": threads, "maximum": maximum, "half": half, "exponent": 1.0}


def describe(
    name: str,
    ranks: Sequence[Compute],
    team: Rates,
    network: NetworkRates,
    memory_gib: float,
    command: str = "calibrate",
) -> dict[str, Any]:
    """Build a machine description: the value and the source of every constant.

    ranks: measurements of all ranks on the node
    team: matmul rates of one rank with all threads of the node
    """
    first = ranks[0]
    threads = sum(r.threads for r in ranks)
    measured = f"measured by fugaku-megatron {command}"
    inside, between, reduce_gbs = network
    copies = Messages(alpha_us=ALONE_ALPHA_US, gbs=first.triad_gbs / ALONE_COPIES)
    link = between or inside or copies
    intra = inside or between or copies
    alone = "not measured: one rank; two copies in its memory"
    link_source = alone
    if between:
        link_source = measured
    elif inside:
        link_source = "not measured: all ranks shared one node; its own messages' value"
    intra_source = measured if inside or between else alone
    if threads == first.threads:
        team = {}
    own = {FP32: first.fma_gflops, INT8: first.int8_gops}
    peaks = {FP32: sum(r.fma_gflops for r in ranks), INT8: sum(r.int8_gops for r in ranks)}
    curves = {
        precision: [gemm_curve(first.threads, first.gemm[precision], peak)]
        for precision, peak in own.items()
    }
    for precision, points in team.items():
        curves[precision].append(gemm_curve(threads, points, peaks[precision]))
    shown = {
        precision: "; one rank with all threads ".join(
            ", ".join(f"{n}: {g:.0f}" for n, g in rates[precision])
            for rates in (first.gemm, team)
            if rates
        )
        for precision in PRECISIONS
    }
    values = {
        "units": (1, "not measured"),
        "threads": (threads, measured),
        "ranks_per_node": (len(ranks), measured),
        "nominal_ghz": (first.clock_ghz, measured),
        "clocks_ghz": ([first.clock_ghz], measured),
        "clock_gain_limit": (1.0, "one clock"),
        "eco_fraction": (1.0, "no power modes"),
        "peak_tflops": (
            {
                name: peaks[INT8 if name == INT8 else FP32] / 1e3
                for name in (FP32, "fp16", "bf16", INT8)
            },
            f"{measured}: multiply-adds of FP32 and INT8; 16 bits are counted as FP32",
        ),
        "memory_gib": (memory_gib * USABLE, f"{USABLE:.0%} of what the system reports"),
        "stream_gbs": (sum(r.triad_gbs for r in ranks), measured),
        "link_gbs": (link.gbs, link_source),
        "injection_gbs": (link.gbs * (1 if between else len(ranks)), link_source),
        "link_alpha_us": (link.alpha_us, link_source),
        "large_allreduce_gbs": (intra.gbs / 2 if reduce_gbs is None else reduce_gbs, intra_source),
        "intra_gbs": (intra.gbs, intra_source),
        "intra_alpha_us": (intra.alpha_us, intra_source),
        "gemm_curves": (
            curves[FP32],
            f"{measured}: native kernels, operands not in the caches, GFLOP/s at {shown[FP32]}",
        ),
        "int8_curves": (
            curves[INT8],
            f"{measured}: the same with packed weights, and operands quantized in the call, GFLOP/s at {shown[INT8]}",
        ),
        "native": (native(ranks, None if between else reduce_gbs), measured),
        "process_mib": (first.process_mib, measured),
        "host_factor": (1.0, "none known"),
    }
    return {
        "title": name,
        "kind": "cpu",
        "constants": {
            key: {"value": rounded(value, 4), "source": source}
            for key, (value, source) in values.items()
        },
    }
