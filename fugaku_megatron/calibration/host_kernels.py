"""Rates of this project's kernels on this host as in a training step.

Matmuls read operands outside the caches: each call uses other tensors out of `cold_bytes` bytes. They pack their weight, as
without --cache-packed-weights, except in INT8, where weights are packed once for each optimizer step.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..cli.arguments import make_run
from ..comm.base import SoloComm
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..costs.attention import ATTENTION_BACKWARD_SHARE, causal_attention_flops
from ..costs.plan import Plan
from ..data.dataset import MockDataset
from ..host import kernels
from ..host.timing import best_seconds
from ..planner import model, software
from ..planner.machine import FP32, INT8
from ..run.assemble import build_trainer

HEADS = 12
HEAD_SIZE = 64
BF16X3_SIZE = 1024
DTYPES = {FP32: torch.float32, "bf16": torch.bfloat16}
TINY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 8,
    "mock_data": True,
    "micro_batch_size": 1,
}
STEPS = 15  # timed steps of a tiny model


def gemm_gflops(n: int, cold_bytes: int, precision: str = FP32) -> float:
    """Measure GFLOP/s of n x n x n matmuls in FP32, BF16 or INT8.

    A third each is forward, data gradient and weight gradient; in INT8 half each is forward and data gradient, which
    quantize an FP32 operand.

    cold_bytes: of all operands in FP32, beyond the caches of all cores
    """
    sets = max(3, cold_bytes // (12 * n * n))
    call = _int8_call if precision == INT8 else partial(_call, dtype=DTYPES[precision])
    return 2 * n**3 / best_seconds([call(n, number) for number in range(sets)]) / 1e9


def _call(n: int, number: int, dtype: torch.dtype) -> Callable[[], None]:
    """Build a matmul; weight gradients are FP32."""
    kinds = (kernels.linear_forward, kernels.linear_data_gradient, kernels.linear_weight_gradient)
    kind = number % len(kinds)
    x, y = (torch.randn(n, n).to(dtype) for _ in range(2))
    out = torch.zeros(n, n, dtype=torch.float32 if kind == 2 else dtype)
    return partial(kinds[kind], x, y, out)


def _int8_call(n: int, number: int) -> Callable[[], None]:
    x, weight, out = (torch.randn(n, n) for _ in range(3))
    transposed = number % 2 == 1
    size = kernels.packed_weight_size(n, n, weight.dtype, transposed, int8=True)
    packed: Tensor = torch.empty(size, dtype=torch.uint8)
    kernels.pack_weight(weight, packed, transposed, int8=True)
    matmul = kernels.linear_data_gradient if transposed else kernels.linear_forward
    return partial(matmul, x, weight, out, packed=packed, int8=True)


def bf16x3_share() -> float:
    """Return the rate of --fp32-matmul bf16x3 over FP32's; 0 without BF16 arithmetic."""
    if not kernels.has_bf16_arithmetic():
        return 0.0
    x, weight, out = (torch.randn(BF16X3_SIZE, BF16X3_SIZE) for _ in range(3))
    ieee = best_seconds([lambda: kernels.linear_forward(x, weight, out)] * 3)
    return ieee / best_seconds([lambda: kernels.linear_forward(x, weight, out, bf16x3=True)] * 3)


def attention_gflops(s: int, p: float = 0.0) -> tuple[float, float]:
    """Measure causal attention over s tokens with dropout p, forward and backward."""
    heads = HEADS
    width = HEADS * HEAD_SIZE
    qkv = torch.randn(s, 1, 3 * width)
    dqkv = torch.empty(s, 1, 3 * width)
    out = torch.empty(s, 1, width)
    dout = torch.randn(s, 1, width)
    lse = torch.empty(1, heads, s)
    dropout = (p, 1, 2, 0, 0)
    flops = causal_attention_flops(heads, s, HEAD_SIZE)
    forward = best_seconds([lambda: kernels.attention_forward(qkv, out, lse, *dropout)] * 3)
    backward = best_seconds(
        [lambda: kernels.attention_backward(qkv, out, lse, dout, dqkv, *dropout)] * 3
    )
    return flops / forward / 1e9, ATTENTION_BACKWARD_SHARE * flops / backward / 1e9


def dropout_flops(s: int, peak_gflops: float) -> float:
    """Measure `dropout_flops` in planner.software: mean of forward and backward, Megatron's default dropout against none."""
    again = 1.0, ATTENTION_BACKWARD_SHARE
    rates = zip(
        attention_gflops(s), attention_gflops(s, ModelConfig.attention_dropout), again, strict=True
    )
    slower = [max(0.0, 1 / dropped - 1 / whole) * times for whole, dropped, times in rates]
    return statistics.fmean(slower) * 4 * HEAD_SIZE * peak_gflops


def elementwise_gbs(elements: int) -> float:
    """Measure the optimizer's update of FP32 vectors, which reads four and writes three."""
    weights, gradients, first, second = (torch.full((elements,), 1e-3) for _ in range(4))
    update = {
        "lr": 1e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 1,
        "grad_scale": 1.0,
        "copy": None,
    }
    best = best_seconds([lambda: kernels.adamw(weights, gradients, first, second, **update)])
    return 28 * elements / best / 1e9


def _step_seconds(run: RunConfig) -> float:
    train, valid = (
        MockDataset(TINY["vocab_size"], run.model.seq_length, 1024, seed) for seed in (1, 2)
    )
    trainer = build_trainer(Plan.of(run, 1), SoloComm(), (train, valid))
    try:
        return statistics.median(trainer.train_step().seconds for _ in range(STEPS))
    finally:
        trainer.close()


def step_overhead() -> tuple[float, float]:
    """Return (us of an operator call, seconds of an iteration) without data."""
    code = software.load(software.THIS_PROJECT)
    points = []
    for layers, microbatches in ((1, 1), (8, 8)):
        run = make_run(
            None,
            {
                **TINY,
                "num_layers": layers,
                "global_batch_size": microbatches,
                "train_iters": STEPS + 5,
            },
        )
        forward, backward, _ = model.virtual_stage_work(run, 0, code)
        calls = sum(work.calls * times for work, times in forward + backward) * microbatches
        points.append((calls, _step_seconds(run)))
    (few, short), (many, long) = points
    call = max(0.0, (long - short) / (many - few))
    return call * 1e6, max(0.0, short - few * call)
