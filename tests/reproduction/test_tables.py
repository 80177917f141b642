"""The `tables` command: printed cells stay, ours are next to them and errata below; files and a user's mistakes."""

import csv
from pathlib import Path
from types import SimpleNamespace

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.reproduction import tables
from fugaku_megatron.reproduction.rows import load
from fugaku_megatron.reproduction.tables import compare, draw, text

pytestmark = pytest.mark.unit

TABLES = Path(__file__).resolve().parents[2] / "docs" / "tables.md"


def slow(row):
    """Predict half a TFLOPs per rank, and a tenth less memory than printed."""
    seconds = tables.flops(row) / row.ranks / 0.5e12
    return SimpleNamespace(
        seconds=seconds,
        lower=0.9 * seconds,
        upper=1.1 * seconds,
        oom=row.line == 27,
        memory_mib_max=0.9 * (row.memory_mib or 1000),
    )


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().split("|")[1:-1]]


def printed_lines(output: str) -> list[list[str]]:
    """Return the cells of every table line, without headers and rules."""
    rows = [cells(line) for line in output.splitlines() if line.startswith("|")]
    return [
        r
        for previous, r in zip([[]] + rows, rows)
        if not r[0].endswith("-:") and r[-1] != "remarks"
    ]


def test_printed_cells_come_first_and_unchanged():
    rows = load()
    lines = printed_lines(text(compare(rows, slow)))
    assert len(lines) == len(rows) == 190
    for row, line in zip(rows, lines):
        assert tuple(line[: len(row.cells)]) == row.cells and len(line) == len(row.cells) + 9


def test_errors_oom_and_refusals():
    comparisons = {c.row.line: c for c in compare(load(["001"]), slow)}
    assert comparisons[24].time_error_percent == pytest.approx(
        100 * (0.9526 / 0.5 - 1), abs=0.1
    )  # 537.9 s, not 17212.8 s
    assert (
        comparisons[27].time_error_percent is None and comparisons[27].memory_error_percent is None
    )
    assert comparisons[27].remarks() == ["out of memory", "model: out of memory", "R5"]
    assert comparisons[25].memory_error_percent == pytest.approx(-10)

    def refuse(row):
        raise ValueError("this machine is unknown")

    output = text(compare(load(["002"]), refuse))
    assert "line 20 is not modelled: this machine is unknown" in output
    assert all(line[-7:-1] == ["-"] * 6 for line in printed_lines(output))
    assert output.splitlines()[-1] == "002: 14 rows; the model has no row to be compared with"


def test_errata_stand_below_their_table():
    for table in text(compare(load(), slow)).split("\n\n| ")[1:]:
        used = {
            id
            for line in printed_lines("| " + table)
            for id in line[-1].split(", ")
            if id[:1] in "RS" and id[1:].isdigit()
        }
        noted = {line.split()[0] for line in table.splitlines() if line.startswith("  ")}
        assert used <= noted, used - noted
    output = text(compare(load(["001"]), slow))
    assert (
        "line 35, 8 -> 6: DP = nodes / (MP x PP) = 1152 / 192" in output
        and "assumed, not printed: software" in output
    )
    assert "model against 84 printed times" in text(compare(load(["004"]), slow)).splitlines()[-1]
    assert (
        "model against 67 printed memory sizes"
        in text(compare(load(["004"]), slow)).splitlines()[-1]
    )


def test_csv(tmp_path):
    tables.save_csv(tmp_path / "all.csv", compare(load(), slow))
    with open(tmp_path / "all.csv", encoding="utf-8", newline="") as file:
        records = list(csv.DictReader(file))
    assert len(records) == 190
    r = next(r for r in records if (r["document"], r["line"]) == ("001", "35"))
    assert (r["printed_dp"], r["dp"], r["printed_seconds"], r["seconds"]) == (
        "8",
        "6",
        "701658.5",
        "701.6585",
    )
    assert (
        float(r["recomputed_tflops"]) == pytest.approx(0.974, abs=1e-3)
        and r["errata"] == "R1 R2 R4"
    )
    assert float(r["model_tflops"]) == pytest.approx(0.5) and r["finding"] == "erratum"


def test_the_picture_has_a_square_panel_per_document_whose_points_are_the_rows(
    tmp_path, monkeypatch
):
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    draw(tmp_path / "a.png", compare(load(["000"]), slow))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(figure_module.Figure, "savefig", lambda self, *a, **k: figures.append(self))
    draw(tmp_path / "a.png", compare(load(["001", "004"]), slow))
    for panel, document in zip(figures[0].axes, ("001", "004"), strict=True):
        points = {
            (x, y)
            for line in panel.lines
            if not line.get_label().startswith("_")
            for x, y in zip(*line.get_data())
        }
        rows = [c for c in compare(load([document]), slow) if c.row.fit_time]
        assert points == {
            (c.row.seconds, c.prediction.seconds) for c in rows if c.row.seconds and c.prediction
        }
        assert (
            panel.get_xlim() == panel.get_ylim()
            and panel.get_xscale() == panel.get_yscale() == "log"
        )
        assert " rows, mean error " in panel.get_title() and "x model" not in panel.get_title()
        assert len(panel.get_legend().get_texts()) <= 6


def test_the_command_and_the_committed_tables(tmp_path, capsys):
    assert (
        program.main(["tables", "--document", "001", "002", "--csv", str(tmp_path / "t.csv")]) == 0
    )
    done = capsys.readouterr()
    assert done.err == ""
    assert (
        len(printed_lines(done.out)) == 30
        and len((tmp_path / "t.csv").read_text().splitlines()) == 31
    )
    assert program.main(["tables", "--markdown"]) == 0
    sums = [
        f"- {line}"
        for line in capsys.readouterr().out.splitlines()
        if line[:3] in ("000", "001", "002", "004", "005")
    ]
    assert len(sums) == 5 and TABLES.read_text().endswith("\n\n" + "\n".join(sums) + "\n"), (
        "make rendered writes them again"
    )
