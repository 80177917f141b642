"""A few steps of tiny models with dropout. Every machine and layout must have the same losses.

    [.arm/python | mpirun -n 2 .arm/python] tests/arm/train_small.py LOSSES.json [tests that run before it]

CURVE in the environment names a recorded curve, which is repeated as well.

Initial weights and dropout masks are functions of global positions, so only rounding may differ. It is one process for all, because
the emulated torch import takes as long as everything else. See test_python.py.
"""

import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.marks import mark
from fugaku_megatron.host import kernels
from fugaku_megatron.inference.generation import Sampling, steps
from fugaku_megatron.inference.loading import LoadedModel
from tests.helpers import build_trainer, grid_groups, mock, small_run
from tests.llama_models import FAMILIES
from tests.recorded import curves

SMALL = {
    "num_layers": 2,
    "global_batch_size": 4,
    "lr": 5e-3,
    "kernels": "native",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}
LLAMA = {**FAMILIES["llama"], "hidden_dropout": 0.0, "attention_dropout": 0.0}
DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
# By number of ranks: a job's iterations and what it differs in.
JOBS = {
    1: {
        "alone": (10, {}),
        "bf16": (10, {"bf16": True}),
        "llama": (3, LLAMA),
        "documents": (10, DOCUMENTS),
    },
    2: {
        "dp2": (10, {}),
        "tp2": (10, {"tensor_model_parallel_size": 2}),
        "documents": (10, DOCUMENTS),
    },
}
END = 0  # the token that ends a document
PROMPT = (3, 1, 4, 1, 5)
NEW_TOKENS = 5


class Counter:
    """A pytest plugin that counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


class FewTexts(MockDataset):
    """Four texts over and over, so that there is something to learn."""

    def __getitem__(self, index: int) -> np.ndarray:
        return super().__getitem__(index % 4)


class FewDocuments(FewTexts):
    """The same, with a document's end at about one token in eight."""

    def __getitem__(self, index: int) -> np.ndarray:
        tokens = super().__getitem__(index)
        return np.where(tokens % 8 == 0, END, tokens)


def train(world: Comm, run: RunConfig, iterations: int) -> tuple[list[float], list[int]]:
    """Return the first losses, and the model's continuation of PROMPT on one rank."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    texts = (run.model.vocab_size, run.model.seq_length, 4096, 7)
    groups = grid_groups(world, run)
    data = (
        mark(FewDocuments(*texts), END, run.data.eod_mask_loss)
        if run.data.marked
        else FewTexts(*texts)
    )
    trainer = build_trainer(run, world, data, mock(run), groups=groups)
    try:
        losses = [trainer.train_step().loss for _ in range(iterations)]
        return losses, continued(LoadedModel(run, groups, trainer.stage)) if world.size == 1 else []
    finally:
        trainer.close()


def continued(loaded: LoadedModel) -> list[int]:
    """Sample tokens after PROMPT: more telling than the likeliest, which hardly trained models repeat."""
    *_, ids = steps(
        loaded, [PROMPT], NEW_TOKENS, Sampling(1.0, 0, 0.0, 1), lambda sample, tokens: False
    )
    return ids[0].tolist()


def main(world: Comm) -> None:
    output, *tests = sys.argv[1:]
    counter = Counter()
    code = (
        int(pytest.main(["-q", "-p", "no:cacheprovider", "--durations=12", *tests], [counter]))
        if tests
        else 0
    )
    result = {
        "machine": platform.machine(),
        "target": kernels.active(),
        "ranks": world.size,
        "pytest": code,
        "outcomes": counter.outcomes,
        "losses": {},
        "tokens": {},
    }
    for name, (iterations, changes) in JOBS[world.size].items():
        if (
            name == "bf16" and kernels.active() == "sve512"
        ):  # an A64FX widens BF16 to FP32: nothing new
            continue
        result["losses"][name], result["tokens"][name] = train(
            world, small_run(**{**SMALL, **changes}), iterations
        )
    if name := os.environ.get("CURVE"):
        with tempfile.TemporaryDirectory() as folder:
            curves.write_data(Path(folder))
            result["losses"]["curve"] = curves.curve(name, Path(folder), "--exit-interval 25")
    if world.rank == 0:
        Path(output).write_text(json.dumps(result))


if __name__ == "__main__":
    run_or_abort(main)
