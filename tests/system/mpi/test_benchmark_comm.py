"""python -m benchmarks comm: real ranks, a row per collective and size, JSON and picture."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import child, comm

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).resolve().parents[3]


def benchmark(*arguments):
    command = [sys.executable, "-m", "benchmarks", "comm", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_rows_picture_and_json(tmp_path):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "comm.json", tmp_path / "comm.png"
    done = benchmark("--ranks", 2, "--sizes", 65536, 4194304, "--rounds", 2, "--json", report, "--png", picture)
    assert done.returncode == 0, done.stderr
    result = json.loads(report.read_text())
    assert [(row["op"], row["bytes"]) for row in result["rows"]] == [
        (op, size) for size in (65536, 4194304) for op in ("all_reduce", "reduce_scatter", "all_gather")]
    for row in result["rows"]:
        assert row["measured"] is True and row["ranks"] == 2
        assert row["ratio"] == pytest.approx(row["before_seconds"] / row["seconds"]) and row["seconds"] > 0
    assert done.stdout.count("all_reduce") == 2 and picture.read_bytes().startswith(b"\x89PNG")


def test_defaults_fit_the_cores():
    """Four ranks on two cores did not end in a quarter of an hour."""
    assert [comm.default_ranks(cores) for cores in (1, 2, 3, 4, 48)] == [[2], [2], [2], [2, 4], [2, 4]]


def test_rows_are_printed_one_by_one(monkeypatch, capsys):
    printed = []

    def ranks(count, module, order):
        yield {"library": "MPI"}
        for size in order["sizes"]:
            printed.append(capsys.readouterr().out)  # when the next row is not measured yet
            yield {"op": "all_reduce", "bytes": size, "ranks": count, "seconds": 1e-3, "before_seconds": 2e-3, "ratio": 2.0}

    monkeypatch.setattr(child, "ranks", ranks)
    comm.measured(2, argparse.Namespace(sizes=[65536, 131072], rounds=1))
    assert printed[0].startswith("collective") and printed[1].split() == ["all_reduce", "2", "64", "1.000", "2.000", "2.00"]


@pytest.mark.parametrize("arguments, message", [
    (("--ranks", 1), "--ranks 1: give 2 or more"), (("--rounds", 0), "--rounds 0: give 1 or more"),
    (("--sizes", 8, "--ranks", 4), "--sizes 8: give 16 or more")])
def test_mistakes_are_one_line(arguments, message):
    done = benchmark(*arguments)
    assert done.returncode == 1 and done.stderr.startswith(f"python -m benchmarks comm: {message}") and done.stderr.count("\n") == 1
