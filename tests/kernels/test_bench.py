"""The kernels that the benchmarks compare with: their results and their counts."""

import time

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import random

pytestmark = pytest.mark.kernels


def test_triad(target, same_for_any_threads):
    for n in (0, 1, 15, 16, 17, 5003):
        x = random(n)
        y = random(n, seed=1)
        out = torch.empty(n)

        def triad(x=x, y=y, out=out):
            kernels.bench_triad(out, x, y, 2.5)
            return out.clone()

        assert_close(same_for_any_threads(triad), x + 2.5 * y)


@pytest.mark.parametrize("shape", [(1, 1, 1), (12, 32, 5), (13, 33, 64), (24, 32, 256)])
def test_gemm_panel_adds_its_sweeps(target, shape):
    m, n, k = shape
    a = random(m, k)
    b = random(k, n, seed=1)
    c = torch.empty(m, n)
    kernels.bench_gemm_panel(a, b, c, 3)
    assert_close(c.double(), 3 * a.double() @ b.double(), rtol=1e-5, atol=1e-4)


def test_multiply_adds_are_counted_per_thread_and_lane(target, with_threads):
    lanes = next(row["vector_bytes"] // 4 for row in kernels.targets() if row["name"] == target)
    with_threads(1)
    alone = kernels.bench_fma(100)
    with_threads(3)
    assert kernels.bench_fma(100) == 3 * alone
    chains, rest = divmod(alone, 2 * 100 * lanes)
    rows, vectors = next(row["gemm_tile"] for row in kernels.targets() if row["name"] == target)
    assert rest == 0 and chains >= rows * vectors, (
        "as many independent chains as the GEMM has accumulators"
    )


def test_int8_peak_counts_what_matmuls_multiply(target, with_threads):
    with_threads(1)
    alone = kernels.bench_fma(100, int8=True)
    with_threads(2)
    assert kernels.bench_fma(100, int8=True) == 2 * alone
    with_threads(1)
    assert alone >= 2 * kernels.bench_fma(100)


def test_clock_takes_a_cycle_per_step(target):
    """No core does dependent additions faster than 10 GHz, so a compiler that folds them is seen."""
    steps = 20_000_000
    start = time.perf_counter()
    kernels.bench_clock(steps)
    assert time.perf_counter() - start > steps / 10e9
    for name in ("bench_fma", "bench_clock"):
        with pytest.raises(ValueError, match="steps: expected 1 or more, got 0"):
            getattr(kernels, name)(0)
