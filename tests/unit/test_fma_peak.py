"""The measured peak: the best of its rounds, from the work that the loop says it did and the time it took."""

from __future__ import annotations

import pytest

from fugaku_megatron.host import runtime


def test_rate_is_work_over_time(monkeypatch):
    times = iter([10.0, 12.0])
    monkeypatch.setattr(runtime.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(runtime.kernels, "bench_fma", lambda steps: 1e6 * steps)
    assert runtime.fma_gflops(steps=4000) == pytest.approx(2.0)  # 4e9 operations in 2 s


def test_the_peak_is_the_best_round(monkeypatch):
    rates = iter([3.0, 7.0, 5.0])
    monkeypatch.setattr(runtime, "fma_gflops", lambda steps: next(rates))
    assert runtime.fma_peak_gflops(rounds=3) == 7.0


def test_this_machine_has_a_peak():
    assert 0 < runtime.fma_peak_gflops(rounds=2, steps=20_000) < 1e6
