"""Calibration: the curve fit, the machine's file, the rates of the kernels; over MPI: tests/cli/test_ranks.py."""

import argparse
import json
import math
from dataclasses import replace

import pytest

from fugaku_megatron.calibration import calibrate, calibrate_command, host_kernels
from fugaku_megatron.calibration.calibrate import Messages
from fugaku_megatron.comm import job
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import timing
from fugaku_megatron.planner import machine, software
from tests.checks.calibration import (
    rank,
)

pytestmark = pytest.mark.unit


def test_one_process_gets_an_error_and_lives(monkeypatch, tmp_path):
    monkeypatch.setattr(job, "init", SoloComm)
    options = argparse.Namespace(output=tmp_path / "host.json")
    with pytest.raises(ValueError, match="measures MPI too: start it as mpiexec -n 2"):
        calibrate_command.main(options)
    assert not options.output.exists()


def test_the_curve_and_a_disturbed_clock():
    points = [(n, 100 * 0.9 / (1 + 60 / n)) for n in calibrate.Scale().sizes]
    maximum, half = calibrate.fit_curve(points, 100.0)
    assert maximum == pytest.approx(0.9, rel=0.02) and half == pytest.approx(60, rel=0.05)
    points = [(n, 95.0 / (1 + 80 / n)) for n in (128, 256, 1024, 2048)]
    assert calibrate.fit_curve([*points, (512, 40.0)], 100.0) == pytest.approx((0.95, 80), rel=0.03)
    assert (
        calibrate_command.disturbances([rank(3.0), rank(2.9)], 3.1)
        == []
        == calibrate_command.disturbances([rank(3.0)], 0.0)
    )
    assert (
        "measured at 1.08 GHz, the system says 3.00 GHz: other"
        in calibrate_command.disturbances([rank(1.08), rank(1.1)], 3.0)[0]
    )
    assert (
        "measured at 1.08 to 3.00 GHz: other processes"
        in calibrate_command.disturbances([rank(3.0), rank(1.08)], 0.0)[0]
    )


def described(tmp_path, between: Messages | None) -> machine.Machine:
    team = {"fp32": ((256, 120.0), (1024, 160.0)), "int8": ((256, 240.0), (1024, 430.0))}
    inside = Messages(alpha_us=1.0, gbs=10.0)
    network = calibrate.NetworkRates(inside, between, 5.0)
    data = calibrate.describe("a test", [rank(), rank()], team, network, 64.0)
    (tmp_path / "host.json").write_text(json.dumps(data))
    return machine.load(str(tmp_path / "host.json"))


def test_a_small_message_that_others_disturb_has_half_of_the_large_ones_time(monkeypatch):
    monkeypatch.setattr(
        calibrate,
        "ping_pong",
        lambda world, partner, size: 1e-3 if size == calibrate.SMALL else 5e-4,
    )
    assert calibrate.measure_messages(None, 1).gbs == pytest.approx(
        2 * calibrate.LARGE / 5e-4 / 1e9
    )


def test_a_nodes_rates_and_its_links(tmp_path):
    host = described(tmp_path, None)
    assert (host.peak_tflops["fp32"], host.stream_gbs, host.threads, host.ranks_per_node) == (
        0.2,
        40.0,
        4,
        2,
    )
    assert host.sources["link_gbs"].startswith("not measured") and host.link_gbs == 10.0
    host = described(tmp_path, Messages(alpha_us=2.0, gbs=3.0))
    assert (host.link_gbs, host.intra_gbs) == (3.0, 10.0) and host.sources["link_gbs"].startswith(
        "measured"
    )


def test_what_the_kernels_reach_here_is_what_this_software_is_judged_by(tmp_path):
    host = described(tmp_path, None)
    for curves in (host.gemm_curves, host.int8_curves):
        assert [curve.threads for curve in curves] == [2, 4]
    assert host.gemm_curve(4).maximum / (1 + host.gemm_curve(4).half / 1024) == pytest.approx(
        0.8, rel=1e-2
    )  # 160 of 200
    assert host.peak_tflops["int8"] == 0.6
    for threads, ranks, rate in ((2, 2, 240.0), (4, 1, 430.0)):
        curve = host.gemm_curve(threads, int8=True)
        share = curve.maximum / (1 + curve.half / 1024)
        assert share * host.peak_tflops["int8"] * 1e3 / ranks == pytest.approx(rate, rel=1e-2)
    code = software.load("fugaku_megatron")
    parameters = code.parameters(host)
    assert (parameters.call_us, parameters.iteration_s, parameters.elementwise_fraction) == (
        7.0,
        0.01,
        0.75,
    )
    assert parameters.attention_forward / (
        1 + parameters.attention_forward_half / 2048
    ) == pytest.approx(0.64, rel=1e-2)
    assert parameters.dropout_flops == 90.0 and parameters.bf16x3 == 0.4
    before = replace(host, native={k: v for k, v in host.native.items() if k != "dropout_flops"})
    assert (
        code.parameters(before).dropout_flops == 0.0
    )  # those of before had it in their shares of attention
    assert parameters.intra_reduce_gbs == 5.0  # two ranks: the vector once over a link
    assert code.memory(host).base_mib == 250.0 and code.known_on(host)
    other = software.load("torch1.10")
    assert (
        other.parameters(host) == other.fitted.values and other.memory(host) == other.fitted.memory
    )
    assert "intra_reduce_gbs" not in described(tmp_path, Messages(alpha_us=2.0, gbs=3.0)).native


def test_rates_and_overheads_are_figures(monkeypatch):
    monkeypatch.setattr(host_kernels, "BF16X3_SIZE", 64)
    for precision in ("fp32", "bf16", "int8"):
        assert host_kernels.gemm_gflops(64, 1 << 18, precision) > 0
    assert all(rate > 0 for rate in host_kernels.attention_gflops(64))
    for name in host_kernels.kernels.runnable_targets():
        with host_kernels.kernels.target(name):
            assert (host_kernels.bf16x3_share() > 0) == host_kernels.kernels.has_bf16_arithmetic()
    assert host_kernels.dropout_flops(64, 50.0) >= 0
    assert all(math.isfinite(value) and value >= 0 for value in host_kernels.step_overhead())
    made = []
    assert timing.best_seconds([lambda: made.append(1), lambda: made.append(2)], rounds=2) >= 0
    assert made == [1, 2] * 3
