"""Tables measured on this host: rows and their runs, text and picture; one real sweep with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import jobs, pictures, preloads, tables
from fugaku_megatron.planner import machine
from tests.checks.benchmarks import needs_mpi, options, result

pytestmark = pytest.mark.system

HOST = Path(machine.__file__).parent / "machines" / "epyc-2core.json"
MEASURED = jobs.Measured(
    seconds=7.64,
    tflops=0.43,
    samples_per_second=0.524,
    minor_faults=12,
    system_seconds=0.01,
    clock_ghz=4.5,
    peak_memory_mib=2673,
    allocator="glibc 2.36, tuned",
    loss=10.98,
    others=0.0,
)


def table_options(flags: str = ""):
    return options(f"tables --machine {HOST} --threads 2 {flags}")


@pytest.mark.parametrize("cell", tables.ROWS, ids=tables.name_of)
def test_the_job_runs_what_is_modelled(cell, monkeypatch):
    monkeypatch.setattr(preloads, "find", lambda name: Path("/lib/libtcmalloc.so"))
    task = tables.job(table_options(), cell)
    run = tables.config("124m", tables.TOKENS, cell)
    assert (task.ranks, task.threads, task.warm_up) == (cell.ranks, 2 // cell.ranks, 2)
    assert (task.preload is None) == (cell.allocator == "tuned")
    given = dict(zip(task.flags, task.flags[1:]))
    for flag, value in {
        "seq-length": run.model.seq_length,
        "micro-batch-size": run.batch.micro_batch_size,
        "global-batch-size": run.batch.global_batch_size,
        "vocab-size": run.model.vocab_size,
        "tensor-model-parallel-size": run.parallel.tensor_model_parallel_size,
        "pipeline-model-parallel-size": run.parallel.pipeline_model_parallel_size,
    }.items():
        assert given[f"--{flag}"] == str(value)
    for granularity in (
        given.get("--recompute-granularity"),
        run.training.recompute_granularity,
    ):
        assert (granularity == "full") == cell.recompute
    assert run.batch.global_batch_size * cell.seq >= 2048 and run.model.vocab_size == 50257


def test_text_and_picture_of_measured_and_modelled_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "run", lambda job: MEASURED)
    given = table_options("--quick")
    found = {"cpu": "a CPU", **tables.measure(given)}
    assert [row["name"] for row in found["rows"]] == list(map(tables.name_of, tables.LAYOUTS))
    errors = []
    for row in found["rows"]:
        assert row["time_error_percent"] == pytest.approx(100 * (row["model_seconds"] / 7.64 - 1))
        assert row["scaled_seconds"] == pytest.approx(7.64 * 1024 / row["gbs"])
        errors.append(abs(row["time_error_percent"]))
    assert found["mean_time_error_percent"] == pytest.approx(sum(errors) / len(errors))
    text = tables.text(given, found)
    assert "measured, a CPU, 4.50 GHz" in text and "not measured" in text
    lines = text.splitlines()
    assert lines[2].startswith("s 1024, DP 1, TP 1, PP 1, MBS 1 ") and " 7.64 " in lines[2]
    pictures.draw_tables(tmp_path / "a.png", found)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@needs_mpi
@pytest.mark.full
@pytest.mark.mpi
def test_a_row_is_measured_by_a_real_job(tmp_path):
    command = f"tables --recipe demo --iterations 1 --machine {HOST} --threads 2 --tokens 1024"
    row_name = ("--rows", "s 1024, DP 1, TP 2, PP 1, MBS 1, recompute")
    output, printed = result(tmp_path / "rows.json", command, *row_name)
    (row,) = output["rows"]
    sizes = {"ranks": 2, "tp": 2, "gbs": 1}
    assert sizes.items() <= row.items() and row["recompute"]
    assert row["seconds"] > 0 and row["peak_memory_mib"] > 50 and row["clock_ghz"] > 0
    assert "tuned" in row["allocator"] and "1 of 1" in printed
    assert output["repeat"] in printed and sys.executable not in printed
