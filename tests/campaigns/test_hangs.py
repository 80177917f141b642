"""A real rank that is stopped by SIGSTOP is named with what it did, and the job ends with the exit code of a hang."""

from __future__ import annotations

import pytest

from fugaku_megatron.comm.launcher import ExitCode
from tests.campaigns.hangs import RANKS, hang

pytestmark = pytest.mark.mpi
TIMEOUT = 4.0  # s


def test_a_stopped_rank_is_named_and_the_job_ends(mpi, tmp_path):
    phase, rank = {"mpich": ("start", 3), "openmpi": ("forward", 0)}[mpi.name]
    outcome = hang(mpi, tmp_path, rank, phase, TIMEOUT)
    assert outcome.right and f"; {RANKS - 1} ranks wait for it" in outcome.line, outcome
    assert outcome.code == ExitCode.HANG
    assert len(outcome.stacks) == RANKS and outcome.ending < 15, outcome
    stopped = next(tmp_path.rglob(f"rank{rank}.txt")).read_text()
    assert "state T (stopped)" in stopped and "most recent call first" in stopped
