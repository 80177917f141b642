"""What calibrate asks of the kernels: every figure is there and finite; which of two is larger is left to the machine."""

from __future__ import annotations

import math

import pytest

from fugaku_megatron.calibration import host_kernels


def test_products_take_another_set_each_time(monkeypatch):
    monkeypatch.setattr(host_kernels, "COLD_BYTES", 1 << 20)
    seen = []
    for name in ("linear_forward", "linear_data_gradient", "linear_weight_gradient"):
        monkeypatch.setattr(host_kernels.kernels, name, lambda *t, n=name: seen.append((n, t[0].data_ptr())))
    assert host_kernels.gemm_gflops(32) > 0
    sets = (1 << 20) // (12 * 32 * 32)
    assert len({place for _, place in seen}) == sets and len({name for name, _ in seen}) == 3


def test_rates_and_overheads_are_figures():
    assert host_kernels.gemm_gflops(64) > 0
    assert all(rate > 0 for rate in host_kernels.attention_gflops(64))
    assert host_kernels.dropout_flops(64, 50.0) >= 0
    assert all(math.isfinite(value) and value >= 0 for value in host_kernels.step_overhead())


def test_a_call_in_turn_is_each_made():
    made = []
    assert host_kernels.seconds_each([lambda: made.append(1), lambda: made.append(2)], rounds=2) >= 0
    assert made == [1, 2] * 3 and pytest.approx(0) == 0
