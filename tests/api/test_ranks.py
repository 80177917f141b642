"""The library on two ranks: they share a run, and one rank's exception ends both."""

from __future__ import annotations

import json

import pytest

import fugaku_megatron as fm
from tests.checks.library import FLAGS, documents

pytestmark = [pytest.mark.system, pytest.mark.mpi]
SCRIPT = """
import json, sys
import fugaku_megatron as fm
from tests.checks.library import FLAGS, documents
for flags in json.loads(sys.argv[1]):
    trainer = fm.Trainer(fm.Config(**FLAGS, **flags, train_iters=4), documents(), valid=documents(1))
    losses = []
    for step in trainer.steps():
        losses.append(step.loss)
        if step.iteration == 2 and str(trainer.rank) in sys.argv[2:]:
            raise ValueError("an error of one rank")
    found = [*losses, trainer.evaluate()]
    assert fm.on_first_rank(lambda: trainer.rank) == 0
    if trainer.rank == 1:
        print(json.dumps(found))
"""
LAYOUTS = [{}, {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}]


def test_ranks_share_a_run(mpi):
    trainer = fm.Trainer(fm.Config(**FLAGS, train_iters=4), documents(), documents(1))
    alone = [*(step.loss for step in trainer.steps()), trainer.evaluate()]
    done = mpi.run(2, "-c", SCRIPT, json.dumps(LAYOUTS))
    for found in done.stdout.splitlines():
        assert json.loads(found) == pytest.approx(alone, rel=1e-5)
    assert done.stdout.count("\n") == len(LAYOUTS)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_an_exception_on_one_rank_ends_the_job(mpi, rank):
    done = mpi.run(2, "-c", SCRIPT, "[{}]", str(rank), code=2)
    assert f"rank {rank}: Traceback" in done.stderr
    assert "ValueError: an error of one rank" in done.stderr and done.stdout == ""
