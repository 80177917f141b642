"""A slow rank among eight real ones is named with its phase, and `fugaku-megatron log --ranks` shows it."""

from __future__ import annotations

import pytest

from fugaku_megatron import cli
from fugaku_megatron.logs.rank_table import mean, read
from tests.system.mpi import launch

pytestmark = pytest.mark.mpi


def test_a_rank_slower_by_three_tenths_is_named_within_two_log_intervals(mpich, tmp_path, capsys):
    file, picture = tmp_path / "ranks.jsonl", tmp_path / "ranks.png"
    job = mpich.run(8, str(launch.TESTS / "system" / "mpi" / "slow_rank.py"), str(file))
    assert job.returncode == 0, job.stderr
    named = [line for line in job.stdout.splitlines() if line.startswith("slow: rank 6 (stage 0, ")]
    assert any(": computation " in line for line in named), job.stdout
    average = mean(read(file))
    computation = average.seconds["computation"]
    assert max(range(8), key=computation.__getitem__) == 6
    assert average.seconds["reductions"][7] > average.seconds["reductions"][6]  # its tensor-parallel neighbour waits for it
    assert cli.main(["log", str(file), "--ranks", "--png", str(picture)]) == 0
    assert " computation | " in capsys.readouterr().out and picture.read_bytes().startswith(b"\x89PNG")
