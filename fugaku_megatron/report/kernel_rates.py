"""Report section on kernels: their results against the reference, and their rates.

A case builds one kernel's arguments from fixed numbers, so that every machine computes the same.
`compared` runs it on the target in use and on the scalar reference; `elementwise_rates` times it
beyond the caches.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import calibrate, host_kernels
from ..host import kernel_costs, kernels
from ..host.allocator import peak_memory_mib
from ..host.machine import clock_ghz, fma_peak_gflops, triad_gbs
from ..host.timing import best_seconds
from ..planner import machine
from ..text.named_files import JsonObject
from .context import SHRUNK, SHRUNK_GFLOPS, Context, Scale, Sizes

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
    """Compare every kernel with the scalar reference, in each dtype; differences are relative."""
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


def elementwise_rates(
    sizes: Sizes, triad_gbs: float, rounds: int, has_time: Callable[[], bool] = lambda: True
) -> list[JsonObject]:
    """Measure GB/s of memory-bound FP32 kernels, at least of the first, and their share of the triad."""
    rows: list[JsonObject] = []
    for name in ELEMENTWISE:
        if rows and not has_time():
            break
        given = arguments(name, torch.float32, sizes)
        call = getattr(kernels, name)
        seconds = best_seconds([partial(call, *given)], rounds)
        rate = kernel_costs.moved_bytes(name, *given) / seconds / 1e9
        rows.append({"kernel": name, "gbs": rate, "of_triad": rate / triad_gbs})
    return rows


MATMULS = {
    machine.FP32: "gemm",
    "bf16": "gemm_bf16",
    machine.INT8: "gemm_int8",
}  # names in a report
MATMUL_ROUNDS = 4  # of host_kernels.gemm_gflops, the first of which warms up
NEXT_LENGTH = 4  # times the attention of a length, for the next one, which is twice as long


def kernel_section(context: Context) -> JsonObject:
    """Check and time the kernels on all ranks at once. Collective."""
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
    attention = []
    for s in scale.lengths:
        begin = context.left
        attention.append((s, *host_kernels.attention_gflops(s)))
        if context.left / 2 < NEXT_LENGTH * (begin - context.left):
            break
    sizes = context.agreed(affordable_sizes(scale, context.left, least=2))
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
    rows = elementwise_rates(scale.elementwise, triad, scale.rounds, lambda: context.left > 0)
    return {**context.compute, "elementwise": rows, "shrunk": scale is SHRUNK}


def affordable_sizes(scale: Scale, seconds: float, least: int = 0) -> Sequence[int]:
    """Return the smallest matmul sizes, at least `least`, that fit into half of the time in all precisions.

    Matmuls with their operands are timed by the clock here, so that other processes and waiting threads count.
    """
    probed = scale.sizes[len(scale.sizes) // 2]
    call = matmul_seconds(scale.sizes[0])
    flop_seconds = matmul_seconds(probed) / (2 * probed**3)
    taken = 0
    spent = 0.0
    for n in scale.sizes:
        calls = len(MATMULS) * MATMUL_ROUNDS * max(3, scale.cold_bytes // (12 * n * n))
        spent += calls * max(call, 2 * n**3 * flop_seconds)
        taken += spent < seconds / 2
    return scale.sizes[: max(least, taken)]


def matmul_seconds(n: int) -> float:
    begin = time.perf_counter()
    host_kernels.gemm_gflops(n, 1)
    return (time.perf_counter() - begin) / (3 * MATMUL_ROUNDS)
