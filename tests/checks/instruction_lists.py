"""Instruction lists in other orders."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from fugaku_megatron.pipeline.instruction_lists import with_messages
from fugaku_megatron.pipeline.instructions import BACKWARD, FORWARD, Instruction
from fugaku_megatron.pipeline.schedule import Schedule

Make = Callable[[Schedule, int], list[Instruction]]


@dataclass(frozen=True)
class Custom(Schedule):
    """Schedule with other lists than the named schedules. make: from schedule and stage"""

    make: Make | None = None

    def instructions(self, stage: int) -> list[Instruction]:
        return self.make(self, stage)


def custom(make: Make):
    """Return a function for the argument `make_schedule` of `make_trainer`."""
    return lambda run, microbatches: Custom("interleaved", run.placement, microbatches, make=make)


def shuffled(lists: Schedule, stage: int, seed: int = 3) -> list[Instruction]:
    """Return all forwards in a random order that every stage shares, then all backwards in another: no cycle of waits."""
    generator = random.Random(seed)
    microbatches = lists.microbatches
    forwards, backwards = (generator.sample(range(microbatches), microbatches) for _ in range(2))
    assert microbatches < 3 or forwards != sorted(forwards)
    order = [Instruction(FORWARD, m) for m in forwards] + [
        Instruction(BACKWARD, m) for m in backwards
    ]
    return with_messages(lists.placement, stage, order)
