"""Simulation of a schedule from the seconds of each computation and message.

`walk` simulates every computation. `makespan` is faster: 1F1B from its regular structure, other schedules level by level, long
ones extrapolated from two short ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

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
from .schedule_names import row as schedule_row
from .zero_bubble import shortened_microbatches

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


def makespan(schedule: Schedule, costs: Costs) -> float:
    """Return the result of `walk`; within a hundredth for long schedules other than 1F1B."""
    p = schedule.placement.stages
    m = schedule.microbatches
    if schedule_row(schedule.name).is_1f1b:
        forward, backward = ([seconds for (seconds,) in costs.of[op]] for op in (FORWARD, BACKWARD))
        return one_f_one_b(forward, backward, costs.transfer, m)
    first = shortened_microbatches(p, m)
    if m <= first + p:
        return _walk_levels(_levels(schedule), costs)
    short = _walk_levels(_levels(replace(schedule, microbatches=first)), costs)
    longer = _walk_levels(_levels(replace(schedule, microbatches=first + p)), costs)
    operations: tuple[str, ...] = (FORWARD, BACKWARD)
    if schedule.splits_backward:
        operations = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
    busiest = max(sum(sum(costs.of[op][stage]) for op in operations) for stage in range(p))
    return short + (m - first) // p * max(longer - short, p * busiest)


@dataclass(frozen=True)
class Levels:
    """Computations in levels: each depends on earlier levels only and runs on another
    stage.

    cost: index into the flat costs, operation x stage x model chunk.
    source: index of the needed computation, or the number of computations.
    ends: per level.
    """

    operations: tuple[str, ...]
    stage: np.ndarray
    cost: np.ndarray
    source: np.ndarray
    message: np.ndarray
    ends: tuple[int, ...]


@lru_cache(maxsize=128)
def _levels(schedule: Schedule) -> Levels:
    place = schedule.placement
    rows = ordered(schedule)
    number = {row.result: n for n, row in enumerate(rows)} | {None: len(rows)}
    operations = tuple(sorted({row.instruction.op for row in rows}))
    cost = [
        (operations.index(row.instruction.op) * place.stages + row.stage) * place.model_chunks
        + row.instruction.model_chunk
        for row in rows
    ]
    return Levels(
        operations=operations,
        stage=np.array([row.stage for row in rows], int),
        cost=np.array(cost, int),
        message=np.array([waits_for_message(place, row) for row in rows], bool),
        source=np.array([number[row.source] for row in rows], int),
        ends=tuple(np.cumsum(np.bincount([row.level for row in rows])[1:]).tolist()),
    )


def _walk_levels(levels: Levels, costs: Costs) -> float:
    seconds = np.array([costs.of[op] for op in levels.operations], float).ravel()[levels.cost]
    late = levels.message * costs.transfer
    ended = np.zeros(len(seconds) + 1)
    clock = np.zeros(levels.stage.max(initial=0) + 1)
    begin = 0
    for end in levels.ends:
        now = slice(begin, end)
        stage = levels.stage[now]
        ended[now] = clock[stage] = (
            np.maximum(clock[stage], ended[levels.source[now]] + late[now]) + seconds[now]
        )
        begin = end
    return float(clock.max())


def one_f_one_b(
    forward: Sequence[float], backward: Sequence[float], transfer: float, microbatches: int
) -> float:
    """Return the seconds for 1F1B, computed by slots. forward, backward: per stage.

    Stage i runs forward k in slot i + 2k and backward k in slot 2p - 1 - i + 2k. An operation waits only for the neighbour's operation
    one slot earlier. Once 2p slots shift all clocks equally, further periods are skipped.
    """
    p = len(forward)
    m = microbatches
    if p == 1:
        return m * float(forward[0] + backward[0])
    state = np.zeros(
        (3, p + 2)
    )  # clock, time of the last forward sent and of the last backward sent; stage i at column i + 1
    state[1:] = -np.inf
    f = np.concatenate([[0], forward, [0]])
    b = np.concatenate([[0], backward, [0]])
    slot = 0
    before = None
    period = 2 * p
    while slot < 2 * (m + p - 1):
        if slot % period == 0 and period <= slot <= 2 * (m - 1):
            shift = None if before is None else _common_shift(before, state)
            periods = (2 * (m - 1) - slot) // period
            if shift is not None and periods:
                state[:, 1:-1] += periods * shift
                slot = slot + periods * period
                before = None
                continue
            before = state.copy()
        _slot(slot, p, m, state, f, b, transfer)
        slot += 1
    return float(state[0].max())


def _common_shift(before: np.ndarray, now: np.ndarray) -> float | None:
    moved = now[:, 1:-1] - before[:, 1:-1]
    return float(moved[0, 0]) if np.ptp(moved) <= 1e-12 * now[0].max() else None


def _slot(
    slot: int, p: int, m: int, state: np.ndarray, f: np.ndarray, b: np.ndarray, transfer: float
) -> None:
    clock, sent_forward, sent_backward = state
    low = max(0, slot - 2 * (m - 1))
    high = min(p - 1, slot)
    low += (slot - low) % 2
    if low <= high:
        i = slice(low + 1, high + 2, 2)
        clock[i] = sent_forward[i] = (
            np.maximum(clock[i], sent_forward[low : high + 1 : 2] + transfer) + f[i]
        )
    low = max(0, 2 * p - 1 - slot)
    high = min(p - 1, 2 * p - 1 - slot + 2 * (m - 1))
    low += (slot - 2 * p + 1 + low) % 2
    if low <= high:
        i = slice(low + 1, high + 2, 2)
        clock[i] = sent_backward[i] = (
            np.maximum(clock[i], sent_backward[low + 2 : high + 3 : 2] + transfer) + b[i]
        )
