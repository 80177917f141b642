"""tools.plot_profile reads what --profile writes."""

import subprocess
import sys
from pathlib import Path

import pytest

from fugaku_megatron.host.observed import Event, Profiler
from tools import plot_profile

ROOT = Path(__file__).resolve().parents[2]


def plot(*arguments):
    command = [sys.executable, "-m", "tools.plot_profile", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture
def table(tmp_path):
    profiler = Profiler()
    profiler.peak_gflops, profiler.steps = 100.0, [2.0]
    profiler.events = [Event("kernels", "linear_forward", 0.0, 1.0, 40e9), Event("communication", "dp all_reduce", 1.0, 0.5)]
    path = tmp_path / "table_rank0.txt"
    path.write_text("\n".join(profiler.table()) + "\n")
    return path


def test_a_table_is_read_back(table):
    assert plot_profile.read_table(table) == {"linear_forward": 1.0, "dp all_reduce": 0.5, "Python, autograd and the rest": 0.5}


def test_a_picture_comes_out(table, tmp_path):
    result = plot("--output", tmp_path / "step.png", f"before={table}", f"after={table}")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text, message", [("table.txt", "give LABEL=FILE"), ("a=/absent", "give a table that --profile wrote"),
                                           (f"a={__file__}", "no row of an operation")])
def test_mistakes_give_one_line(text, message, tmp_path):
    result = plot("--output", tmp_path / "x.png", text)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1
