"""Losses and weights between checkpoints."""

from __future__ import annotations

from tests.helpers import (
    make_trainer,
    whole_tensors,
)

ITERATIONS = 12


def trained(world, run, source=None, target=None, iterations=ITERATIONS, saved_at=None):
    """Train from one checkpoint to another; return losses and weights.

    source: the checkpoint to resume from
    target: where to save after `saved_at` iterations, by default the last
    """
    trainer = make_trainer(world, run)
    if source:
        trainer.load(str(source))
    losses = []
    for iteration in range(1, iterations + 1):
        losses.append(trainer.train_step().loss)
        if target and iteration == (saved_at or iterations):
            trainer.save(str(target))
    trainer.close()
    return losses, whole_tensors(trainer, "weight")
