"""Losses and adapters of a few steps."""

from __future__ import annotations

import contextlib

from tests.helpers import (
    make_trainer,
    whole_tensors,
)
from tests.llama_models import FAMILIES

LORA = {"lora_rank": 4, "lora_alpha": 16.0, "lr": 1e-2, "num_layers": 4, "global_batch_size": 8}
QWEN = {**FAMILIES["qwen2"], **LORA}


def curve(world, run, steps: int = 2):
    """Return losses and gradient norms of some steps, and the adapters after the steps."""
    with contextlib.closing(make_trainer(world, run)) as trainer:
        results = [trainer.train_step() for _ in range(steps)]
        trainer.optimizer.buckets.await_weights()
        return (
            [r.loss for r in results],
            [r.grad_norm for r in results],
            whole_tensors(trainer, "weight"),
        )
