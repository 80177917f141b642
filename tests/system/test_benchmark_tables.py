"""The tables measured on this host: which rows, the run of each, text, CSV and picture; one real sweep of a tiny model."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from pathlib import Path

import pytest

from benchmarks import pictures, preloads, tables
from benchmarks.__main__ import make_parser
from fugaku_megatron.observe.iteration_metrics import published_header
from fugaku_megatron.planner import machine
from tests.system.test_benchmarks import needs_mpi, result

HOST = Path(machine.__file__).parent / "machines" / "epyc-2core.json"


def options(*arguments: str) -> argparse.Namespace:
    return make_parser().parse_args(["tables", "--threads", "2", *arguments])


def measured_rows(*cells: tables.Cell) -> list[dict]:
    """Rows as `measure` leaves them, from a recorded iteration instead of a job."""
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
    return [
        {
            **recorded,
            **{name: getattr(cell, name) for name in tables.VARIED},
            "dp": cell.dp,
            **known,
        }
        for cell in cells
    ]


def test_rows_are_what_the_tables_vary():
    assert len(set(tables.ROWS)) == len(tables.ROWS) and set(tables.LAYOUTS) <= set(tables.ROWS)
    assert {cell.ranks for cell in tables.ROWS} == {1, 2} and {
        cell.mbs for cell in tables.ROWS
    } == {1, 2, 4}
    assert {(cell.dp, cell.tp, cell.pp) for cell in tables.ROWS} == {
        (1, 1, 1),
        (2, 1, 1),
        (1, 2, 1),
        (1, 1, 2),
    }
    for layout in tables.LAYOUTS:
        alike = [
            cell
            for cell in tables.ROWS
            if (cell.tp, cell.pp, cell.dp) == (layout.tp, layout.pp, layout.dp)
        ]
        assert {True, False} == {cell.recompute for cell in alike} and {1024, 2048} == {
            cell.seq for cell in alike
        }
    assert {cell.allocator for cell in tables.ROWS} == {"tuned", "tcmalloc"}


@pytest.mark.parametrize("cell", tables.ROWS, ids=tables.name_of)
def test_the_job_runs_what_is_modelled(cell, monkeypatch):
    monkeypatch.setattr(preloads, "find", lambda name: Path("/lib/libtcmalloc.so"))
    task, run = tables.job(options(), cell), tables.config("124m", tables.TOKENS, cell)
    assert (task.ranks, task.threads, task.warm_up) == (cell.ranks, 2 // cell.ranks, 2)
    assert (task.preload is None) == (cell.allocator == "tuned")
    given = dict(zip(task.flags, task.flags[1:]))
    for flag, value in (
        ("seq-length", run.model.seq_length),
        ("micro-batch-size", run.batch.micro_batch_size),
        ("global-batch-size", run.batch.global_batch_size),
        ("vocab-size", run.model.vocab_size),
        ("tensor-model-parallel-size", run.parallel.tensor_model_parallel_size),
        ("pipeline-model-parallel-size", run.parallel.pipeline_model_parallel_size),
    ):
        assert given[f"--{flag}"] == str(value)
    assert (
        (given.get("--recompute-granularity") == "full")
        == (run.training.recompute_granularity == "full")
        == cell.recompute
    )
    assert run.batch.global_batch_size * cell.seq >= 2048 and run.model.vocab_size == 50257


def test_rows_are_chosen_by_name_and_absent_libraries_skipped(monkeypatch, capsys):
    monkeypatch.setattr(preloads, "find", lambda name: None)
    assert list(tables.plan(options("--rows", "TP 2, PP 1, MBS 2"))) == [
        tables.replace(tables.TP2, mbs=2)
    ]
    assert all(cell.allocator == "tuned" for cell in tables.plan(options()))
    assert "apt-get install libgoogle-perftools4" in capsys.readouterr().out
    assert {cell.ranks for cell in tables.plan(options("--threads", "1"))} == {1}
    assert set(tables.plan(options("--quick"))) == set(tables.LAYOUTS)


def test_text_marks_what_is_measured_scaled_and_modelled(tmp_path):
    tcmalloc, recompute = (
        tables.replace(tables.DP2, allocator="tcmalloc"),
        tables.replace(tables.SINGLE, recompute=True),
    )
    rows = measured_rows(tables.SINGLE, tcmalloc, recompute)
    found = tables.report(rows)
    assert found["mean_time_error_percent"] == pytest.approx(
        sum(abs(r["time_error_percent"]) for r in found["rows"]) / 3
    )
    for row in found["rows"]:
        assert row["time_error_percent"] == pytest.approx(100 * (row["model_seconds"] / 7.64 - 1))
        assert sum(row["model_breakdown"].values()) == pytest.approx(row["model_seconds"])
    text = tables.text(options("--markdown"), found)
    assert (
        text.count("### 124M model, Sequence Length=1024") == 2
        and "measured, a CPU, 4.50 GHz, 2026-11-20" in text
    )
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert tuple(lines[0]) == (*published_header(), *tables.OUR_HEADER)
    first = dict(zip(lines[0], lines[2]))
    assert (first["Sec/it"], first["Mem"], first["GBS"], first["Notes"]) == (
        "7.64",
        "2673.0 MiB",
        "4",
        "-",
    )
    assert (
        first["scaled to GBS 1024, not measured"] == "1956"
        and lines[3][lines[0].index("Notes")] == "tcmalloc"
    )
    tables.save_csv(tmp_path / "a.csv", found)
    records = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert [r["name"] for r in records] == [
        r["name"] for r in found["rows"]
    ] and "machine" not in records[0]
    pictures.draw_tables(tmp_path / "a.png", found)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_former_rows_are_put_together_in_the_tables_order(tmp_path):
    for name, cell in (("a", tables.TP2), ("b", tables.SINGLE)):
        (tmp_path / f"{name}.json").write_text(json.dumps(tables.report(measured_rows(cell))))
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert [row["tp"] for row in tables.earlier_rows(options("--measured", *files))] == [1, 2]
    assert [
        row["tp"] for row in tables.earlier_rows(options("--measured", *files, "--rows", "TP 2"))
    ] == [2]


@needs_mpi
@pytest.mark.full
@pytest.mark.mpi
def test_a_row_is_measured_by_a_real_job(tmp_path):
    flags = (
        "--recipe",
        "demo",
        "--rows",
        "s 1024, DP 1, TP 2, PP 1, MBS 1, recompute",
        "--iterations",
        "1",
        "--machine",
        str(HOST),
    )
    output, printed = result(
        tmp_path / "rows.json", "tables", *flags, "--threads", "2", "--tokens", "1024"
    )
    (row,) = output["rows"]
    assert (row["ranks"], row["tp"], row["threads"], row["gbs"], row["allocator"]) == (
        2,
        2,
        1,
        1,
        "tuned",
    ) and row["recompute"]
    assert (
        row["seconds"] > 0
        and row["peak_memory_mib"] > 50
        and row["clock_ghz"] > 0
        and "tuned" in row["log"]
    )
    assert "1 of 1" in printed and output["repeat"] in printed and sys.executable not in printed
