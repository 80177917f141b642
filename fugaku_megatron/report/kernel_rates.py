"""Report section on kernels: their results against the reference, and their rates.

A case builds one kernel's arguments from fixed numbers, so that every machine computes the same.
`compared` runs it on the target in use and on the scalar reference; `elementwise_rates` times it
beyond the caches.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import host_kernels
from ..calibration.calibrate import FMA_STEPS, Compute, measure_compute
from ..host import kernel_costs, kernels
from ..host.machine import fma_peak_gflops
from ..host.timing import best_seconds
from ..planner import machine
from ..text.named_files import JsonObject
from .context import SHRUNK, SHRUNK_GFLOPS, Context, Scale, Sizes

# of the largest difference, relative to the largest value
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def operands(dtype: torch.dtype, z: Sizes) -> dict[str, Callable[[], Any]]:
    """Return what builds each argument of kernels, or a tuple of consecutive ones, with fixed values."""
    random = np.random.default_rng(1)
    angles = torch.arange(z.rows * z.d // 2).view(z.rows, -1) / 100

    def single(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32))

    def normal(*shape: int) -> Tensor:
        return single(*shape).to(dtype)

    return {
        "rows": lambda: normal(z.rows, 1, z.cols),
        "columns": lambda: normal(z.cols),
        "matrix": lambda: normal(z.rows, z.cols),
        "pairs": lambda: normal(z.rows, 2, z.cols),
        "elements": lambda: normal(z.rows * z.cols),
        "heads": lambda: normal(z.rows, 1, 3 * z.heads, z.d),
        "table": lambda: normal(z.words, z.cols),
        "tokens": lambda: torch.from_numpy(random.integers(0, z.words, z.rows)),
        "logits": lambda: single(z.rows, z.words),
        "vector": lambda: single(z.rows * z.cols),
        "squares": lambda: single(z.rows * z.cols).square(),
        "input": lambda: normal(z.m, z.k),
        "weight": lambda: normal(z.n, z.k),
        "output": lambda: normal(z.m, z.n),
        "qkv": lambda: normal(z.s, 1, 3 * z.heads * z.d),
        "context": lambda: normal(z.s, 1, z.heads * z.d),
        # Zeros: results, and sums that a kernel adds to.
        "row_sums": lambda: torch.zeros(z.rows),
        "column_sums": lambda: torch.zeros(z.cols),
        "table_sums": lambda: torch.zeros(z.words, z.cols),
        "logit_sums": lambda: torch.zeros(z.rows, z.words),
        "weight_sums": lambda: torch.zeros(z.n, z.k),
        "head_sums": lambda: torch.zeros(1, z.heads, z.s),
        # Plausible values.
        "rstd": lambda: torch.ones(z.rows),
        "exp_sums": lambda: torch.full((z.rows,), 99.0),
        "log_sums": lambda: torch.full((1, z.heads, z.s), 3.0),
        "mean": lambda: torch.full((z.rows,), 1 / z.rows),
        "cosines": lambda: angles.cos(),
        "sines": lambda: angles.sin(),
        "none": lambda: None,
        "zero": lambda: 0,
        "one": lambda: 1,
        "eps": lambda: 1e-5,
        "dropout": lambda: (0.1, 1, 2, 0),  # p, seed, stream, first sample
        # Learning rate, beta1, beta2, eps, weight decay, step.
        "adamw": lambda: (1e-3, 0.9, 0.95, 1e-8, 0.1, 3),
    }


# kernel -> its operands in order
CASES = {
    "layer_norm": "rows columns columns rows row_sums row_sums eps",
    "layer_norm_backward": "rows rows row_sums rstd columns rows column_sums column_sums",
    "rms_norm": "rows columns rows row_sums eps",
    "rms_norm_backward": "rows rows rstd columns rows column_sums",
    "bias_dropout_add": "rows columns rows rows dropout",
    "bias_dropout_add_layer_norm": "rows columns rows rows columns columns rows row_sums row_sums eps dropout",
    "dropout": "rows rows dropout",
    "activate": "matrix none matrix",
    "gate": "pairs matrix",
    "gate_backward": "matrix pairs pairs",
    "embedding": "tokens table matrix",
    "embedding_backward": "tokens matrix table_sums",
    "rotary": "heads cosines sines heads one",
    "cross_entropy_forward": "logits tokens row_sums row_sums row_sums",
    "cross_entropy_backward": "logits row_sums exp_sums tokens zero mean logit_sums",
    "adamw": "vector vector vector squares adamw",
    "squared_norm": "elements",
    "linear_forward": "input weight output",
    "linear_data_gradient": "output weight input",
    "linear_weight_gradient": "output input weight_sums",
    "attention_forward": "qkv context head_sums",
    "attention_backward": "qkv context log_sums context qkv",
}


def arguments(name: str, dtype: torch.dtype, sizes: Sizes) -> list[Any]:
    build = operands(dtype, sizes)
    found: list[Any] = []
    for operand in CASES[name].split():
        argument = build[operand]()
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


def compared() -> list[JsonObject]:
    """Compare every kernel with the scalar reference, in each dtype; differences are relative."""
    rows = []
    sizes = Sizes()
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


# names in a report
MATMULS = {machine.FP32: "gemm", "bf16": "gemm_bf16", machine.INT8: "gemm_int8"}
OF_RANK = ("threads", "clock_ghz", "fma_gflops", "triad_gbs")  # in a report, for each rank
MATMUL_ROUNDS = 4  # of host_kernels.gemm_gflops, the first of which warms up


def kernel_section(context: Context) -> JsonObject:
    """Check and time the kernels on all ranks at once. Collective."""
    checks = compared()
    context.world.barrier()
    own = measure_rates(context)
    scale = context.scale
    elementwise = elementwise_rates(
        scale.elementwise, own.triad_gbs, scale.rounds, lambda: context.left > 0
    )
    sums = [row["checksum"] for row in checks]
    everyone = context.world.all_gather_object((context.nodes.number, sums, own))
    ranks = [
        {"node": node, **{name: getattr(rates, name) for name in OF_RANK}}
        for node, _, rates in everyone
    ]
    peak = own.fma_gflops
    return {
        "target": kernels.active(),
        "checks": checks,
        "differing_ranks": [
            rank for rank, (_, others, _) in enumerate(everyone) if others != everyone[0][1]
        ],
        "ranks": ranks,
        "shrunk": scale is SHRUNK,
        "peak_gflops": peak,
        "triad_gbs": own.triad_gbs,
        **{
            key: [[n, g, g / peak] for n, g in own.gemm[precision]]
            for precision, key in MATMULS.items()
        },
        "attention": [[s, *gs, *(g / peak for g in gs)] for s, *gs in own.attention],
        "elementwise": elementwise,
    }


def measure_rates(context: Context) -> Compute:
    """Measure while the other ranks measure. Collective: rank 0 decides on the sizes."""
    threads = torch.get_num_threads()
    probe = fma_peak_gflops(3, 20_000)
    if context.agreed(probe < SHRUNK_GFLOPS * threads):
        context.scale = SHRUNK
    steps = max(20_000, int(FMA_STEPS * min(1.0, probe / threads / 50)))
    context.compute = measure_compute(
        replace(context.scale, fma_steps=steps),
        tuple(MATMULS),
        lambda: context.agreed(affordable_sizes(context.scale, context.left, least=2)),
        lambda: context.left,
    )
    return context.compute


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
    host_kernels.gemm_gflops(n, cold_bytes=1)
    return (time.perf_counter() - begin) / (3 * MATMUL_ROUNDS)
