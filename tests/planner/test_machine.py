"""Machines and software as data: sources, counts, clocks, and unknown names or damaged files that are refused."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fugaku_megatron.planner import machine, software
from tests.file_damage import MISSING, changed

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("name", machine.names())
def test_every_constant_has_a_source(name):
    loaded = machine.load(name)
    assert all(len(source) > 3 for source in loaded.sources.values())
    assert loaded.peak_tflops["fp32"] > 0 and loaded.gemm_curves and loaded.name == name


def test_the_table_of_machines_names_every_assumed_constant():
    text = (Path(__file__).resolve().parents[2] / "docs" / "performance-model.md").read_text()
    rows = [line.split("|")[1:] for line in text.splitlines() if line.startswith("| `")]
    named = {
        name: set(re.findall(r"`(\w+)`", row[2]))
        for row in rows
        for name in re.findall(r"`([\w-]+)`", row[0])
    }
    for name in machine.names():
        sources = machine.load(name).sources
        assumed = {constant for constant, source in sources.items() if "assumed" in source}
        assert named[name] == assumed, name


@pytest.mark.parametrize(
    "name, cores, operations, units",
    [
        ("xeon-8480", 2 * 56, 64, 8),
        ("epyc-9655", 2 * 96, 64, 8),
        ("graviton4", 2 * 96, 32, 2),
        ("grace", 2 * 72, 31, 2),
        ("graviton3", 64, 32, 1),
        ("lx2", 2 * 304, 32, 16),
        ("fugakunext-cpu", 2 * 144, 32, 2),
    ],
)
def test_peaks_of_servers_are_cores_times_operations_a_cycle(name, cores, operations, units):
    """Grace's data sheet rounds its clock."""
    server = machine.load(name)
    assert (
        server.threads == cores
        and server.units == server.ranks_per_node == units
        and cores % units == 0
    )
    assert server.peak_tflops["fp32"] == pytest.approx(
        cores * operations * server.ghz / 1e3, rel=0.01
    )
    assert server.gemm_curves[0].threads == cores // units
    dots = 8 if server.peak_tflops["bf16"] > 2 * server.peak_tflops["fp32"] else 4
    if name == "xeon-8480":  # half of AMX
        dots = 16
    assert server.peak_tflops["int8"] == pytest.approx(dots * server.peak_tflops["fp32"], rel=1e-3)


def test_clocks_modes_and_a_base():
    node = machine.load("a64fx")
    assert node.peak_tflops["fp32"] == pytest.approx(48 * 2 * 16 * 2 * 2.0e9 / 1e12)
    for each in (node, machine.load("fx700")):
        assert each.peak_tflops["int8"] == pytest.approx(4 * each.peak_tflops["fp32"])
    assert node.at(2.2).clock == pytest.approx(1.10)
    assert node.at(2.2, eco=True).peak_tflops["fp32"] == pytest.approx(node.peak_tflops["fp32"] / 2)
    with pytest.raises(ValueError, match="no eco mode"):
        machine.load("grace").at(eco=True)
    assert (
        machine.load("fx700").ghz == 1.8
        and machine.load("fx700").units == machine.load("a64fx").units
    )


@pytest.mark.parametrize(
    "content",
    [
        "{",
        json.dumps({"title": "x", "kind": "cpu", "constants": {}}),
        "[]",
        '{"base": "none"}',
        '{"constants": {"units": 4}}',
        "\udcff",
    ],
)
def test_broken_files_are_refused(tmp_path, content):
    (tmp_path / "host.json").write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(
        ValueError,
        match="--machine .*host.json is not a machine's description .*fugaku-megatron calibrate",
    ):
        machine.load(str(tmp_path / "host.json"))


@pytest.mark.parametrize(
    "place, value, message",
    [
        ("kind", "toaster", "kind is 'toaster', not cpu or gpu"),
        ("title", MISSING, "'title'"),
        (
            "constants/stream_gbs/value",
            "fast",
            "stream_gbs is 'fast', not a number above 0",
        ),
        ("constants/stream_gbs/value", 0, "stream_gbs is 0"),
        ("constants/stream_gbs/value", math.nan, "stream_gbs is nan"),
        ("constants/stream_gbs/value", {"fp32": -1}, "stream_gbs fp32 is -1"),
        (
            "constants/stream_gbs/value",
            1e300,
            r"stream_gbs is 1e\+300, not a number above 0",
        ),
        (
            "constants/stream_gbs/value",
            1e-300,
            "stream_gbs is 1e-300, not a number above 0",
        ),
        (
            "constants/gemm_curves/value",
            [],
            r"gemm_curves is \[\], which is empty or of another kind",
        ),
        (
            "constants/gemm_curves/value/0/exponent",
            1e9,
            r"gemm_curves has exponent 1000000000.0, above 16",
        ),
        (
            "constants/gemm_curves/value/0/maximum",
            3,
            "gemm_curves has maximum 3, above 2",
        ),
        (
            "constants/int8_curves",
            {"value": [{"threads": 1, "maximum": 3, "half": 1, "exponent": 1}], "source": ""},
            "int8_curves has maximum 3, above 2",
        ),
        (
            "constants/gemm_curves/value",
            5,
            "gemm_curves is 5, which is empty or of another kind",
        ),
        ("constants/peak_tflops/value/fp32", MISSING, "peak_tflops has no fp32"),
        ("constants/threads/value", 2.5, "threads is 2.5, not a whole number"),
    ],
)
def test_files_of_another_kind_are_refused(tmp_path, place, value, message):
    data = json.loads((machine.FOLDER / "a64fx.json").read_text())
    (tmp_path / "host.json").write_text(json.dumps(changed(data, place, value)))
    with pytest.raises(
        ValueError, match=f"--machine .*host.json is not a machine's description .{message}"
    ):
        machine.load(str(tmp_path / "host.json"))


def test_threads_between_and_beyond_the_curves():
    host = machine.load("a64fx")
    own = host.gemm_curve(12)
    other = host.gemm_curve(48)
    between = host.gemm_curve(24)
    assert (
        between.half == pytest.approx((own.half * other.half) ** 0.5)
        and own.exponent < between.exponent < other.exponent
    )
    assert (
        host.curve_note(24)
        == "a64fx has no GEMM curve with 24 threads: the curves with 12 and 48 are interpolated"
    )
    assert host.curve_note(12) is None and host.gemm_curve(12) is own
    few = replace(machine.load("a64fx"), gemm_curves=machine.load("a64fx").gemm_curves[1:2])
    assert few.gemm_curve(48) == few.gemm_curve(1) == few.gemm_curves[0]
    assert few.curve_note(48).endswith("48 threads: the curve with 12 is used")


PHASES = (
    "layer_forward",
    "layer_backward",
    "embedding_forward",
    "embedding_backward",
    "head_forward",
    "head_backward",
)


@pytest.mark.parametrize("name", software.names())
def test_every_software_is_complete(name):
    code = software.load(name)
    assert all("calls" in code.counts[phase] for phase in PHASES)
    assert set(code.machines) <= set(machine.names())
    assert code.fitted.values.gemm_fraction > 0 and code.choices.schedules[0] == "1f1b"
