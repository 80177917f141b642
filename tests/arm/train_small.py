"""Twenty steps of a tiny GPT with dropout, whose losses every machine and layout must share; a program for either side.

    python tests/arm/train_small.py LOSSES.json                                    this machine
    .arm/python tests/arm/train_small.py LOSSES.json tests/kernels/test_adamw.py    an emulated A64FX, after these tests
    mpirun -n 2 .arm/python tests/arm/train_small.py LOSSES.json                   two ranks: data and tensor parallel

Initial weights and dropout masks are functions of global positions, so only rounding may differ. LOSSES.json gets the losses
of each layout by name, the kernel target, the number of ranks, and pytest's exit code and counts for the tests named. One
process for all: the emulated import of torch takes as long as everything else. See test_python.py.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from pathlib import Path

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.host import kernels
from fugaku_megatron.run.config import RunConfig
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, mock, small_run

ITERATIONS = 20
SMALL = {"num_layers": 2, "global_batch_size": 4, "lr": 5e-3, "kernels": "native", "hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS = {1: {"alone": {}}, 2: {"dp2": {}, "tp2": {"tensor_model_parallel_size": 2}}}  # by number of ranks


class Counter:
    """A pytest plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


class FewTexts(MockDataset):
    """Four texts over and over, so that there is something to learn."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index % 4)


def train(world: Comm, run: RunConfig) -> list[float]:
    """The losses of the first iterations."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    data = FewTexts(run.model.vocab_size, run.model.seq_length, 4096, seed=7)
    trainer = Trainer(run, world, grid_groups(world, run), data, mock(run))
    try:
        return [trainer.train_step().loss for _ in range(ITERATIONS)]
    finally:
        trainer.close()


def main(world: Comm) -> None:
    output, *tests = sys.argv[1:]
    counter = Counter()
    code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--durations=12", *tests], [counter])) if tests else 0
    result = {"machine": platform.machine(), "target": kernels.active(), "ranks": world.size, "pytest": code,
              "outcomes": counter.outcomes, "losses": {}}
    for name, layout in LAYOUTS[world.size].items():
        result["losses"][name] = train(world, small_run(**SMALL, **layout))
    if world.rank == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    run_or_abort(main)
