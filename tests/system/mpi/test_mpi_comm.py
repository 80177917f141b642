"""The MPI communicator on real ranks, and the ways a job ends, under the MPI that --mpi names.

Each rank imports torch, so one mpiexec run checks all verbs; the programs are tests/parallel/collective_checks.py and endings.py.
"""

import re
import time
from pathlib import Path

import psutil
import pytest

from tests.parallel import collective_checks
from tests.system.mpi import launch

pytestmark = pytest.mark.mpi
ENDINGS = str(Path(__file__).parent / "endings.py")
VERBS = collective_checks.__file__
LARGE_GB = 14


def seconds_to_end(job):
    """From the moment all ranks were there."""
    started = [line for line in job.stdout.splitlines() if line.startswith("started ")]
    assert len(started) == 1, job
    return time.time() - float(started[0].split()[1])


def test_verbs_agree_with_torch(mpi):
    ranks = 3
    job = mpi.run(ranks, VERBS)
    assert job.returncode == 0, job.stderr
    *passed, description = job.stdout.splitlines()
    assert passed == [f"ok {limit} {check.__name__}" for limit in collective_checks.LIMITS for check in collective_checks.CHECKS]
    library = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi.name]
    assert description.startswith(library) and description.endswith(f"MPI_THREAD_SERIALIZED, {ranks} rank(s)")


@pytest.mark.parametrize("level", ["serialized", "funneled"])
def test_one_thread_calls_mpi_in_whatever_order_operations_come(mpi, level):
    """250 random orders of nonblocking sums among blocking ones."""
    job = mpi.run(4, VERBS, "orders", FUGAKU_MEGATRON_MPI_THREAD_LEVEL=level)
    assert job.returncode == 0, job.stderr
    assert job.stdout.startswith("ok orders 250 ") and f"MPI_THREAD_{level.upper()}" in job.stdout


def test_ranks_of_a_node_share_memory(mpi):
    job = mpi.run(3, VERBS, "node", OMP_NUM_THREADS="2")
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("ok node ") == len(collective_checks.COLLECTIVE_CHECKS) + 1


def test_nodes_add_up_inside_and_then_between(mpi):
    job = mpi.run(4, VERBS, "levels")
    assert job.returncode == 0, job.stderr
    checks = len(collective_checks.LEVEL_CHECKS)
    assert [job.stdout.count(f"ok {name} ") for name in (*collective_checks.NODES, "stages")] == [checks + 1, checks + 1, checks]


def test_an_unknown_thread_level_is_one_line(mpi):
    job = mpi.run(2, ENDINGS, "success", FUGAKU_MEGATRON_MPI_THREAD_LEVEL="single")
    assert job.returncode == 2
    assert job.stderr.count("_MPI_THREAD_LEVEL=single: expected one of funneled, serialized, multiple; correct") == 1, job.stderr


@pytest.mark.slow
def test_messages_above_two_to_the_31(mpi):
    if psutil.virtual_memory().available < LARGE_GB * 10**9:
        pytest.skip(f"less than {LARGE_GB} GB of memory available")
    job = mpi.run(2, VERBS, "large", timeout=400)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("ok large") == len(collective_checks.LARGE)


@pytest.mark.parametrize("ending, code, message", [
    ("bug_on_one_rank", 1, "rank 2: Traceback (most recent call last):"),
    ("mistake_on_one_rank", 2, "rank 1: shard 1 is missing: name it with --data-path\n"),
    ("bug_in_a_thread", 1, "rank 1: Traceback (most recent call last):"),
    ("interrupt_on_one_rank", 130, "rank 1: interrupted\n"),
    ("failure_in_a_subgroup", 2, "rank 2: the odd rank fails\n"),
])
def test_one_failing_rank_ends_the_job(mpi, ending, code, message):
    job = mpi.run(3, ENDINGS, ending)
    assert seconds_to_end(job) < 5
    assert job.returncode == code
    assert job.stderr.count(message) == 1, job.stderr
    assert ("Traceback" in job.stderr) == (code == 1)
    if code == 1:
        assert "Error: a bug" in job.stderr


@pytest.mark.parametrize("ending", ["mistake_on_all_ranks", "unmarked_mistake_on_all_ranks"])
def test_a_mistake_on_all_ranks_is_told_once(mpi, ending):
    job = mpi.run(3, ENDINGS, ending)
    assert seconds_to_end(job) < 5
    assert job.returncode == 2
    assert job.stderr.count("is not divisible by --tensor-model-parallel-size 2") == 1, job.stderr
    assert "rank 0: world size 3" in job.stderr and "Traceback" not in job.stderr


def test_sys_exit_of_one_rank_ends_the_job_with_its_code(mpi):
    job = mpi.run(3, ENDINGS, "exit_of_one_rank")
    assert seconds_to_end(job) < 5
    assert job.returncode == 7


def test_success_ends_with_zero(mpi):
    job = mpi.run(2, ENDINGS, "success")
    assert job.returncode == 0 and job.stderr == ""
    assert sorted(re.findall(r"done \d", job.stdout)) == ["done 0", "done 1"]  # a launcher may join two ranks' lines


def test_the_mpiexec_of_another_mpi_is_named(mpi, mpich):
    if mpi.name != "openmpi":
        pytest.skip("needs both MPIs: --mpi openmpi")
    job = launch.MPI("mixed", mpich.mpiexec, environment=mpi.environment).run(2, ENDINGS, "success")
    assert job.returncode == 2
    assert job.stderr.count("PMI_SIZE=2 but Open MPI") == 1 and "sees one process" in job.stderr, job.stderr


def test_a_missing_mpi_library_is_named(mpich):
    job = launch.MPI("none", mpich.mpiexec, environment={"MPI4PY_MPIABI": "nosuchabi"}).run(2, ENDINGS, "success")
    assert job.returncode == 2
    assert job.stderr.count("rank 0: PMI_SIZE=2 but MPI cannot be loaded") == 1, job.stderr
    assert "pip install mpi4py mpich" in job.stderr and "Traceback" not in job.stderr


def test_the_time_limit_leaves_no_process_behind(mpi):
    program = f"import time; time.sleep(600)  # {mpi.name} {time.time()}"
    with pytest.raises(TimeoutError, match="4 s"):
        mpi.run(2, "-c", program, timeout=4)
    assert not [p for p in psutil.process_iter(["cmdline"]) if program in (p.info["cmdline"] or [])]
