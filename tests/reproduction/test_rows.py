"""The benchmark tables as data: every row as printed, corrected by errata alone, its TFLOPs computed again, wrong cells refused."""

import csv
import shutil
from collections import Counter

import pytest

from fugaku_megatron.reproduction import rows, tables
from fugaku_megatron.reproduction.rows import Row, load

pytestmark = pytest.mark.unit


def row(document: str, line: int) -> Row:
    return next(r for r in load([document]) if r.line == line)


def test_errata_are_all_used():
    for r in load():
        assert (r.problem() is None) == (r.status != "impossible"), (
            r.table.id,
            r.line,
            r.problem(),
        )
    assert "DP 64 x TP 2 x PP 1 = 128 ranks, but the row has 64" in row("000", 24).problem()
    assert "72 is not divisible by --pipeline-model-parallel-size 48" in row("004", 483).problem()
    used = {(e.id, e.table, e.line) for r in load() for e in r.errata}
    with open(rows.SEEDS / "errata.csv", encoding="utf-8") as file:
        written = {
            (e["id"], e["table"], None if e["line"] == "*" else int(e["line"]))
            for e in csv.DictReader(file)
        }
    assert used == written
    assert {f"R{n}" for n in range(1, 22)} <= {id for id, _, _ in used}


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "a64fx_tcmalloc.csv",
            ",1020.3,",
            ",abc,",
            ["line 2, column seconds: 'abc'", "expected a number above 0"],
        ),
        (
            "a64fx_tcmalloc.csv",
            ",1020.3,",
            ",1020.3,7,",
            ["line 2, column notes", "has 17 cells, 16 are expected"],
        ),
        (
            "a64fx_tcmalloc.csv",
            "20,002.1,ran",
            "20,002.1,flew",
            ["line 2, column status: 'flew'", "ran or oom"],
        ),
        ("a64fx_tcmalloc.csv", "20,002.1,ran", "20,002.9,ran", ["line 2, column table: '002.9'"]),
        ("a64fx_tcmalloc.csv", "20,002.1,ran", "x,002.1,ran", ["line 2, column line: 'x'"]),
        (
            "a64fx_tcmalloc.csv",
            "3769.4 MiB",
            "3769.4 cows",
            ["line 2, column mem: '3769.4 cows'", "MiB"],
        ),
        ("a64fx_tcmalloc.csv", "line,table", "row,table", ["line 1: column line is missing"]),
        (
            "a64fx_30b.csv",
            ",17212.8,",
            ",17212.9,",
            ["errata.csv, line 17, column printed: '17212.8'", "'17212.9'"],
        ),
        (
            "a100.csv",
            "60,004.1,ran,,8,20B,,",
            "60,004.1,ran,,8,20B,6,",
            ["line 2, column layers: '6'", "no such column"],
        ),
        ("tables.csv", "Nodes|Size", "Nodes|Girth", ["tables.csv, line 2, column header"]),
        ("tables.csv", "software freq ac size", "software colour", ["column assumed: 'colour'"]),
        ("errata.csv", "R2,001.2,35", "Q2,001.2,35", ["line 13, column id: 'Q2'"]),
        (
            "a64fx_tcmalloc.csv",
            "21,002.1,ran",
            "20,002.1,ran",
            ["line 3, column line: '20'", "a line of its own"],
        ),
        (
            "errata.csv",
            "35,dp,8,6",
            "35,dp,8,six",
            ["errata.csv, line 13, column corrected: 'six'", "a whole number above 0"],
        ),
        ("errata.csv", "35,dp,8,6", "35,depth,8,6", ["line 13, column column: 'depth'"]),
    ],
)
def test_wrong_cells_are_refused_in_one_line(tmp_path, file, old, new, expected):
    folder = tmp_path / "seeds"
    shutil.copytree(rows.SEEDS, folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        rows.read(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value) and all(part in str(error.value) for part in expected), (
        error.value
    )


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="errata.csv: cannot be read"):
        rows.read(tmp_path)


def test_every_row_has_a_finding_or_says_why():
    assert [(r.table.id, r.line) for r in load() if tables.finding(r) == "unexplained"] == []
    for r in load():
        if tables.finding(r) == "":
            assert r.status != "ran" or "S2" in {e.id for e in r.errata}, (r.table.id, r.line)
    corrected = [
        (r, e)
        for r in load()
        if r.seconds
        for e in r.errata
        if e.column == "tflops" and e.line and e.corrected
    ]
    assert [r.line for r, e in corrected if tables.agrees(r, float(e.printed))] == [41]
    assert len(corrected) == 6


@pytest.mark.parametrize(
    ("document", "equal", "erratum"),
    [("000", 16, 3), ("001", 3, 12), ("002", 13, 1), ("004", 97, 1)],
)
def test_how_many_rows_are_as_printed(document, equal, erratum):
    counts = Counter(tables.finding(r) for r in load([document]))
    assert (counts["equal"], counts["erratum"]) == (equal, erratum)


@pytest.mark.parametrize(
    ("document", "line", "tflops"),
    [
        ("002", 20, 1.092),
        ("000", 39, 0.561),
        ("004", 280, 130.34),
        ("004", 474, 145.92),  # hardware FLOPs
        ("004", 254, 120.05),
        ("004", 60, 108.47),
        ("004", 341, 113.02),  # parameter FLOPs
        ("001", 24, 0.953),
        ("001", 32, 1.16),
        ("001", 38, 0.508),
        ("001", 42, 0.576),
        ("000", 55, 0.440),
        ("000", 66, 0.358),
    ],
)
def test_recomputed_tflops(document, line, tflops):
    r = row(document, line)
    assert tables.tflops(r, r.seconds) == pytest.approx(
        tflops, abs=0.01 if r.machine == "a100" else 0.0006
    )


def test_the_rule_refuses_the_next_digit_and_the_wrong_formula():
    r = row("002", 20)
    assert tables.agrees(r, 1.09) and not tables.agrees(r, 1.08) and not tables.agrees(r, 1.10)
    r = row("004", 280)
    assert (
        tables.agrees(r, 130.34) and not tables.agrees(r, 130.32) and not tables.agrees(r, 130.36)
    )
    for r in load(["004"]):
        if r.seconds is not None and r.layers > 10:
            other = {"hardware": "parameter", "parameter": "hardware"}[r.formula]
            swapped = Row(**{**vars(r), "formula": other})
            ratio = tables.flops(r) / tables.flops(swapped)
            assert (
                (1.02 if r.formula == "hardware" else 0.95)
                < ratio
                < (1.05 if r.formula == "hardware" else 0.98)
            )
            assert not tables.agrees(swapped, r.tflops)
