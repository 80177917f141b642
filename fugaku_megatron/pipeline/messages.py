"""Messages between pipeline stages. Sends are nonblocking."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from .instructions import (
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
