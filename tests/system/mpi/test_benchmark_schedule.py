"""python -m benchmarks schedule: sleeping stages follow their lists on real ranks."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mpi
ROOT = Path(__file__).resolve().parents[3]


def benchmark(*arguments):
    command = [sys.executable, "-m", "benchmarks", "schedule", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_every_schedule_follows_its_list(tmp_path):
    report = tmp_path / "schedule.json"
    done = benchmark("--stages", 4, "--microbatches", 3, "--slot-ms", 60, "--chunks", 3, "--json", report,
                     *(("--png", tmp_path / "p.png") if importlib.util.find_spec("matplotlib") else ()))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())["rows"]
    assert [(row["schedule"], row["chunks"]) for row in rows] == [
        ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-h1", 3), ("zbv", 2)]
    assert rows[0]["list_seconds"] == pytest.approx(0.06 * 3 * (3 + 4 - 1)) and rows[0]["ratio_to_1f1b"] == 1
    for row in rows:  # a busy machine wakes sleepers late
        assert 1 <= row["measured_seconds"] / row["list_seconds"] < 1.25
        assert row["ratio_to_1f1b"] == pytest.approx(rows[0]["measured_seconds"] / row["measured_seconds"])
    assert min(row["ratio_to_1f1b"] for row in rows[1:]) > 1.1
    assert "wrote" not in done.stdout or (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments, message", [
    (("--stages", 1), "--stages 1: give 2 or more"), (("--rounds", 0), "--rounds 0: give a number above 0"),
    (("--slot-ms", 0), "--slot-ms 0.0: give a number above 0"), (("--chunks", 1), "--chunks 1: give 2 or more")])
def test_mistakes_are_one_line(arguments, message):
    done = benchmark(*arguments)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"python -m benchmarks schedule: {message}")
