"""The benchmark tables as data: every row is there, read as printed, corrected by errata only, and wrong cells are refused."""

from __future__ import annotations

import csv
import shutil
from collections import Counter

import pytest

from fugaku_megatron.reproduction import rows
from fugaku_megatron.reproduction.rows import Row, load


def row(document: str, line: int) -> Row:
    return next(r for r in load([document]) if r.line == line)


def test_every_row_of_every_table_is_there():
    counts = {"000": [14, 4, 14, 5], "001": [5, 11], "002": [7, 7],
              "004": [3, 3, 8, 9, 4, 4, 4, 4, 3, 5, 4, 3, 4, 1, 3, 2, 2, 3, 1, 2, 6, 3, 2, 3, 7, 6, 11], "005": [7, 2, 1]}
    for document, expected in counts.items():
        tables = Counter(r.table.id for r in load([document]))
        assert list(tables.values()) == expected
        assert list(tables) == [f"{document}.{n}" for n in range(1, len(expected) + 1)]
    lines = [(r.document, r.line) for r in load()]
    assert lines == sorted(set(lines)), "rows keep the order of the documents, each stands there once"


@pytest.mark.parametrize(("table", "count"), [("000.1", 12), ("001.1", 14), ("001.2", 11), ("002.1", 13), ("004.1", 9)])
def test_cells_of_a_row(table, count):
    assert {len(r.cells) for r in load() if r.table.id == table} == {count}


def test_cells_are_verbatim():
    assert row("001", 24).cell("mem") == "29138.6 MiB (OOM after first epoch)"
    assert row("001", 32).cell("seconds") == "3534883.3(1itrのみ実行)"
    assert row("000", 27).cell("gbs") == "- MiB"
    assert row("000", 40).cell("nodes") == "1 (2.2Hz)"
    assert row("002", 20).cells == ("1", "2.0GHz", "124M", *"1111", "1024", "3769.4 MiB", "1020.3", "1.09", "0.0010", "-")


def test_runs_that_count_for_fitting():
    documents = {d: load([d]) for d in rows.DOCUMENTS}
    assert {d: sum(r.fit_time for r in found) for d, found in documents.items()} == {
        "000": 19, "001": 15, "002": 14, "004": 84, "005": 10}
    assert {d: sum(r.fit_memory for r in found) for d, found in documents.items()} == {
        "000": 19, "001": 4, "002": 14, "004": 67, "005": 3}
    assert not row("004", 447).fit_time and row("004", 447).fit_memory  # R18: an outlier
    assert row("004", 475).fit_time and not row("004", 475).fit_memory  # R19: two memories for one run
    assert not row("001", 27).fit_memory  # out of memory


def test_one_run_counts_once():
    assert row("004", 188).duplicate_of == row("004", 253).duplicate_of == 153 and row("004", 340).duplicate_of == 279
    counted = [r for r in load() if r.fit_time]
    assert len({r.identity() for r in counted}) == len(counted)


@pytest.mark.parametrize(("document", "line", "facts"), [
    ("000", 27, {"gbs": 1024, "ghz": 2.2, "nodes": 512, "status": "planned", "memory_mib": None}),  # R9, R10
    ("000", 55, {"tflops": 0.44, "seconds": 9.9, "seq": 1024, "recompute": True, "software": "torch1.7", "ghz": 2.0}),  # R12
    ("001", 24, {"seconds": 537.9, "gbs": 48, "memory_mib": 29138.6, "tp": 1}),  # R3, R5
    ("001", 27, {"status": "oom", "recompute": False, "seconds": None, "memory_mib": 29087.7}),  # R5
    ("001", 37, {"seconds": 353.8192, "dp": 16, "ghz": 2.0, "hidden": 7168}),  # R1, R2, R7
    ("001", 42, {"tp": 6, "hidden": 7176, "heads": 78, "seconds": 297.1933, "tflops": 0.58}),
    ("002", 37, {"software": "torch1.10", "dp": 64, "petaflops": 0.035}),
    ("004", 60, {"ranks": 8, "nodes": 1, "layers": 8, "heads": 32, "seconds": 769.99, "memory_mib": 67 * 1024, "gbs": 2048}),
    ("004", 127, {"ranks": 320, "nodes": 40, "dp": 4, "synchronous": True, "seconds": None, "tflops": 87.78}),
    ("004", 128, {"status": "failed", "tflops": None, "synchronous": False}),
    ("004", 150, {"layers": 77, "pp": 7, "formula": "parameter", "ghz": None}),  # R21
    ("004", 319, {"dp": 4, "memory_mib": None}),  # R15
    ("004", 330, {"dp": 1, "gbs": 512, "layers": 6}),  # R16
    ("004", 340, {"seconds": 134.02, "tflops": 120.29, "zero": 1}),  # R17
    ("004", 341, {"formula": "parameter", "zero": 0}),  # R17
    ("004", 466, {"status": "oom", "seconds": None, "memory_mib": None}),
    ("005", 9, {"nodes": 4096, "ranks": 4096, "devices": 4096, "dp": 1024, "tp": 4, "recompute": False, "software": "torch1.10"}),
    ("005", 12, {"nodes": 1, "ranks": 4, "devices": 1, "tp": 4, "seconds": 1233.7, "tflops": 0.68, "memory_mib": 3365.5}),  # R26
    ("005", 13, {"ghz": 2.2, "ranks": 4, "dp": 4, "software": "torch1.10+tcmalloc", "tflops": 2.298}),  # R27
])
def test_facts(document, line, facts):
    printed_row = row(document, line)
    assert {name: getattr(printed_row, name) for name in facts} == facts


def test_only_impossible_rows_cannot_run():
    for r in load():
        assert (r.problem() is None) == (r.status != "impossible"), (r.table.id, r.line, r.problem())
    assert "DP 64 x TP 2 x PP 1 = 128 ranks, but the row has 64" in row("000", 24).problem()
    assert "72 is not divisible by --pipeline-model-parallel-size 48" in row("004", 483).problem()


def test_errata_are_all_used():
    used = {(e.id, e.table, e.line) for r in load() for e in r.errata}
    with open(rows.SEEDS / "errata.csv", encoding="utf-8") as file:
        written = {(e["id"], e["table"], None if e["line"] == "*" else int(e["line"])) for e in csv.DictReader(file)}
    assert used == written
    assert {f"R{n}" for n in range(1, 22)} <= {id for id, _, _ in used}


@pytest.mark.parametrize(("file", "old", "new", "expected"), [
    ("a64fx_tcmalloc.csv", ",1020.3,", ",abc,", ["line 2, column seconds: 'abc'", "a number above 0 is expected"]),
    ("a64fx_tcmalloc.csv", ",1020.3,", ",1020.3,7,", ["line 2, column notes", "has 17 cells, 16 are expected"]),
    ("a64fx_tcmalloc.csv", "20,002.1,ran", "20,002.1,flew", ["line 2, column status: 'flew'", "ran or oom"]),
    ("a64fx_tcmalloc.csv", "20,002.1,ran", "20,002.9,ran", ["line 2, column table: '002.9'"]),
    ("a64fx_tcmalloc.csv", "20,002.1,ran", "20,001.1,ran", ["line 2, column table: '001.1'"]),
    ("a64fx_tcmalloc.csv", "20,002.1,ran", "x,002.1,ran", ["line 2, column line: 'x'"]),
    ("a64fx_tcmalloc.csv", "3769.4 MiB", "3769.4 cows", ["line 2, column mem: '3769.4 cows'", "MiB"]),
    ("a64fx_tcmalloc.csv", "1,2.0GHz", "1,fast", ["line 2, column freq: 'fast'", "2.0GHz"]),
    ("a64fx_tcmalloc.csv", "line,table", "row,table", ["line 1: column line is missing"]),
    ("a64fx_30b.csv", "24,001.1,ran,48,", "24,001.1,ran,-,", ["line 2, column nodes: '-'"]),
    ("a64fx_30b.csv", ",17212.8,", ",17212.9,", ["errata.csv, line 17, column printed: '17212.8'", "'17212.9'"]),
    ("a100.csv", "60,004.1,ran,,8,20B,,", "60,004.1,ran,,8,20B,6,", ["line 2, column layers: '6'", "no such column"]),
    ("tables.csv", ",hardware,", ",guess,", ["line 2, column formula: 'guess'", "hardware or parameter"]),
    ("tables.csv", "Nodes|Size", "Nodes|Girth", ["tables.csv, line 2, column header"]),
    ("tables.csv", "software freq ac size", "software colour", ["column assumed: 'colour'"]),
    ("errata.csv", "R2,001.2,35", "Q2,001.2,35", ["line 13, column id: 'Q2'"]),
    ("errata.csv", "R2,001.2,35", "R2,001.2,99", ["line 13, column line: 99"]),
    ("a64fx_tcmalloc.csv", ",1020.3,", ",0.0,", ["line 2, column seconds: '0.0'", "a number above 0 is expected"]),
    ("a64fx_tcmalloc.csv", "21,002.1,ran", "20,002.1,ran", ["line 3, column line: '20'", "a line of its own"]),
    ("errata.csv", "35,dp,8,6", "35,dp,8,six", ["errata.csv, line 13, column corrected: 'six'", "a whole number above 0"]),
    ("errata.csv", "35,dp,8,6", "35,depth,8,6", ["line 13, column column: 'depth'"]),
])
def test_wrong_cells_are_refused_in_one_line(tmp_path, file, old, new, expected):
    folder = tmp_path / "seeds"
    shutil.copytree(rows.SEEDS, folder)
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(ValueError) as error:
        rows.read(folder)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value) and all(part in str(error.value) for part in expected), error.value


def test_missing_file_and_unknown_document(tmp_path):
    with pytest.raises(ValueError, match="errata.csv: cannot be read"):
        rows.read(tmp_path)
    with pytest.raises(ValueError, match="--document 003 is unknown: pass 000 or 001 or 002 or 004 or 005"):
        load(["003"])
