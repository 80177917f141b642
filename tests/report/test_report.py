"""The report: findings, hours, texts, comparisons and machines; whole runs are in tests/report/test_whole_reports.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fugaku_megatron.calibration import calibrate
from fugaku_megatron.cli import program
from fugaku_megatron.cli.arguments import make_run
from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.costs.flops import model_flops
from fugaku_megatron.costs.stages import model_parameters
from fugaku_megatron.host import kernels
from fugaku_megatron.host import machine as host_machine
from fugaku_megatron.host.energy import Counter, Counters
from fugaku_megatron.planner import machine
from fugaku_megatron.report import (
    context,
    figures,
    findings,
    layers,
    training,
)
from tests.checks.calibration import rank as calibrated_rank
from tests.checks.reports import HEALTHY, report
from tests.file_damage import changed

pytestmark = pytest.mark.unit


(NODE,) = HEALTHY["host"]["nodes"]


RANK = HEALTHY["kernels"]["ranks"][0]


COLLECTIVE = HEALTHY["communication"]["collectives"][0]


LAYERS = HEALTHY["layers"]["rows"][0]


# Findings -------------------------------------------------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_findings():
    assert findings.findings(HEALTHY) == []
    assert "Nothing was found that is wrong" in figures.text(report())


@pytest.mark.parametrize(
    "place, value, words",
    [
        (
            "kernels/differing_ranks",
            [1],
            "ranks compute different bits: ranks 1 and rank 0",
        ),
        (
            "kernels/ranks",
            [{**RANK, "clock_ghz": 2.0}] * 2,
            "clock falls under load: 2.00 GHz; 3.00 GHz",
        ),
        (
            "kernels/ranks",
            [RANK, RANK, {**RANK, "clock_ghz": 2.0, "threads": 0}],
            "rank 2 on node 0: 2.00 GHz; 3.00 GHz",
        ),
        (
            "host/nodes/0/governor",
            "powersave",
            "governor powersave; performance; cpupower",
        ),
        ("host/nodes/0/load", 9.0, "other processes compute on node 0: load 9.0"),
        (
            "host/nodes/0/mapping",
            [
                "cores: a",
                "note: ranks 0-1 compute with 8 threads on 4 cores: start fewer ranks",
            ],
            "SEVERE: ranks and cores do not fit on node 0: ranks 0-1 compute with 8 threads on 4 cores; one rank with",
        ),
        (
            "host/nodes/0/cores",
            16,
            "idle cores on node 0: 8 threads; 16 cores; set OMP_NUM_THREADS",
        ),
        (
            "host/nodes/0/huge_pages/transparent",
            "never",
            "transparent_hugepage is never; madvise",
        ),
        ("host/nodes/0/numa_balancing", "1", "numa_balancing is 1; 0; sysctl"),
        ("host/nodes/0/free_gib", 10.0, "10.0 GiB are free"),
        (
            "kernels/gemm",
            [[128, 10.0, 0.03], [2048, 90.0, 0.3]],
            "matmuls are slow: 90 GFLOP/s at 2048, 30% of the FMA peak; 75%",
        ),
        (
            "kernels/attention",
            [[2048, 60.0, 60.0, 0.2, 0.2]],
            "attention is slow: 20% and 20%",
        ),
        (
            "kernels/elementwise",
            [{"kernel": "gelu", "gbs": 5.0, "of_triad": 0.1}],
            "1 element-wise kernels are below",
        ),
        ("kernels/target", "avx2", "target avx2; avx512; unset FUGAKU_MEGATRON_TARGET"),
        (
            "host/nodes/0/features",
            ["avx512f", "amx_bf16"],
            "target avx512; amx; unset",
        ),
        ("communication/ranks", 1, "communication was not measured: one rank, MPICH"),
        (
            "communication/thread_level",
            "funneled",
            "MPI_THREAD_FUNNELED; MPI_THREAD_SERIALIZED",
        ),
        (
            "communication/collectives",
            [{**COLLECTIVE, "seconds": 0.1, "to_model": 5.0}],
            "collectives inside nodes are slow: all_reduce of 64 MiB takes 100 ms; 20 ms in the model",
        ),
        (
            "training/rows/1/tokens_per_s",
            1200.0,
            "2 ranks: 60% of one rank's tokens/s each; 80%",
        ),
        ("training/rows/1/left_out", "memory", "124M does not fit"),
        (
            "storage/write_gbs",
            0.05,
            "checkpoints are slow: 0.05 GB/s on ext4; 0.3 GB/s; --async-save",
        ),
    ],
)
def test_each_problem_is_found_with_a_remedy(place, value, words):
    sections = changed(HEALTHY, place, value)
    assert words in figures.text(report(sections)), figures.text(report(sections))
    assert all(
        all(found[name] for name in ("what", "measured", "expected", "remedy"))
        for found in findings.findings(sections)
    )


def test_a_problem_of_many_nodes_is_one_finding():
    sections = {
        "host": {
            "nodes": [
                {**NODE, "load": 9.0 + n, "numa_balancing": "1" if n == 3 else "0"}
                for n in range(7)
            ]
        }
    }
    busy, moved = findings.findings(sections)
    assert (
        busy["what"] == "other processes compute on nodes 0, 1, 2, 3 and 3 others"
        and busy["measured"] == "load 9.0"
    )
    assert moved["what"] == "the system moves pages on node 3"


def test_a_virtual_machines_clock_and_shrunk_shapes_are_no_findings():
    assert (
        findings.findings(
            {
                **changed(HEALTHY, "kernels/ranks", [{**RANK, "clock_ghz": 2.0}] * 2),
                "host": {"nodes": [{**NODE, "features": ["avx512f", "hypervisor"]}]},
            }
        )
        == []
    )
    shrunk = changed(HEALTHY, "kernels/shrunk", True)
    shrunk["kernels"]["gemm"] = [[32, 1.0, 0.01]]
    assert findings.findings(shrunk) == [] and "SHRUNK SHAPES" in figures.text(report(shrunk))


@pytest.mark.parametrize(
    "names",
    [(), ("host",), ("kernels",), ("host", "kernels"), ("communication", "training"), ("storage",)],
)
def test_a_part_of_the_sections_is_a_text(names):
    data = report({name: HEALTHY[name] for name in names}, complete=False)
    assert figures.text(data).startswith(
        "fugaku-megatron report"
    ) and "PARTIAL, ended by SIGTERM" in figures.text(data)


def test_the_text_has_every_figure_of_the_comparison():
    text = figures.text(report())
    assert all(name in text for name, _ in figures.figures(report()))


# Hours ----------------------------------------------------------------------------------------------------------------------------


def test_hours_follow_from_the_rate_of_two_layers():
    one = next(row for row in layers.hours(HEALTHY) if row["model"] == "1B")
    run = make_run("llama-3.2-1b", {"seq_length": 1024, "mock_data": True})
    sample = 2.0 * model_flops(run, 1) / 4e11  # seconds of a sample in each of two groups
    update = 0.5 * model_parameters(run) / 1e8 + 4 * model_parameters(run) / 3e9
    seconds = layers.TOKENS / (2 * 1024 / sample) + layers.TOKENS / layers.UPDATE_TOKENS * update
    assert one["hours"] == pytest.approx(seconds / 3600) and one["label"] == "model (extrapolated)"
    assert one["fits"] and one["need_gib"] == pytest.approx(16 * model_parameters(run) / 2**30)


def test_every_model_has_hours_and_the_large_one_names_the_nodes_it_needs():
    rows = layers.hours(HEALTHY)
    assert [row["model"] for row in rows] == ["0.6B", "1B", "3B", "8B"]
    sizes = [row["parameters"] / 1e9 for row in rows]
    assert sizes == pytest.approx([0.596, 1.236, 3.213, 8.03], rel=2e-3)
    # 120 GiB on nodes of 64, of which 0.8 are used
    assert not rows[-1]["fits"] and rows[-1]["nodes_needed"] == 3
    left_out = {"shape": "8B", "left_out": "time"}
    assert layers.hours({"layers": {"rows": [left_out]}}) == []
    rows = layers.hours({"layers": {"rows": [LAYERS, left_out]}})
    assert [row["from"] for row in rows] == ["two layers of 1B"] * 4 and rows[3]["hours"] > rows[1][
        "hours"
    ] > 0


def test_two_reports_are_compared_with_ratios(tmp_path, capsys):
    faster = changed(HEALTHY, "kernels/ranks", [{**RANK, "fma_gflops": 600.0}] * 2)
    faster["communication"]["inside"]["alpha_us"] = 0.5
    del faster["storage"]
    for name, data in (("a", report()), ("b", report(faster, complete=False))):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    assert (
        program.main(["report", "--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")])
        == 0
    )
    out = capsys.readouterr().out
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in out.splitlines()
        if (cells := line.split("|"))[2:]
    }
    assert rows["FMA peak of a rank"] == ["GFLOP/s", "300", "600", "2.00"]
    assert rows["message inside nodes"] == ["us", "1", "0.5", "2.00"]
    assert rows["checkpoint written"] == ["GB/s", "1", "-", "-"]
    assert "PARTIAL: ended by SIGTERM" in out and "1 of 1 kernels compute the same bits" in out
    assert figures.ratio("hours", 10.0, 5.0) == "2.00" and figures.ratio("GB/s", None, 5.0) == "-"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "--compare {0}/no.json {0}/no.json",
            "no.json: cannot be read (No such file or directory); pass a file that fugaku-megatron report wrote",
        ),
        ("--compare {0}/text.json {0}/text.json", "text.json: not JSON: pass a file"),
        ("--compare {0}/other.json {0}/other.json", "other.json is not a report: pass a file"),
        ("--compare {0}/old.json {0}/old.json", "has version 0, this program reads 1"),
        ("--minutes 0", "--minutes is 0: pass a number above 0"),
        ("--output {0}/x.txt", "ends in .json"),
        ("--output {0}/no/x.json", "is not a directory"),
        ("--save {0}/no", "is not a folder that can be written"),
        ("--ranks 0", "--ranks is 0: pass a number above 0"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, capsys):
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "old.json").write_text(json.dumps(report(version=0)))
    assert program.main(["report", *words.format(tmp_path).split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("fugaku-megatron report: ") and message in err and err.count("\n") == 1


# Hosts and machines ---------------------------------------------------------------------------------------------------------------


def test_facts_of_a_described_node(tmp_path):
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n",
        "proc/sys/kernel/numa_balancing": "1",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
        "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "12",
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3500000",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
        "sys/devices/system/cpu/cpu0/cache/index0/level": "1",
        "sys/devices/system/cpu/cpu0/cache/index0/type": "Data",
        "sys/devices/system/cpu/cpu0/cache/index0/size": "32K",
        "sys/devices/system/node/node0/cpulist": "0-1,900",
        "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:       33554432 kB",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    for cpu in (0, 1, 900):
        (tmp_path / f"sys/devices/system/cpu/cpu{cpu}").mkdir(parents=True, exist_ok=True)
    facts = host_machine.facts(tmp_path)
    assert (facts["cpu"], facts["features"]) == ("A CPU", ["avx2", "avx512f", "amx_bf16"])
    assert facts["huge_pages"]["transparent"] == "never" and facts["huge_pages"]["reserved"] == {
        "2048kB": 12
    }
    assert (
        facts["nominal_ghz"] == 3.5
        and facts["governor"] == "powersave"
        and facts["caches"] == ["L1 Data 32K"]
    )
    allowed = len({0, 1, 900} & os.sched_getaffinity(0))
    assert (
        facts["domains"] == [{"cores": 3, "allowed": allowed, "gib": 32.0}]
        and facts["numa_balancing"] == "1"
    )
    assert facts["target"] == kernels.active() and json.dumps(facts)


def test_a_report_is_a_machine_and_a_partial_one_says_why_not(tmp_path):
    described = calibrate.describe(
        "a test", [calibrated_rank()], {}, calibrate.NetworkRates(), 64.0, "report"
    )
    path = tmp_path / "here.json"
    path.write_text(json.dumps(report(machine=described)))
    loaded = machine.load(str(path))
    # two copies in memory
    assert (loaded.name, loaded.threads, loaded.stream_gbs, loaded.intra_gbs) == (
        "here",
        2,
        20.0,
        5.0,
    )
    assert (
        loaded.sources["intra_gbs"].startswith("not measured: one rank")
        and "report" in loaded.sources["stream_gbs"]
    )
    assert [curve.threads for curve in loaded.gemm_curves] == [2]
    path.write_text(json.dumps(report(complete=False)))
    with pytest.raises(ValueError, match="this report ended before it had measured the machine"):
        machine.load(str(path))


def test_the_type_of_a_file_system(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(f"a / ext4 rw 0 0\nb {Path(tmp_path).resolve()} lustre rw 0 0\n")
    assert (
        training.file_system(tmp_path / "x", mounts) == "lustre"
        and training.file_system(Path("/"), mounts) == "ext4"
    )


@pytest.mark.parametrize(
    "counted, watts", [([100.0, 160.0], 30.0), ([100.0, None], None), (None, None)]
)
def test_power_is_what_the_counters_of_the_nodes_passed_over(counted, watts):
    values = iter(counted or ())
    energy = Counters("RAPL", [Counter("package-0", lambda: next(values))] if counted else [])
    here = context.Context(
        world=SoloComm(), nodes=find_nodes(SoloComm()), scale=context.SHRUNK, energy=energy
    )
    here.energy.joules()
    assert training.watts_of(here, here.world, 2.0) == watts


def test_the_text_shows_power_or_why_not():
    rows = HEALTHY["training"]["rows"]
    with_power = changed(
        HEALTHY, "training/rows", [*rows[:1], {**rows[1], "watts": 250.0, "tokens_per_joule": 8.0}]
    )
    found = figures.figures(report(with_power))
    assert found["124M, 2 ranks", "W"] == 250 and found["124M, 2 ranks", "tokens/J"] == 8
    assert "power: no energy counter\n" in figures.text(report())
