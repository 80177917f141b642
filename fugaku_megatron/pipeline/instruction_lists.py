"""Instruction lists of every pipeline schedule, with messages between stages. Sends are nonblocking."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from . import zero_bubble
from .instructions import (
    BACKWARD,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVES,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    Instruction,
    Instructions,
)
from .placement import Placement
from .schedule import Schedule
from .schedule_names import row


def with_messages(
    placement: Placement, stage: int, computations: Iterable[Instruction]
) -> Instructions:
    """Insert a receive before and a send after every computation that needs one."""
    assert 0 <= stage < placement.stages, (stage, placement)
    result = []
    for i in computations:
        if i.op == BACKWARD_WEIGHT:
            result.append(i)
            continue
        step = 1 if i.op == FORWARD else -1
        receive = RECV_FORWARD if i.op == FORWARD else RECV_BACKWARD
        send = SEND_FORWARD if i.op == FORWARD else SEND_BACKWARD
        source = placement.neighbour(stage, i.model_chunk, -step)
        target = placement.neighbour(stage, i.model_chunk, step)
        if source and source[0] != stage:
            result.append(replace(i, op=receive))
        result.append(i)
        if target and target[0] != stage:
            result.append(replace(i, op=send))
    return result


@lru_cache(maxsize=8)  # needed in every iteration, from the lists of all neighbours
def send_queue(schedule: Schedule, stage: int) -> int:
    """Return a stage's most concurrent sends: to start one more, it waits for the oldest.

    A send is complete when a later message from its receiver arrives.
    """
    here = schedule.instructions(stage)
    others = {schedule.placement.peer(stage, i)[0] for i in here if _is_message(i)}
    position = {other: _positions(schedule, other) for other in others}
    received = dict.fromkeys(position, -1)
    queue = deque[tuple[int, int]]()
    most = 0
    for i in here:
        if not _is_message(i):
            continue
        other, tag = schedule.placement.peer(stage, i)
        place = position[other][tag, i.microbatch]
        if i.op in SENDS:
            queue.append((other, place))
            most = max(most, len(queue))
            continue
        received[other] = max(received[other], place)
        while queue and queue[0][1] < received[queue[0][0]]:
            queue.popleft()
    if row(schedule.name).has_backward:
        return most
    return min(most, schedule.placement.virtual_stages)


def _positions(schedule: Schedule, stage: int) -> dict[tuple[int, int], int]:
    messages = ((n, i) for n, i in enumerate(schedule.instructions(stage)) if _is_message(i))
    return {(schedule.placement.peer(stage, i)[1], i.microbatch): n for n, i in messages}


def _is_message(instruction: Instruction) -> bool:
    return instruction.op in SENDS or instruction.op in RECEIVES


def receives(instructions: Iterable[Instruction]) -> dict[tuple[str, int], Instructions]:
    """Return (op, model chunk) -> a list's receives in order.

    Stages post the next receives ahead, so every list completes even if sends block.
    """
    result: dict[tuple[str, int], Instructions] = {}
    for i in instructions:
        if i.op in RECEIVES:
            result.setdefault((i.op, i.model_chunk), []).append(i)
    return result


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
