"""Whole reports with shrunk shapes: alone, without MPI, and killed half-way. Two ranks: tests/cli/test_ranks.py."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.planner import machine
from fugaku_megatron.report import record
from fugaku_megatron.report.record import SHARES

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
FILES = ("report.html", "report.json", "report.txt")


def command(folder, *words, program=("-m", "fugaku_megatron")):
    return [
        sys.executable,
        *program,
        *f"report --ranks 1 --shrunk --output {folder / 'report.json'}".split(),
        *words,
    ]


def run(folder, *words, **more):
    done = subprocess.run(
        command(folder, *words, **more),
        capture_output=True,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "report.json").read_text()), done


def assert_no_names(folder):
    for file in FILES:
        text = (folder / file).read_text()
        for word in (getpass.getuser(), platform.node(), str(folder), str(ROOT), str(Path.home())):
            assert not re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), (file, word)


WITHOUT_MPI = "import sys; sys.modules['mpi4py'] = None; from fugaku_megatron.cli import program; sys.exit(program.main(sys.argv[1:]))"


@pytest.mark.full
def test_a_report_of_one_rank_needs_no_mpi(tmp_path):
    words = tuple(f"--minutes 2 --save {tmp_path}".split())
    data, done = run(tmp_path, *words, program=("-c", WITHOUT_MPI))
    assert data["complete"] and list(data["sections"]) == list(SHARES)
    assert all(row["good"] for row in data["sections"]["kernels"]["checks"])
    assert data["sections"]["kernels"]["elementwise"][0]["gbs"] > 0
    assert (
        data["sections"]["training"]["rows"][0]["tokens_per_s"] > 0
        and data["sections"]["storage"]["write_gbs"] > 0
    )
    assert [row["model"] for row in data["hours"]] == ["0.6B", "1B", "3B", "8B"]
    assert "communication was not measured" in done.stdout and "hours" in done.stdout.lower()
    assert re.search(
        r"^report: 6/6 storage, up to \d:\d\d; \d:\d\d used, at most \d:\d\d left$",
        done.stderr,
        re.MULTILINE,
    )
    assert machine.load(str(tmp_path / "report.json")).threads == 1
    assert_no_names(tmp_path)
    # the checkpoint is gone
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


STAYS = """import sys, time
from fugaku_megatron.cli import program
from fugaku_megatron.report import measure
measure.SECTIONS["communication"] = lambda context: time.sleep(600)  # until it is killed
sys.exit(program.main(sys.argv[1:]))"""


@pytest.mark.full
def test_a_killed_run_leaves_a_partial_report(tmp_path):
    for number, reason in ((signal.SIGTERM, "ended by SIGTERM"), (signal.SIGKILL, "running")):
        with subprocess.Popen(
            command(tmp_path, program=("-c", STAYS)),
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=ENVIRONMENT,
        ) as process:
            # the section before it is written
            assert any("communication" in line for line in process.stderr)
            process.send_signal(number)
            assert process.wait(60) == (128 + number if number == signal.SIGTERM else -number)
        data = record.read("--compare", tmp_path / "report.json")
        assert (
            data["complete"] is False
            and data["ended"] == reason
            and list(data["sections"])[:2] == ["host", "kernels"]
        )
        assert "PARTIAL" in (tmp_path / "report.txt").read_text()
        assert_no_names(tmp_path)
        for file in FILES:
            (tmp_path / file).unlink()
