"""The peak of FP32 multiply-adds, measured on all threads of this process by a loop of independent vector FMAs in registers.

--profile, the benchmarks and calibrate compare the rate of a kernel with it.
"""

from __future__ import annotations

import time

from . import kernels

STEPS = 500_000  # iterations of the loop in one measurement: some tens of milliseconds


def fma_gflops(steps: int = STEPS) -> float:
    """GFLOP/s of one run of the loop, multiply and add counted separately."""
    start = time.perf_counter()
    flops = kernels.bench_fma(steps)
    return flops / (time.perf_counter() - start) / 1e9


def fma_peak_gflops(rounds: int, steps: int = STEPS) -> float:
    """The best of `rounds` runs in GFLOP/s; the first run wakes the threads and the clock."""
    return max(fma_gflops(steps) for _ in range(rounds))
