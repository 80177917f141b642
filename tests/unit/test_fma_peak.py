"""The measured peak: the best of its rounds, from the work that the loop says it did and the time it took."""

from __future__ import annotations

import pytest

from fugaku_megatron.host import fma_peak


def test_rate_is_work_over_time(monkeypatch):
    times = iter([10.0, 12.0])
    monkeypatch.setattr(fma_peak.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(fma_peak.kernels, "bench_fma", lambda steps: 1e6 * steps)
    assert fma_peak.fma_gflops(steps=4000) == pytest.approx(2.0)  # 4e9 operations in 2 s


def test_the_peak_is_the_best_round(monkeypatch):
    rates = iter([3.0, 7.0, 5.0])
    monkeypatch.setattr(fma_peak, "fma_gflops", lambda steps: next(rates))
    assert fma_peak.fma_peak_gflops(rounds=3) == 7.0


def test_this_machine_has_a_peak():
    assert 0 < fma_peak.fma_peak_gflops(rounds=2, steps=20_000) < 1e6
