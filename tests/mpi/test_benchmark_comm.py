"""python -m benchmarks comm: real ranks, a row per collective and size, JSON and picture."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("arguments, message", [
    (("--ranks", 1), "--ranks 1: give 2 or more"), (("--rounds", 0), "--rounds 0: give 1 or more"),
    (("--sizes", 8), "--sizes 8: give 16 or more")])
def test_mistakes_are_one_line(arguments, message):
    done = benchmark(*arguments)
    assert done.returncode == 1 and done.stderr.startswith(f"python -m benchmarks comm: {message}") and done.stderr.count("\n") == 1
