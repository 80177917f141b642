"""Machines as data: every constant has a source, clocks and eco mode change what they must, unknown hardware is an error."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace

import pytest

from fugaku_megatron.perf import machine

MISSING = object()  # the entry is taken out


@pytest.mark.parametrize("name", machine.names())
def test_every_constant_has_a_source(name):
    loaded = machine.load(name)
    assert all(len(source) > 3 for source in loaded.sources.values())
    assert loaded.peak_tflops["fp32"] > 0 and loaded.gemm_curves and loaded.name == name


def test_the_machines_that_the_tables_and_targets_need():
    assert {"a64fx", "fx700", "a100", "graviton3", "grace"} <= set(machine.names())


def test_a64fx_peak_follows_from_pipes_and_clock():
    node = machine.load("a64fx")
    assert node.peak_tflops["fp32"] == pytest.approx(48 * 2 * 16 * 2 * 2.0e9 / 1e12)
    assert node.at(2.2).clock == pytest.approx(1.10)
    assert node.at(2.2, eco=True).peak_tflops["fp32"] == pytest.approx(node.peak_tflops["fp32"] / 2)


def test_a_base_is_overridden():
    assert machine.load("fx700").ghz == 1.8 and machine.load("fx700").units == machine.load("a64fx").units


@pytest.mark.parametrize("name, message", [("a64", "did you mean a64fx"), ("nonsense", "pass one of"),
                                        ("missing.json", "pass one of")])
def test_unknown_machines_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        machine.load(name)


def test_modes_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="--ghz 3.0 is not a clock of a64fx: pass 2.0 or 2.2"):
        machine.load("a64fx").at(3.0)
    with pytest.raises(ValueError, match="no eco mode"):
        machine.load("grace").at(eco=True)


@pytest.mark.parametrize("content", ["{", json.dumps({"title": "x", "kind": "cpu", "constants": {}}), "[]", '{"base": "none"}',
                                     '{"constants": {"units": 4}}', "\udcff"])
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "host.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="--machine .*host.json is not a machine's description .*fugaku-megatron calibrate"):
        machine.load(str(tmp_path / "host.json"))


@pytest.mark.parametrize("value, message", [("fast", "stream_gbs is 'fast', not a number above 0"), (0, "stream_gbs is 0"),
                                         (math.nan, "stream_gbs is nan"), ({"fp32": -1}, "stream_gbs fp32 is -1")])
def test_constants_that_are_no_numbers_are_refused(tmp_path, value, message):
    data = json.loads((machine.FOLDER / "epyc-2core.json").read_text())
    data["constants"]["stream_gbs"]["value"] = value
    (tmp_path / "host.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        machine.load(str(tmp_path / "host.json"))


@pytest.mark.parametrize("place, value, message", [
    (("kind",), "toaster", "kind is 'toaster', not cpu or gpu"), (("title",), MISSING, "'title'"),
    (("constants", "stream_gbs", "value"), 1e300, r"stream_gbs is 1e\+300, not a number above 0"),
    (("constants", "stream_gbs", "value"), 1e-300, "stream_gbs is 1e-300, not a number above 0"),
    (("constants", "gemm_curves", "value"), [], r"gemm_curves is \[\], which is empty or of another kind"),
    (("constants", "gemm_curves", "value", 0, "exponent"), 1e9, r"gemm_curves has exponent 1000000000.0, above 16"),
    (("constants", "gemm_curves", "value", 0, "maximum"), 3, "gemm_curves has maximum 3, above 2"),
    (("constants", "gemm_curves", "value"), 5, "gemm_curves is 5, which is empty or of another kind"),
    (("constants", "peak_tflops", "value", "fp32"), MISSING, "peak_tflops has no fp32"),
    (("constants", "threads", "value"), 2.5, "threads is 2.5, not a whole number"),
])
def test_files_of_another_kind_are_refused(tmp_path, place, value, message):
    data = json.loads((machine.FOLDER / "a64fx.json").read_text())
    owner = functools.reduce(lambda part, key: part[key], place[:-1], data)
    if value is MISSING:
        del owner[place[-1]]
    else:
        owner[place[-1]] = value
    (tmp_path / "host.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"--machine .*host.json is not a machine's description .{message}"):
        machine.load(str(tmp_path / "host.json"))


def test_a_number_of_threads_between_two_curves_has_one_between_them_and_says_so():
    host = machine.load("a64fx")
    own, other = host.gemm_curve(12), host.gemm_curve(48)
    between = host.gemm_curve(24)
    assert between.half == pytest.approx((own.half * other.half) ** 0.5) and own.exponent < between.exponent < other.exponent
    assert host.curve_note(24) == "a64fx has no GEMM curve with 24 threads: the curves with 12 and 48 are interpolated"
    assert host.curve_note(12) is None and host.gemm_curve(12) is own


def test_threads_beyond_the_curves_take_the_nearest_and_say_so():
    few = replace(machine.load("a64fx"), gemm_curves=machine.load("a64fx").gemm_curves[1:2])
    assert few.gemm_curve(48) == few.gemm_curve(1) == few.gemm_curves[0]
    assert few.curve_note(48).endswith("48 threads: that of 12 is used")
