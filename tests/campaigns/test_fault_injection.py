"""A case outside the repository injects faults with one import."""

import pytest

from tests.mpi import launch
from tests.processes import run_python

pytestmark = pytest.mark.system

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 96 --micro-batch-size 1 "
    "--global-batch-size 2 --lr 1e-3 --mock-data --eval-iters 0 --log-interval 1 --kernels native --train-iters 4"
)
MATMUL = """
from tests.fault_injection import run, wrong_matmul
with wrong_matmul("linear_forward", call=2):
    raise SystemExit(run("train", *"{flags} --audit-interval 1".split()))
"""
WEIGHT = """
from tests.fault_injection import after_iteration, flip_weight, run
with after_iteration(2, lambda trainer: flip_weight(trainer, "decoder.layers.1.mlp.linear_fc2.weight", 7, bit=20), rank=1):
    raise SystemExit(run("train", *"{flags} --check-weight-hash-across-dp-replicas-interval 1".split()))
"""


def test_a_wrong_matmul_of_a_run_is_named():
    said = run_python("-c", MATMUL.format(flags=TINY), code=6).stdout
    assert "results of iteration 1 differ: rank 0 (node " in said


@pytest.mark.mpi
def test_a_wrong_weight_of_a_rank_is_named():
    job = launch.mpich().run(2, "-c", WEIGHT.format(flags=TINY), code=None)
    assert "weights differ after iteration 2: rank 0 " in job.stdout, job.stderr
    assert "decoder.layers.1.mlp.linear_fc2.weight" in job.stdout and job.returncode == 6
