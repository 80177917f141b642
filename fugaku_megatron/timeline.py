"""When every stage does what: the walk through a schedule's lists, given the seconds of each computation and of a message.

Left out: where the seconds come from (`perf.cost`), the same end in less time (`perf.pipeline`), a picture (`logs.pipeline_plot`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .parts import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, RECEIVES, SENDS, Instruction
from .schedule import Schedule

COMPUTATIONS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


@dataclass(frozen=True)
class Costs:
    """Seconds of a micro-batch. of: computation -> stage -> chunk. transfer: of a message between two stages."""

    of: Mapping[str, Sequence[Sequence[float]]]
    transfer: float = 0.0

    @staticmethod
    def alike(schedule: Schedule, slot: float = 1.0, transfer: float = 0.0) -> Costs:
        """Stages that cost the same: F, I and W a slot each for all of a stage's chunks, B two."""
        p, v = schedule.placement.stages, schedule.placement.chunks
        return Costs({op: [[slot / v * (1 + (op == BACKWARD))] * v] * p for op in COMPUTATIONS}, transfer)


@dataclass(frozen=True)
class Span:
    """What a stage does for a time: a computation, or waiting while a message for it is on its way. start, end: seconds."""

    stage: int
    op: str
    microbatch: int
    chunk: int
    start: float
    end: float


def walk(schedule: Schedule, costs: Costs) -> float:
    """Seconds until the last stage has finished."""
    return max((span.end for span in spans(schedule, costs)), default=0.0)


def spans(schedule: Schedule, costs: Costs) -> list[Span]:
    """Every computation of every stage, and every wait for a message that was under way, in the order of each stage.

    A stage executes its list in order. A send costs its sender nothing and arrives after `costs.transfer` seconds; until a message
    is sent, its receiver is idle, for which there is no span.
    """
    stages = range(schedule.placement.stages)
    lists, arrived = [schedule.instructions(stage) for stage in stages], {}
    clock, places = [0.0 for _ in stages], [0 for _ in stages]
    result: list[Span] = []
    while any(places[stage] < len(lists[stage]) for stage in stages):
        before = sum(places)
        for stage in stages:
            while places[stage] < len(lists[stage]):
                i = lists[stage][places[stage]]
                span = _execute(schedule, costs, stage, i, clock[stage], arrived)
                if span is None:
                    break
                clock[stage] = span.end
                result += [span] if span.end > span.start or i.op in COMPUTATIONS else []
                places[stage] += 1
        assert sum(places) > before, "the schedule deadlocks"
    return result


def _execute(schedule: Schedule, costs: Costs, stage: int, i: Instruction, now: float, arrived: dict) -> Span | None:
    """The instruction's span, from `now` at the earliest; None when its message has not been sent.

    arrived: (receiver, tag, micro-batch) of each message -> when it arrives.
    """
    start = end = now
    if i.op in SENDS:
        other, tag = schedule.placement.peer(stage, i)
        arrived[other, tag, i.microbatch] = now + costs.transfer
    elif i.op in RECEIVES:
        _, tag = schedule.placement.peer(stage, i)
        if (stage, tag, i.microbatch) not in arrived:
            return None
        end = max(now, arrived[stage, tag, i.microbatch])
        start = max(now, end - costs.transfer)
    else:
        end = now + costs.of[i.op][stage][i.chunk]
    return Span(stage, i.op, i.microbatch, i.chunk, start, end)
