"""Simulation of a schedule from the seconds of each computation and message."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECV_BACKWARD,
    RECV_FORWARD,
    Instruction,
)
from .placement import Placement
from .schedule import Schedule

COMPUTATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Costs:
    """Seconds per micro-batch. of: computation -> stage -> model chunk. transfer: per message between two stages."""

    of: Mapping[str, Sequence[Sequence[float]]]
    transfer: float = 0.0

    @staticmethod
    def alike(schedule: Schedule, slot: float = 1.0, transfer: float = 0.0) -> Costs:
        """Return equal costs: `slot` seconds for F, I or W over a stage's chunks, twice that for B."""
        p = schedule.placement.stages
        v = schedule.placement.model_chunks
        seconds = {op: (2.0 if op == BACKWARD else 1.0) * slot / v for op in COMPUTATIONS}
        costs = {op: [[each for _ in range(v)] for _ in range(p)] for op, each in seconds.items()}
        return Costs(costs, transfer)


@dataclass(frozen=True)
class Span:
    """A computation of a stage, or its wait for a message in transit. start, end: seconds."""

    stage: int
    op: str
    microbatch: int
    model_chunk: int
    start: float
    end: float


def walk(schedule: Schedule, costs: Costs) -> float:
    """Return the seconds until the last stage finishes."""
    return max((span.end for span in spans(schedule, costs)), default=0.0)


def spans(schedule: Schedule, costs: Costs) -> list[Span]:
    """Return every stage's computations and waits for messages in transit, in order.

    Sends are free; a receiver is idle, without a span, until its message is sent.
    """
    place = schedule.placement
    clock = [0.0 for _ in range(place.stages)]
    ended = dict[Result, float]()
    found: list[Span] = []
    for row in ordered(schedule):
        stage = row.stage
        i = row.instruction
        if row.source is not None and waits_for_message(place, row):
            arrival = max(clock[stage], ended[row.source] + costs.transfer)
            start = max(clock[stage], arrival - costs.transfer)
            if arrival > start:
                receive = RECV_FORWARD if i.op == FORWARD else RECV_BACKWARD
                found.append(Span(stage, receive, i.microbatch, i.model_chunk, start, arrival))
            clock[stage] = arrival
        start = clock[stage]
        clock[stage] = ended[row.result] = start + costs.of[i.op][stage][i.model_chunk]
        found.append(Span(stage, i.op, i.microbatch, i.model_chunk, start, clock[stage]))
    return found


# (True for F, False for I or B, None for W; micro-batch; virtual stage)
Result = tuple[bool | None, int, int]


def _result(place: Placement, stage: int, i: Instruction) -> Result:
    kind = None if i.op == BACKWARD_WEIGHT else i.op == FORWARD
    return kind, i.microbatch, place.virtual_stage(stage, i.model_chunk)


def _source(place: Placement, stage: int, i: Instruction) -> Result | None:
    if i.op == BACKWARD_WEIGHT:
        return None
    forward = i.op == FORWARD
    here = place.virtual_stage(stage, i.model_chunk)
    before = here - 1 if forward else here + 1
    return (forward, i.microbatch, before) if 0 <= before < place.virtual_stages else None


class Computation(NamedTuple):
    """A computation on a stage, its result and the result that it needs.

    level: from 1; above the levels of all computations before
    """

    level: int
    stage: int
    instruction: Instruction
    result: Result
    source: Result | None


def waits_for_message(place: Placement, row: Computation) -> bool:
    return row.source is not None and place.owner(row.source[2])[0] != row.stage


def ordered(schedule: Schedule) -> list[Computation]:
    """Return the computations of all stages, each after the computations that it needs."""
    place = schedule.placement
    stages = range(place.stages)
    todo = [
        deque(i for i in schedule.instructions(stage) if i.op in COMPUTATIONS) for stage in stages
    ]
    level: dict[Result | None, int] = {None: 0}
    last = [0 for _ in stages]
    rows: list[Computation] = []
    while any(todo):
        before = len(rows)
        for stage, mine in enumerate(todo):
            while mine and (source := _source(place, stage, mine[0])) in level:
                i = mine.popleft()
                result = _result(place, stage, i)
                last[stage] = level[result] = 1 + max(last[stage], level[source])
                rows.append(Computation(last[stage], stage, i, result, source))
        assert len(rows) > before, "the schedule deadlocks"
    return sorted(rows, key=lambda row: row.level)
