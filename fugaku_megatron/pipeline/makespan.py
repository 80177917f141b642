"""End of a simulated schedule, faster than by `timeline.walk`.

1F1B from its regular structure, other schedules level by level, long ones extrapolated from two short ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from .instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from .schedule import Schedule
from .schedule_names import row as schedule_row
from .timeline import Costs, ordered, waits_for_message
from .zero_bubble import shortened_microbatches


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
