"""Report sections on kernels and communication between ranks; together they describe the machine.

A case builds one kernel's arguments from fixed numbers, so that every machine computes the same.
`compared` runs it on the target in use and on the scalar reference; `elementwise_rates` times it
beyond the caches. All ranks compute at the same time, as in training.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import calibrate, host_kernels
from ..calibration.calibrate import Compute, NetworkRates
from ..comm.base import Comm
from ..comm.job import describe
from ..comm.node import share_node
from ..config.layout import Layout
from ..host import kernels
from ..host.allocator import node_bytes, peak_memory_mib
from ..host.machine import clock_ghz, fma_peak_gflops, measured_name, triad_gbs
from ..host.timing import best_seconds, slowest_seconds
from ..planner import machine, software
from ..planner.cost import Network
from ..text.named_files import JsonObject
from .context import SHRUNK, SHRUNK_GFLOPS, Context, Sizes

EPSILON = 1e-5  # of norms
DROPOUT = (0.1, 1, 2, 0)  # p, seed, stream, first sample
ADAMW = (1e-3, 0.9, 0.95, 1e-8, 0.1, 3)  # lr, beta1, beta2, eps, weight decay, step
TOLERANCE = {
    torch.float32: 2e-5,
    torch.bfloat16: 2e-2,
}  # of the largest difference, relative to the largest value
LSE = 3.0  # a plausible logarithm of a row's sum in attention


class Numbers:
    """Tensors with fixed values of any shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._random = np.random.default_rng(1)

    def normal(self, *shape: int) -> Tensor:
        return self.single(*shape).to(self.dtype)

    def single(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(shape, np.float32))

    def below(self, limit: int, count: int) -> Tensor:
        return torch.from_numpy(self._random.integers(0, limit, count))


# kernel -> its arguments, by name of `Operands`
CASES = {
    "layer_norm": "rows columns columns rows zeros_r zeros_r epsilon",
    "layer_norm_backward": "rows rows zeros_r ones_r columns rows zeros_c zeros_c",
    "rms_norm": "rows columns rows zeros_r epsilon",
    "rms_norm_backward": "rows rows ones_r columns rows zeros_c",
    "bias_dropout_add": "rows columns rows rows dropout",
    "bias_dropout_add_layer_norm": "rows columns rows rows columns columns rows zeros_r zeros_r epsilon dropout",
    "dropout": "rows rows dropout",
    "activate": "matrix none matrix",
    "gate": "pairs matrix",
    "gate_backward": "matrix pairs pairs",
    "embedding": "tokens table matrix",
    "embedding_backward": "tokens matrix zeros_table",
    "rotary": "heads cos sin heads one",
    "cross_entropy_forward": "logits tokens zeros_r zeros_r zeros_r",
    "cross_entropy_backward": "logits zeros_r sums tokens zero mean zeros_logits",
    "adamw": "vector vector vector squares adamw",
    "squared_norm": "elements",
    "linear_forward": "x weight y",
    "linear_data_gradient": "y weight x",
    "linear_weight_gradient": "y x zeros_weight",
    "attention_forward": "qkv context zeros_lse",
    "attention_backward": "qkv context lse context qkv",
}


def operands(numbers: Numbers, z: Sizes) -> dict[str, Callable[[], Any]]:
    """Return name -> function that builds an argument, or a tuple of arguments."""
    r = z.rows
    c = z.cols
    width = z.heads * z.d
    # Each takes a shape, and returns a function that builds the tensor.
    normal = partial(partial, numbers.normal)
    single = partial(partial, numbers.single)
    zeros = partial(partial, torch.zeros)
    full = partial(partial, torch.full)
    angles = torch.arange(r * z.d // 2).view(r, -1) / 100
    return {
        "rows": normal(r, 1, c),
        "columns": normal(c),
        "matrix": normal(r, c),
        "pairs": normal(r, 2, c),
        "elements": normal(r * c),
        "heads": normal(r, 1, 3 * z.heads, z.d),
        "table": normal(z.words, c),
        "tokens": partial(numbers.below, z.words, r),
        "logits": single(r, z.words),
        "vector": single(r * c),
        "squares": lambda: numbers.single(r * c).square(),
        "x": normal(z.m, z.k),
        "weight": normal(z.n, z.k),
        "y": normal(z.m, z.n),
        "qkv": normal(z.s, 1, 3 * width),
        "context": normal(z.s, 1, width),
        "zeros_r": zeros(r),
        "zeros_c": zeros(c),
        "zeros_table": zeros(z.words, c),
        "zeros_logits": zeros(r, z.words),
        "zeros_weight": zeros(z.n, z.k),
        "zeros_lse": zeros(1, z.heads, z.s),
        "ones_r": full((r,), 1.0),
        "sums": full((r,), 99.0),
        "mean": full((r,), 1 / r),
        "lse": full((1, z.heads, z.s), LSE),
        "cos": angles.cos,
        "sin": angles.sin,
        "none": lambda: None,
        "zero": lambda: 0,
        "one": lambda: 1,
        "epsilon": lambda: EPSILON,
        "dropout": lambda: DROPOUT,
        "adamw": lambda: ADAMW,
    }


def arguments(name: str, dtype: torch.dtype, sizes: Sizes) -> list[Any]:
    build = operands(Numbers(dtype), sizes)
    found: list[Any] = []
    for word in CASES[name].split():
        argument = build[word]()
        found += argument if isinstance(argument, tuple) else [argument]
    return found


ONLY_FP32 = ("cross_entropy_forward", "cross_entropy_backward", "adamw")
ELEMENTWISE = (
    "layer_norm",
    "layer_norm_backward",
    "bias_dropout_add",
    "bias_dropout_add_layer_norm",
    "activate",
    "gate",
    "gate_backward",
    "rotary",
    "adamw",
)


def result(name: str, dtype: torch.dtype, sizes: Sizes) -> list[Tensor]:
    call = arguments(name, dtype, sizes)
    value = getattr(kernels, name)(*call)
    tensors = [a for a in call if isinstance(a, Tensor) and a.is_floating_point()]
    return tensors + ([torch.tensor([value])] if isinstance(value, float) else [])


def checksum(tensors: Sequence[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def difference(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest difference over its tensor's largest value; infinite for a NaN."""
    worst = 0.0
    for a, b in zip(ours, exact, strict=True):
        error = float(
            (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)
        )
        worst = max(worst, error if error == error else float("inf"))
    return worst


def compared(sizes: Sizes | None = None) -> list[JsonObject]:
    rows = []
    sizes = sizes or Sizes()
    for dtype, limit in TOLERANCE.items():
        for name in CASES:
            if dtype != torch.float32 and name in ONLY_FP32:
                continue
            ours = result(name, dtype, sizes)
            with kernels.target("reference"):
                exact = result(name, dtype, sizes)
            error = difference(ours, exact)
            rows.append(
                {
                    "kernel": name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "checksum": checksum(ours),
                    "reference": checksum(exact),
                    "difference": min(error, 1e30),
                    "good": error <= limit,
                }
            )
    return rows


def elementwise_rates(sizes: Sizes, triad_gbs: float, rounds: int) -> list[JsonObject]:
    """Measure GB/s of memory-bound FP32 kernels, and their share of the triad."""
    rows = []
    for name in ELEMENTWISE:
        given = arguments(name, torch.float32, sizes)
        call = getattr(kernels, name)
        seconds = best_seconds([partial(call, *given)], rounds)
        rate = kernels.table.bytes(name, *given) / seconds / 1e9
        rows.append({"kernel": name, "gbs": rate, "of_triad": rate / triad_gbs})
    return rows


MATMULS = {
    machine.FP32: "gemm",
    "bf16": "gemm_bf16",
    machine.INT8: "gemm_int8",
}  # names in a report
MATMUL_ROUNDS = 4  # of host_kernels.gemm_gflops, the first of which warms up
VERBS = ("all_reduce", "all_gather", "reduce_scatter")


# Kernels --------------------------------------------------------------------------------------------------------------------------


def kernel_section(context: Context) -> JsonObject:
    checks = compared()
    context.world.barrier()
    rates = measure_rates(context)
    everyone = context.world.all_gather_object(
        (context.nodes.number, [row["checksum"] for row in checks], rates)
    )
    ranks = [
        {
            "node": node,
            **{name: rates[name] for name in ("threads", "clock_ghz", "fma_gflops", "triad_gbs")},
        }
        for node, _, rates in everyone
    ]
    first = everyone[0][1]
    differing = [rank for rank, (_, sums, _) in enumerate(everyone) if sums != first]
    return {
        "target": kernels.active(),
        "checks": checks,
        "differing_ranks": differing,
        "ranks": ranks,
        "shrunk": rates["shrunk"],
        "peak_gflops": rates["fma_gflops"],
        "triad_gbs": rates["triad_gbs"],
        **{
            key: [[n, g, g / rates["fma_gflops"]] for n, g in rates["gemm"][precision]]
            for precision, key in MATMULS.items()
        },
        "attention": [
            [s, *gs, *(g / rates["fma_gflops"] for g in gs)] for s, *gs in rates["attention"]
        ],
        "elementwise": rates["elementwise"],
    }


def measure_rates(context: Context) -> JsonObject:
    """Measure while the other ranks measure. Collective: rank 0 decides on the sizes."""
    process = peak_memory_mib()
    threads = torch.get_num_threads()
    probe = fma_peak_gflops(3, 20_000)
    if context.agreed(probe < SHRUNK_GFLOPS * threads):
        context.scale = SHRUNK
    scale = context.scale
    steps = max(20_000, int(2_000_000 * min(1.0, probe / threads / 50)))
    fma = max(probe, fma_peak_gflops(1 + scale.rounds, steps))
    clock = clock_ghz(25 * steps)
    triad = triad_gbs(scale.triad)
    sizes = context.agreed(affordable(scale.sizes, scale.cold_bytes, fma, context.left / 3))
    attention = []
    for s in scale.lengths:
        attention.append((s, *host_kernels.attention_gflops(s)))
        if context.left < 0:
            break
    context.compute = {
        "threads": threads,
        "clock_ghz": clock,
        "fma_gflops": fma,
        "int8_gops": fma_peak_gflops(1 + scale.rounds, steps, int8=True),
        "triad_gbs": triad,
        "process_mib": process,
        "gemm": calibrate.measure_gemm(sizes, scale.cold_bytes, tuple(MATMULS)),
        "attention": tuple(attention),
        "elementwise_gbs": host_kernels.elementwise_gbs(scale.elements),
    }
    rows = elementwise_rates(scale.elementwise, triad, scale.rounds)
    return {**context.compute, "elementwise": rows, "shrunk": scale is SHRUNK}


def affordable(
    sizes: Sequence[int], cold_bytes: int, gflops: float, seconds: float
) -> Sequence[int]:
    """Return the smallest matmul sizes that the time allows at half of the peak; at least two."""
    taken = 0
    spent = 0.0
    for n in sizes:
        spent += MATMUL_ROUNDS * max(3, cold_bytes // (12 * n * n)) * 2 * n**3 / (gflops / 2 * 1e9)
        taken += spent < seconds
    return sizes[: max(2, taken)]


# Communication --------------------------------------------------------------------------------------------------------------------


def communication_section(context: Context) -> JsonObject:
    """Measure messages and collectives; describe the machine. Collective."""
    world = context.world
    found = {
        "library": describe(world),
        "ranks": world.size,
        "nodes": context.nodes.count,
    }
    numbers = world.all_gather_object(context.nodes.number)
    network = calibrate.measure_network(world, numbers, context.scale.reduced)
    context.machine = describe_machine(context, network)
    rows = list(collective_rows(context)) if world.size > 1 else []
    return {
        **found,
        "inside": network.inside and asdict(network.inside),
        "between": network.between and asdict(network.between),
        "thread_level": getattr(world, "thread_level", None),
        "all_reduce_gbs": network.reduce_gbs,
        "collectives": rows,
    }


def describe_machine(context: Context, network: NetworkRates) -> JsonObject:
    """Return the machine in calibrate's format. Collective."""
    if not context.compute:  # --only without the section of kernels
        measure_rates(context)
    scale = context.scale
    fma = context.compute["fma_gflops"]
    call_us, iteration_s = host_kernels.step_overhead()
    own = Compute(
        **context.compute,
        call_us=call_us,
        iteration_s=iteration_s,
        dropout_flops=host_kernels.dropout_flops(scale.lengths[1], fma),
        bf16x3=host_kernels.bf16x3_share(),
    )
    here = context.nodes.ranks.all_gather_object(own)
    threads = sum(rank.threads for rank in here)
    points = own.gemm[machine.FP32]
    rate = 2 * points[-1][1]  # `affordable` expects half of a peak
    sizes = context.agreed(
        affordable([n for n, _ in points], scale.cold_bytes, rate, context.left / 3)
    )
    team: calibrate.Rates = {}
    # Pinned threads would share one core.
    if context.agreed(threads > own.threads and not context.pinned):
        team = calibrate.measure_team(
            context.world, threads, lambda: calibrate.measure_gemm(sizes, scale.cold_bytes)
        )
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
    whole = torch.ones(n)
    part = torch.ones(n // comm.size)
    operands = {
        "all_reduce": (whole,),
        "all_gather": (whole, part),
        "reduce_scatter": (part, whole),
    }[verb]
    return lambda: getattr(comm, verb)(*operands)


def timed(world: Comm, call: Callable[[], object], rounds: int = 7) -> float:
    """Return median seconds from the last entry to the last exit, after a warm-up call. Collective."""
    times = [slowest_seconds(world, call) for _ in range(rounds + 1)]
    return statistics.median(times[1:])
