"""Tables measured on this host: rows and their runs, text, CSV and picture; one real sweep with a tiny model."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks import pictures, preloads, tables
from fugaku_megatron.observe.log.iteration_metrics import published_header
from fugaku_megatron.planner import machine
from tests.checks.benchmarks import needs_mpi, options, result

pytestmark = pytest.mark.system

HOST = Path(machine.__file__).parent / "machines" / "epyc-2core.json"


def table_options(flags: str = ""):
    return options(f"tables --threads 2 {flags}")


def measured_rows(*cells: tables.Cell) -> list[dict]:
    """Return rows as `measure` leaves them, from a recorded iteration instead of a job."""
    recorded = {
        "seconds": 7.64,
        "tflops": 0.43,
        "samples_per_second": 0.524,
        "minor_faults": 12,
        "system_seconds": 0.01,
        "clock_ghz": 4.5,
        "peak_memory_mib": 2673,
        "loss": 10.98,
        "others": 0.0,
    }
    known = {
        "log": "glibc 2.36, tuned",
        "recipe": "124m",
        "gbs": 4,
        "tokens": tables.TOKENS,
        "threads": 2,
        "busy": False,
        "cpu": "a CPU",
        "torch": "2",
        "date": "2026-11-20",
        "machine": json.loads(HOST.read_text()),
    }
    rows = []
    for cell in cells:
        varied = {name: getattr(cell, name) for name in tables.VARIED}
        rows.append({**recorded, **varied, "dp": cell.dp, **known})
    return rows


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


def test_text_marks_what_is_measured_scaled_and_modelled(tmp_path):
    tcmalloc = tables.replace(tables.DP2, allocator="tcmalloc")
    recompute = tables.replace(tables.SINGLE, recompute=True)
    found = tables.report(measured_rows(tables.SINGLE, tcmalloc, recompute))
    for row in found["rows"]:
        assert row["time_error_percent"] == pytest.approx(100 * (row["model_seconds"] / 7.64 - 1))
        assert sum(row["model_breakdown"].values()) == pytest.approx(row["model_seconds"])
    mean = sum(abs(row["time_error_percent"]) for row in found["rows"]) / 3
    assert found["mean_time_error_percent"] == pytest.approx(mean)
    text = tables.text(table_options("--markdown"), found)
    assert text.count("### 124M model, Sequence Length=1024") == 2
    assert "measured, a CPU, 4.50 GHz, 2026-11-20" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    assert tuple(header) == (*published_header(), *tables.OUR_HEADER)
    first, second = (dict(zip(header, row)) for row in rows[:2])
    assert {
        "Sec/it": "7.64",
        "Mem": "2673.0 MiB",
        "GBS": "4",
        "Notes": "-",
        "scaled to GBS 1024, not measured": "1956",
    }.items() <= first.items()
    assert second["Notes"] == "tcmalloc"
    tables.save_csv(tmp_path / "a.csv", found)
    records = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [record["name"] for record in records] == [row["name"] for row in found["rows"]]
    assert "machine" not in records[0]
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
    sizes = {"ranks": 2, "tp": 2, "threads": 1, "gbs": 1, "allocator": "tuned"}
    assert sizes.items() <= row.items() and row["recompute"]
    assert row["seconds"] > 0 and row["peak_memory_mib"] > 50 and row["clock_ghz"] > 0
    assert "tuned" in row["log"] and "1 of 1" in printed
    assert output["repeat"] in printed and sys.executable not in printed
