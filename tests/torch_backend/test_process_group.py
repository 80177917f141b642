"""torch.distributed over MPI against gloo, on ranks of the MPI that --mpi names."""

import pytest

from tests.torch_backend import group_programs

pytestmark = [pytest.mark.system, pytest.mark.mpi]
PROGRAM = group_programs.__file__


def test_collectives_and_messages_equal_gloo(mpi):
    job = mpi.run(4, PROGRAM, "verbs")
    for verb in group_programs.VERBS:
        assert job.stdout.count(f"ok {verb.__name__}\n") == 4, job.stdout
    assert job.stdout.count("ok groups") == 4


def test_training_equals_gloo(mpi):
    """DDP, FSDP2 and a sharded checkpoint."""
    job = mpi.run(4, PROGRAM, "training")
    assert job.stdout.count("ok data_parallel") == 4
    assert job.stdout.count("ok sharded") == 4


def test_rank_that_does_not_come_is_named(mpi):
    job = mpi.run(3, PROGRAM, "late", code=None)
    assert job.returncode != 0
    assert "all_reduce number 2 of process group" in job.stderr
    assert "did not end in 3 s: rank(s) 1 did not come" in job.stderr
    assert "Traceback" not in job.stderr


def test_failing_rank_ends_the_job(mpi):
    job = mpi.run(3, PROGRAM, "raises", code=None)
    assert job.returncode != 0
    assert "rank 1: Traceback" in job.stderr and "KeyError: 'boom'" in job.stderr
