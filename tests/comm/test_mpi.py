"""The MPI communicator on real ranks, and the ways a job ends, under the MPI that --mpi names.

Each rank imports torch, so one job runs all of tests/comm/collective_checks.py. The endings are in endings.py.
"""

import json

import psutil
import pytest

from tests.comm import collective_checks
from tests.mpi import launch

pytestmark = [pytest.mark.system, pytest.mark.mpi]
ENDINGS = str(launch.TESTS / "mpi" / "endings.py")
VERBS = collective_checks.__file__
LARGE_GB = 14


def test_verbs_agree_with_torch(mpi):
    """Between processes, and in a node's shared memory."""
    job = mpi.run(3, VERBS, "verbs", "node", OMP_NUM_THREADS="2")
    *passed, description = job.stdout.splitlines()
    expected = [
        f"ok {limit} {check.__name__}"
        for limit in collective_checks.LIMITS
        for check in collective_checks.CHECKS
    ]
    assert passed[: len(expected)] == expected and passed[-1] == "ok node chunks_of_shared_memory"
    assert len(passed) == len(expected) + len(collective_checks.COLLECTIVE_CHECKS) + 1
    library = {"mpich": "MPICH", "openmpi": "Open MPI"}[mpi.name]
    assert description.startswith(library) and description.endswith(
        "MPI_THREAD_SERIALIZED, 3 rank(s)"
    )


def test_nodes_add_up_inside_and_then_between(mpi):
    """After 250 random orders of nonblocking and blocking operations, from one thread, with an MPI that allows one."""
    job = mpi.run(4, VERBS, "orders", "levels", FUGAKU_MEGATRON_MPI_THREAD_LEVEL="funneled")
    assert job.stdout.startswith("ok orders 250\n")
    assert "MPI_THREAD_FUNNELED" in job.stdout
    checks = len(collective_checks.LEVEL_CHECKS)
    assert [job.stdout.count(f"ok {name} ") for name in (*collective_checks.NODES, "stages")] == [
        checks + 1,
        checks + 1,
        checks,
    ]


FROZEN = """
import json, os, re, sys
import torch
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.comm.node import NodeTensor
from tests.checks.adapters import QWEN, curve
from tests.helpers import small_run

def refused(*arguments):
    raise PermissionError

def proportional_kib(tensor):
    'PSS of the mapping that holds a tensor.'
    mapping = None
    for line in open("/proc/self/smaps"):
        if found := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
            mapping = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif mapping and line.startswith("Pss:"):
            return int(line.split()[1])

def body(world):
    for refusing in [[], [0], [1]]:
        if world.rank in refusing:
            setattr(os, "open" if world.rank else "memfd_create", refused)
        big = NodeTensor(world, 1 << 18, torch.float32)
        if big.writes:
            big.values.fill_(world.rank + 1.0)
        big.broadcast()
        found = [big.sharers, big.writes, big.values.sum().item() / (1 << 18)]
        world.barrier()  # a page counts as shared once both ranks have read it
        found.append(proportional_kib(big.values) < 700)
        world.barrier()
        found = world.gather_object([*found, *curve(world, small_run(**QWEN, zero_stage=1))[:2]])
        if world.rank == 0:
            print(json.dumps(found), flush=True)

run_or_abort(body)
"""


def test_ranks_of_a_node_hold_one_copy_of_a_tensor(mpi):
    """MiB of floats, and adapters' frozen weights; or copies, if the first or the second rank may not open its file."""
    job = mpi.run(2, "-c", FROZEN)
    shared, *apart = (json.loads(line) for line in job.stdout.splitlines())
    assert [rank[:4] for rank in shared] == [[2, True, 1.0, True], [2, False, 1.0, True]]
    assert [[rank[:4] for rank in ranks] for ranks in apart] == [[[1, True, 1.0, False]] * 2] * 2
    assert [[rank[4:] for rank in ranks] for ranks in apart] == [[rank[4:] for rank in shared]] * 2


@pytest.mark.slow
def test_messages_above_two_to_the_31(mpi):
    if psutil.virtual_memory().available < LARGE_GB * 10**9:
        pytest.skip(f"less than {LARGE_GB} GB of memory available")
    job = mpi.run(2, VERBS, "large", timeout=400)
    assert job.stdout.count("ok large") == len(collective_checks.LARGE)


@pytest.mark.parametrize(
    "ranks, ending, code, message",
    [
        (2, "bug_on_one_rank", 1, "rank 1: Traceback (most recent call last):"),
        pytest.param(
            2,
            "mistake_on_one_rank",
            2,
            "rank 1: shard 1 is missing: name it with --data-path\n",
            marks=pytest.mark.full,
        ),
        (
            2,
            "mistake_on_all_ranks",
            2,
            "rank 0: world size 2 is not divisible by --tensor-model-parallel-size 3",
        ),
        (2, "bug_in_a_thread", 1, "rank 1: Traceback (most recent call last):"),
        (2, "interrupt_on_one_rank", 130, "rank 1: interrupted\n"),
        pytest.param(2, "exit_of_one_rank", 7, "", marks=pytest.mark.full),
        pytest.param(
            3,
            "failure_in_a_subgroup",
            2,
            "rank 2: the odd rank fails\n",
            marks=pytest.mark.full,
        ),
    ],
)
def test_one_failing_rank_ends_the_job(mpi, ranks, ending, code, message):
    job = mpi.run(ranks, ENDINGS, ending, code=code)  # TimeoutError if ranks wait for ever
    assert job.stdout.splitlines().count("started") == 1
    assert not message or job.stderr.count(message) == 1, job.stderr
    assert ("Traceback" in job.stderr) == ("Error: a bug" in job.stderr) == (code == 1)


@pytest.mark.parametrize(
    "variables, message",
    [
        (
            {"FUGAKU_MEGATRON_MPI_THREAD_LEVEL": "single"},
            "_MPI_THREAD_LEVEL=single: expected one of funneled, serialized, multiple; ",
        ),
        pytest.param(
            {"MPI4PY_MPIABI": "nosuchabi"},
            "rank 0: PMI_SIZE=2 but MPI cannot be loaded",
            marks=pytest.mark.full,
        ),
    ],
)
def test_variables_that_no_mpi_can_live_with(mpich, variables, message):
    wrong = launch.MPI("wrong", mpich.mpiexec, environment=variables)
    job = wrong.run(2, ENDINGS, "bug_on_one_rank", code=2)
    assert job.stderr.count(message) == 1 and "Traceback" not in job.stderr, job.stderr
    assert "MPI4PY_MPIABI" not in variables or "pip install mpi4py mpich" in job.stderr


def test_the_mpiexec_of_another_mpi_is_named(mpi, mpich):
    if mpi.name != "openmpi":
        pytest.skip("needs both MPIs: --mpi openmpi")
    mixed = launch.MPI("mixed", mpich.mpiexec, environment=mpi.environment)
    said = mixed.run(2, ENDINGS, "bug_on_one_rank", code=2).stderr
    assert said.count("PMI_SIZE=2 but Open MPI") == 1 and "sees one process" in said, said
