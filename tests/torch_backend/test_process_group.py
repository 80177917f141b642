"""torch.distributed over MPI against gloo, on ranks of the MPI that --mpi names."""

from collections import Counter

import pytest

from tests.helpers import rows
from tests.torch_backend import distributed_cases, group_programs

pytestmark = [pytest.mark.system, pytest.mark.mpi]
PROGRAM = group_programs.__file__
# PyTorch's tests of one kind each; all of them take a minute.
FAST = (
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_group",
    "test_broadcast_group",
    "test_gather_full_group",
    "test_isend_autograd_profiler",
    "test_reduce_group_max",
    "test_reduce_full_group_product",
    "test_scatter_object_list",
    "test_send_recv_any_source",
)


def test_collectives_and_messages_equal_gloo(mpi):
    job = mpi.run(4, PROGRAM, "verbs")
    for verb in group_programs.VERBS:
        assert job.stdout.count(f"ok {verb.__name__}\n") == 4, job.stdout
    assert job.stdout.count("ok groups") == 4
    assert job.stdout.count("ok threads") == 4


def test_training_equals_gloo(mpi):
    """DDP, FSDP2 and a sharded checkpoint."""
    job = mpi.run(4, PROGRAM, "training")
    assert job.stdout.count("ok data_parallel") == 4
    assert job.stdout.count("ok sharded") == 4


def run_cases(mpi, folder, *names):
    """Run PyTorch's tests and return the names of those that passed on all ranks."""
    job = mpi.run(4, distributed_cases.__file__, str(folder), *names, timeout=600)
    ends = Counter(job.stdout.splitlines())
    for line in ends:  # tests that PyTorch has disabled
        assert not line.startswith("skip") or "github.com/pytorch" in line
    assert set(ends.values()) == {4}, job.stdout
    return {line.removeprefix("ok ") for line in ends if line.startswith("ok ")}


def test_tests_of_pytorch(mpi, tmp_path):
    assert run_cases(mpi, tmp_path, *FAST) == set(FAST)


@pytest.mark.full
def test_all_tests_of_pytorch(mpi, tmp_path):
    passed = run_cases(mpi, tmp_path)
    assert set(FAST) < passed
    assert len(passed) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "program"), [("accelerate", "accelerated"), ("trl", "trainer")]
)
def test_library_equals_gloo(mpi, library, program):
    pytest.importorskip(library)
    ours, theirs = (losses(mpi.run(2, PROGRAM, program, each)) for each in ("fugaku", "gloo"))
    assert len(ours) == 16  # two ranks: eight losses each, or four with their gradient norms
    assert ours == pytest.approx(theirs, rel=1e-6)


def losses(job):
    """Return the numbers that each rank printed."""
    lines = sorted(line for line in job.stdout.splitlines() if line.startswith("losses "))
    return [float(word.strip("[](),")) for line in lines for word in line.split()[2:]]


# The line of a job in which a rank does not come.
LATE = {
    "late": "all_reduce number 1 of process group 1: timeout after 3 s: rank(s) 1 did not come",
    "late_group": "new process group 1: timeout after 3 s: rank(s) 2 did not come",
    "late_in_group": "of process group 1: timeout after 3 s: rank(s) 2 did not come",
    "late_start": "start of MPI: timeout after 20 s: rank(s) 1 did not come",
}


@pytest.mark.parametrize("program", rows(LATE, rare=set(LATE) - {"late"}))
def test_rank_that_does_not_come_is_named(mpi, program):
    job = mpi.run(3, PROGRAM, program, code=None)
    assert job.returncode != 0
    assert job.stderr.count(LATE[program]) == 1, job.stderr
    assert "Traceback" not in job.stderr
    assert job.seconds < 60


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_killed_rank_is_named(mpi, rank):
    """By Open MPI's launcher, and by a process of the backend under MPICH's, which names a process id alone."""
    job = mpi.run(3, PROGRAM, "killed", str(rank), code=None)
    assert job.returncode != 0
    said = [line for line in job.stderr.splitlines() if f"rank {rank} " in line]
    assert len(said) == 1, job.stderr
    assert "Traceback" not in job.stderr


def test_failing_rank_ends_the_job(mpi):
    job = mpi.run(3, PROGRAM, "raises", code=None)
    assert job.returncode != 0
    assert "rank 1: Traceback" in job.stderr and "KeyError: 'boom'" in job.stderr
    assert "killed?" not in job.stderr


@pytest.mark.full
def test_wait_with_a_timeout(mpi):
    job = mpi.run(2, PROGRAM, "waits")
    assert job.stdout.count("ok waits") == 2


def test_unfinished_collectives_leave_the_exit_code(mpi):
    job = mpi.run(2, PROGRAM, "unfinished", code=7)
    assert job.stdout.count("ok unfinished") == 2
    assert job.seconds < 60


@pytest.mark.full
def test_groups_are_freed(mpi):
    job = mpi.run(2, PROGRAM, "many_groups")
    assert job.stdout.count("ok groups") == 2
