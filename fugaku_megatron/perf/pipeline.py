"""The time of a 1F1B pipeline whose stages take different times: the critical path through schedule.py's instruction lists.

`walk` follows the instruction lists themselves; `makespan` computes the same number from their regular structure, fast enough for
thousands of layouts. Left out: where the stages' times come from (`cost`). Test: pytest tests/test_perf_pipeline.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .. import schedule


@dataclass(frozen=True)
class Span:
    """One forward or backward of a stage. start, end: seconds from the iteration's start."""

    stage: int
    forward: bool
    microbatch: int
    start: float
    end: float


def walk(forward: Sequence[float], backward: Sequence[float], transfer: float, microbatches: int) -> float:
    """Seconds until the last stage has finished. forward, backward: seconds of one micro-batch, for each stage.

    A stage executes its instructions in order; a send costs its sender nothing and arrives after `transfer` seconds.
    """
    return max(span.end for span in spans(forward, backward, transfer, microbatches))


def spans(forward: Sequence[float], backward: Sequence[float], transfer: float, microbatches: int) -> list[Span]:
    """Every forward and backward of every stage, from walking the instruction lists. Arguments as in `walk`."""
    stages = len(forward)
    lists = [schedule.one_f_one_b(stage, stages, microbatches) for stage in range(stages)]
    arrived: dict[tuple[str, int, int], float] = {}
    position, clock, result = [0] * stages, [0.0] * stages, []
    while any(position[s] < len(lists[s]) for s in range(stages)):
        before = sum(position)
        for stage in range(stages):
            while position[stage] < len(lists[stage]):
                instruction, now = lists[stage][position[stage]], clock[stage]
                op, m = instruction.op, instruction.microbatch
                if op in (schedule.RECV_FORWARD, schedule.RECV_BACKWARD):
                    if (op, stage, m) not in arrived:
                        break
                    clock[stage] = max(now, arrived[op, stage, m])
                elif op == schedule.SEND_FORWARD:
                    arrived[schedule.RECV_FORWARD, stage + 1, m] = now + transfer
                elif op == schedule.SEND_BACKWARD:
                    arrived[schedule.RECV_BACKWARD, stage - 1, m] = now + transfer
                else:
                    clock[stage] += (forward if op == schedule.FORWARD else backward)[stage]
                    result.append(Span(stage, op == schedule.FORWARD, m, now, clock[stage]))
                position[stage] += 1
        assert sum(position) > before, "the schedule deadlocks"
    return result


def makespan(forward: Sequence[float], backward: Sequence[float], transfer: float, microbatches: int) -> float:
    """The result of `walk`, computed by slots: stage i runs forward k in slot i + 2k and backward k in slot 2p - 1 - i + 2k.

    This is 1F1B's order on every stage (forward k precedes backward j where k <= p - 1 - i + j), and an operation waits only for
    one that the neighbouring stage ran one slot earlier, so a slot is two vector operations over the stages. In the steady state
    the slots are periodic: once 2p of them (the longest round trip) shift all clocks by the same time, all further periods do so
    too and are skipped.
    """
    p, m = len(forward), microbatches
    if p == 1:
        return m * float(forward[0] + backward[0])
    state = np.zeros((3, p + 2))  # clock, time of the last forward sent and of the last backward sent; stage i at column i + 1
    state[1:] = -np.inf
    f, b = np.concatenate([[0], forward, [0]]), np.concatenate([[0], backward, [0]])
    slot, before, period = 0, None, 2 * p
    while slot < 2 * (m + p - 1):
        if slot % period == 0 and period <= slot <= 2 * (m - 1):
            shift = None if before is None else _common_shift(before, state)
            periods = (2 * (m - 1) - slot) // period
            if shift is not None and periods:
                state[:, 1:-1] += periods * shift
                slot, before = slot + periods * period, None
                continue
            before = state.copy()
        _slot(slot, p, m, state, f, b, transfer)
        slot += 1
    return float(state[0].max())


def _common_shift(before: np.ndarray, now: np.ndarray) -> float | None:
    """Seconds by which every clock moved; None when they moved by different times."""
    moved = now[:, 1:-1] - before[:, 1:-1]
    return float(moved[0, 0]) if np.ptp(moved) <= 1e-12 * now[0].max() else None


def _slot(slot: int, p: int, m: int, state: np.ndarray, f: np.ndarray, b: np.ndarray, transfer: float) -> None:
    """Run one slot: every second stage does a forward and the others a backward, if they have one in this slot."""
    clock, sent_forward, sent_backward = state
    low, high = max(0, slot - 2 * (m - 1)), min(p - 1, slot)
    low += (slot - low) % 2
    if low <= high:
        i = slice(low + 1, high + 2, 2)
        clock[i] = sent_forward[i] = np.maximum(clock[i], sent_forward[low:high + 1:2] + transfer) + f[i]
    low, high = max(0, 2 * p - 1 - slot), min(p - 1, 2 * p - 1 - slot + 2 * (m - 1))
    low += (slot - 2 * p + 1 + low) % 2
    if low <= high:
        i = slice(low + 1, high + 2, 2)
        clock[i] = sent_backward[i] = np.maximum(clock[i], sent_backward[low + 2:high + 3:2] + transfer) + b[i]
