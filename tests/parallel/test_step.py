"""Schedules in other orders than 1F1B: the identity of a micro-batch decides its data and its dropout, not when it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from fugaku_megatron.config.layout import placement
from fugaku_megatron.pipeline import schedule
from fugaku_megatron.pipeline.parts import BACKWARD, FORWARD, Instruction, Placement
from tests.helpers import make_trainer, small_run, train, whole_tensors
from tests.threads import ThreadWorld

Make = Callable[[int, int, int], list[Instruction]]
LAYOUTS = {
    "one": (1, {}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "tp2pp2dp2": (8, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "zero_stage": 1}),
}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}


@dataclass(frozen=True)
class Custom(schedule.Schedule):
    """Other lists than those that have a name. make: of stage, stages and micro-batches."""

    make: Make | None = None

    def instructions(self, stage: int) -> list[Instruction]:
        return self.make(stage, self.placement.stages, self.microbatches)


def custom(make: Make):
    """For `Trainer.make_schedule`."""
    return lambda run, microbatches: Custom("custom", placement(run), microbatches, make=make)


def shuffled(stage: int, stages: int, microbatches: int, seed: int = 3) -> list[Instruction]:
    """All forwards in a random order that every stage shares, then all backwards in another one: nothing waits in a cycle."""
    generator = random.Random(seed)
    forwards, backwards = (generator.sample(range(microbatches), microbatches) for _ in range(2))
    assert microbatches < 3 or forwards != sorted(forwards)
    order = [Instruction(FORWARD, m) for m in forwards] + [Instruction(BACKWARD, m) for m in backwards]
    return schedule.with_messages(Placement(stages), stage, order)


def ahead(stage: int, stages: int, microbatches: int, extra: int = 2) -> list[Instruction]:
    """1F1B whose forwards run `extra` micro-batches further ahead."""
    fill = min(stages - stage - 1 + extra, microbatches)
    order = [Instruction(FORWARD, m) for m in range(fill)]
    for m in range(microbatches):
        order += [Instruction(FORWARD, fill + m)] * (fill + m < microbatches) + [Instruction(BACKWARD, m)]
    return schedule.with_messages(Placement(stages), stage, order)


@pytest.mark.parametrize("make", [shuffled, ahead])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
@pytest.mark.parametrize("stages", [1, 3])
def test_these_lists_run_every_micro_batch_once_and_are_not_1f1b(make, microbatches, stages):
    for stage in range(stages):
        instructions = make(stage, stages, microbatches)
        for op in (FORWARD, BACKWARD):
            assert sorted(i.microbatch for i in instructions if i.op == op) == list(range(microbatches))
        place = {(i.op, i.microbatch): n for n, i in enumerate(instructions)}
        assert all(place[FORWARD, m] < place[BACKWARD, m] for m in range(microbatches))
    assert microbatches < 7 or make(0, stages, microbatches) != schedule.one_f_one_b(0, stages, microbatches)


def micro_batch_losses(world, run, make) -> list[list[torch.Tensor]]:
    """The losses of every micro-batch of two iterations whose weights do not change, in data order."""
    trainer, losses = make_trainer(world, run, make_schedule=custom(make)), []
    mean = trainer._mean_loss
    trainer._mean_loss = lambda values: (losses.append(torch.stack(values) if values else torch.zeros(0)), mean(values))[1]
    for _ in range(2):
        trainer.train_step()
    trainer.close()
    return losses


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("make", [shuffled, ahead, partial(ahead, extra=5)])
def test_every_micro_batch_has_the_same_loss_to_the_bit(name, make):
    """Dropout is on, so masks are the same, too. The learning rate is too small to move a weight: what differs in the last bits of
    a gradient because of the order of its sum shall not hide or feign a difference."""
    ranks, layout = LAYOUTS[name]
    run = small_run(**DROPOUT, **layout, lr=1e-30, weight_decay=0.0)
    expected = ThreadWorld(ranks).run(lambda world: micro_batch_losses(world, run, schedule.one_f_one_b))
    losses = ThreadWorld(ranks).run(lambda world: micro_batch_losses(world, run, make))
    assert any(len(part) for rank in expected for part in rank)
    for ours, theirs in zip(losses, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["pp2", "pp4", "tp2pp2dp2"])
def test_forwards_that_run_ahead_train_to_the_same_bits(name):
    """Every gradient is still summed in data order: a stage's own by its backwards, the head's by the last stage's forwards."""
    ranks, layout = LAYOUTS[name]
    run = small_run(**DROPOUT, **layout)
    curves = [ThreadWorld(ranks).run(lambda world, m=make: [r.loss for r in train(world, run, 5, make_schedule=custom(m))])[0]
              for make in (schedule.one_f_one_b, ahead)]
    assert curves[0] == curves[1]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_shuffled_order_has_the_same_gradients_but_for_rounding(name):
    ranks, layout = LAYOUTS[name]
    run = small_run(**DROPOUT, **layout)

    def gradients(world, make):
        trainer = make_trainer(world, run, make_schedule=custom(make))
        trainer.train_step()
        trainer.close()
        return whole_tensors(trainer, "grad")

    if run.parallel.zero_stage:
        run = small_run(**DROPOUT, **{**layout, "zero_stage": 0})  # ZeRO-1 leaves each rank a part of the sum
    expected, ours = (ThreadWorld(ranks).run(lambda world, m=make: gradients(world, m))[0]
                      for make in (schedule.one_f_one_b, shuffled))
    for key, gradient in expected.items():
        torch.testing.assert_close(ours[key], gradient, rtol=0, atol=1e-6 * gradient.abs().max().item())
