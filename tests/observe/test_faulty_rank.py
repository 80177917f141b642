"""A slow rank among real ones is named with its phase, and a flipped bit is found at the next comparison, with its rank."""

from __future__ import annotations

import platform

import pytest

from fugaku_megatron.cli import program
from fugaku_megatron.observe.log.rank_table import mean, read
from fugaku_megatron.start.exit_codes import ExitCode
from tests.mpi import launch

pytestmark = [pytest.mark.system, pytest.mark.mpi]
PROGRAM = str(launch.TESTS / "mpi" / "faulty_rank.py")


def test_a_rank_slower_by_three_tenths_is_named_within_two_log_intervals(mpich, tmp_path, capsys):
    file = tmp_path / "ranks.jsonl"
    picture = tmp_path / "ranks.png"
    job = mpich.run(4, PROGRAM, "slow", str(file))
    (named,) = job.stdout.splitlines()
    assert named.startswith("slow: rank 2 (stage 0, ") and ": computation " in named
    average = mean(read(file))
    computation = average.seconds["computation"]
    assert max(range(4), key=computation.__getitem__) == 2
    assert (
        average.seconds["reductions"][3] > average.seconds["reductions"][2]
    )  # its tensor-parallel neighbour waits for it
    assert program.main(f"log {file} --ranks --png {picture}".split()) == 0
    assert " computation | " in capsys.readouterr().out and picture.read_bytes().startswith(
        b"\x89PNG"
    )


def test_one_flipped_bit_is_found_with_its_replica(mpich):
    job = mpich.run(3, PROGRAM, "flip", code=ExitCode.REPLICAS_DIFFER)
    assert job.stdout.splitlines() == [
        f"weights differ after iteration 6: rank 2 (node {platform.node()}, replica 2) holds other bits in "
        "decoder.layers.1.mlp.linear_fc2.weight than 2 of 3 replicas. Nothing is saved: continue without that node from a "
        "checkpoint of iteration 3 or before, when the weights agreed"
    ]
    assert "Traceback" not in job.stderr


def test_a_core_that_repeats_its_mistake_is_found_by_an_audit(mpich):
    job = mpich.run(4, PROGRAM, "audit", code=ExitCode.REPLICAS_DIFFER)
    (line,) = job.stdout.splitlines()
    named = f"results of iteration 6 differ: rank 2 (node {platform.node()}, "
    assert line.startswith(named) and " computed other bits in the output of decoder." in line
    assert "Traceback" not in job.stderr
