"""Instruction lists of every pipeline schedule."""

from __future__ import annotations

from . import zero_bubble
from .instructions import BACKWARD, FORWARD, Instruction, Instructions
from .messages import with_messages
from .placement import Placement
from .schedule import Schedule


def one_f_one_b(schedule: Schedule, stage: int) -> Instructions:
    """Return one stage's 1F1B list: fill with forwards, alternate, drain. At most `stages - stage` micro-batches are in flight.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", figure 4 (2021).
    """
    forwards = [Instruction(FORWARD, m) for m in range(schedule.microbatches)]
    backwards = [Instruction(BACKWARD, m) for m in range(schedule.microbatches)]
    fill = schedule.placement.stages - stage - 1
    return with_messages(schedule.placement, stage, _alternate(forwards, backwards, fill))


def interleaved(schedule: Schedule, stage: int) -> Instructions:
    """Return one stage's interleaved 1F1B list, with 1 / chunks of 1F1B's bubble.

    Surplus micro-batches are dropped from a padded list. Source: Narayanan et al. (2021), figure 4, bottom.
    """
    stages = schedule.placement.stages
    chunks = schedule.placement.model_chunks
    padded = -(-schedule.microbatches // stages) * stages
    order = _forwards(schedule.placement, stage, padded)
    # Backwards run in the same order from the last chunk to the first.
    back = [Instruction(BACKWARD, i.microbatch, chunks - 1 - i.model_chunk) for i in order]
    both = _alternate(order, back, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    kept = [i for i in both if i.microbatch < schedule.microbatches]
    return with_messages(schedule.placement, stage, kept)


def split_backward(schedule: Schedule, stage: int) -> Instructions:
    """Return one stage's Zero Bubble H1 list (a third of 1F1B's bubble) or, with a V placement, ZB-V (almost no bubble).

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", sections 2 and 6 (2023).
    """
    placement = schedule.placement
    limit = placement.model_chunks * (schedule.pending or placement.stages)
    lists = zero_bubble.lists(
        placement, schedule.microbatches, limit, schedule.costs, schedule.compared
    )
    return with_messages(placement, stage, lists[stage])


def forward_only(schedule: Schedule, stage: int) -> Instructions:
    placement = schedule.placement
    return with_messages(placement, stage, _forwards(placement, stage, schedule.microbatches))


def _alternate(forwards: Instructions, backwards: Instructions, fill: int) -> Instructions:
    pairs = zip(forwards[fill:], backwards)
    return [
        *forwards[:fill],
        *(i for pair in pairs for i in pair),
        *backwards[max(0, len(forwards) - fill) :],
    ]


def _forwards(placement: Placement, stage: int, microbatches: int) -> Instructions:
    def slot(forward: Instruction) -> int:
        virtual_stage = placement.virtual_stage(stage, forward.model_chunk)
        return placement.forward_slot(forward.microbatch, virtual_stage)

    chunks = range(placement.model_chunks)
    return sorted(
        (Instruction(FORWARD, m, c) for m in range(microbatches) for c in chunks), key=slot
    )
