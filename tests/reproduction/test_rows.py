"""The benchmark tables as data: every row as printed, corrected by errata alone, its TFLOPs computed again"""

import csv
import re
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
    written = {
        (e["id"], e["table"], None if e["line"] == "*" else int(e["line"]))
        for e in cells_of("errata.csv")
    }
    assert used == written
    assert {f"R{n}" for n in range(1, 22)} <= {id for id, _, _ in used}


def cells_of(file: str) -> list[dict[str, str]]:
    with open(rows.SEEDS / file, encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def test_every_line_has_the_cells_of_its_header_and_a_place_of_its_own():
    for path in rows.SEEDS.glob("*.csv"):
        for cells in cells_of(path.name):
            assert None not in cells and None not in cells.values(), (path.name, cells)
    ids = [cells["table"] for cells in cells_of("tables.csv")]
    places = [(r.document, r.line) for r in load()]
    assert len({*ids}) == len(ids) and len({*places}) == len(places)
    files = {file for file, _ in rows.DOCUMENTS.values()}
    assert {path.name for path in rows.SEEDS.iterdir()} == {"errata.csv", "tables.csv", *files}


def test_rows_have_only_cells_of_their_table():
    tables = {r.table.id: r.table for r in load()}
    for document, (file, _) in rows.DOCUMENTS.items():
        for cells in cells_of(file):
            table = tables[cells["table"]]
            given = {name for name, cell in cells.items() if cell} - {"line", "table", "status"}
            assert table.document == document and given <= {*table.columns}, cells
    for table in tables.values():
        assert {*table.assumed, *table.columns, *table.facts} <= {*rows.PARSERS}
        assert table.id.startswith(f"{table.document}.")


def test_values_are_in_their_ranges():
    names = {
        "machine": {"a64fx", "a100"},
        "precision": {"fp32", "fp16", "bf16"},
        "formula": {"hardware", "parameter"},
        "status": {"ran", "oom", "failed", "planned", "impossible"},
        "zero": {0, 1},
    }
    sizes = ("nodes", "ranks", "layers", "hidden", "heads", "seq", "vocabulary")
    layout = ("dp", "tp", "pp", "mbs", "gbs")
    for r in load():
        assert all(getattr(r, name) in known for name, known in names.items()), r
        assert all(getattr(r, name) > 0 for name in (*sizes, *layout)), r
        measured = ("seconds", "tflops", "petaflops", "memory_mib", "ghz")
        assert all(getattr(r, name) is None or getattr(r, name) > 0 for name in measured), r
        assert r.software.startswith(("torch1.", "megatron-")), r
        assert r.table.facts["ac"] in ("", "Yes", "No") and r.cell("ac") in ("", "Yes", "No"), r
        assert r.cell("async") in ("", "-", "yes", "no"), r


def test_errata_quote_the_printed_cell_and_give_a_reason():
    for e in cells_of("errata.csv"):
        assert re.fullmatch(r"[RS]\d+", e["id"]) and e["why"] and e["column"] in rows.PARSERS, e
        assert e["unfit"] in ("", "time", "memory"), e
    for r in load():
        for e in r.errata:
            assert e.printed == r.cell(e.column) or e.line is None and e.printed in r.cell(e.column)


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
