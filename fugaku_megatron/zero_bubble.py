"""Zero-bubble lists: forwards (F), gradients of inputs (I) and of weights (W) of all stages, in the order in which they could run.

The stages are run with given integer costs, and the list of a stage is what it did: so it can be walked whatever the times really
are, and every rank that gives the same numbers finds the same lists. Left out: messages, other schedules (`schedule`).
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023). Test: pytest tests/test_zero_bubble.py tests/test_schedule.py
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from functools import lru_cache

from .parts import ALIKE, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction, Placement, SplitCosts

OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
Lists = tuple[tuple[Instruction, ...], ...]


@lru_cache(maxsize=8)  # every stage's list comes from the same walk
def lists(placement: Placement, microbatches: int, limit: int, costs: tuple[int, int, int] = ALIKE) -> Lists:
    """The computations of every stage.

    limit: the (micro-batch, chunk)s that a stage may hold between F and W. costs: the same for all parts of the model, which keeps
    the lists periodic. Where F, I and W differ, the fastest of three lists is taken: with or without a W before the next F when a
    stage is nearly full, and the one for equal costs.
    """
    equal = _Stages(placement, microbatches, limit, ALIKE, empties=False).lists
    if costs == ALIKE:
        return equal
    own = (_Stages(placement, microbatches, limit, costs, empties).lists for empties in (False, True))
    return min((*own, equal), key=lambda found: end(placement, found, costs))


def end(placement: Placement, lists: Lists, costs: SplitCosts) -> float:
    """When the last stage has finished, in the unit of the costs; infinity for lists that blocking sends would stop.

    A send blocks until its receive is posted. The next receive of each kind is posted ahead (`schedule.receives`), so a result is
    sent once its receiver has begun to work on the one before.
    """
    finished: dict[str, list[list[int]]] = {op: [[] for _ in range(placement.parts)] for op in OPERATIONS}
    clock, places, moved = [0] * placement.stages, [0] * placement.stages, True
    cost = dict(zip(OPERATIONS, costs, strict=True))
    while moved:
        moved = False
        for stage, mine in enumerate(lists):
            while places[stage] < len(mine):
                place = places[stage]
                i = mine[place]
                source = _beside(placement, stage, i, -1)
                given = finished[i.op][source][i.microbatch:i.microbatch + 1] if source is not None else [0]
                if not given or _sends(placement, stage, mine[max(0, place - 1):place], finished):
                    break
                clock[stage] = max(clock[stage], *given) + cost[i.op]
                finished[i.op][placement.part(stage, i.chunk)].append(clock[stage])
                places[stage] += 1
                moved = True
    return max(clock) if places == [*map(len, lists)] else math.inf


def _sends(placement: Placement, stage: int, last: Sequence[Instruction], finished: dict[str, list[list[int]]]) -> bool:
    """Whether the last result of a stage (none or one) is still being sent."""
    to = [(i, _beside(placement, stage, i, 1)) for i in last]
    return any(part is not None and len(finished[i.op][part]) < i.microbatch for i, part in to)


def _beside(placement: Placement, stage: int, i: Instruction, step: int) -> int | None:
    """The part to which an instruction's result goes (step 1), or from which its input comes (-1); None where it is no message."""
    part = placement.part(stage, i.chunk)
    other = part + (step if i.op == FORWARD else -step)
    return other if i.op != BACKWARD_WEIGHT and 0 <= other < placement.parts else None


class _Stages:
    """All stages at work. A stage prefers I after an F and F after anything else, since others wait for both, and fills with W.

    empties: it prefers W where it could hold no more than one F more. end: when the last has finished, in the unit of the costs.
    """

    def __init__(self, placement: Placement, microbatches: int, limit: int, costs: SplitCosts, empties: bool) -> None:
        self.placement, self.microbatches, self.limit, self.empties, self.end = placement, microbatches, limit, empties, 0
        chunks, stages = range(placement.chunks), range(placement.stages)
        self.own = [[(chunk, placement.part(stage, chunk)) for chunk in chunks] for stage in stages]
        self.costs = dict(zip(OPERATIONS, costs, strict=True))
        self.done = {op: [0] * placement.parts for op in OPERATIONS}
        self.did: list[list[Instruction]] = [[] for _ in self.own]
        self._run()
        still = f"{placement} with {microbatches} micro-batches stands still when a stage may hold {limit}"
        assert min(self.done[BACKWARD_WEIGHT]) == microbatches, still

    @property
    def lists(self) -> Lists:
        return tuple(map(tuple, self.did))

    def _run(self) -> None:
        idle, finishing = set(range(self.placement.stages)), []
        while True:
            for stage in sorted(idle):
                if chosen := self._choose(stage):
                    self.did[stage].append(chosen)
                    idle.discard(stage)
                    heapq.heappush(finishing, (self.end + self.costs[chosen.op], stage))
            if not finishing:
                return
            self.end = finishing[0][0]
            while finishing and finishing[0][0] == self.end:
                _, stage = heapq.heappop(finishing)
                last = self.did[stage][-1]
                self.done[last.op][self.placement.part(stage, last.chunk)] += 1
                idle.add(stage)

    def _choose(self, stage: int) -> Instruction | None:
        """What an idle stage runs now; None where it has to wait."""
        held = sum(self.done[FORWARD][part] - self.done[BACKWARD_WEIGHT][part] for _, part in self.own[stage])
        ready, mine = self._ready(stage, held), self.did[stage]
        if mine and mine[-1].op == FORWARD:
            order: Sequence[str] = (BACKWARD_INPUT, FORWARD, BACKWARD_WEIGHT)
        elif self.empties and mine and mine[-1].op == BACKWARD_INPUT and held >= self.limit - 1:
            order = (BACKWARD_WEIGHT, FORWARD, BACKWARD_INPUT)
        else:
            order = OPERATIONS
        return next((ready[op] for op in order if op in ready), None)

    def _ready(self, stage: int, held: int) -> dict[str, Instruction]:
        """What a stage could run, by operation: the F of its last chunk that has one, the I and the W of its first.

        held: (micro-batch, chunk)s between F and W. A place in memory stays free for every later chunk, without which the forwards
        of an earlier one could lock the stages.
        """
        forward, backward, weight = (self.done[op] for op in OPERATIONS)
        chunks, last, ready = self.placement.chunks, self.placement.parts - 1, {}
        for chunk, part in self.own[stage]:
            given = self.microbatches if part == 0 else forward[part - 1]
            if forward[part] < given and held + chunks - 1 - chunk < self.limit:
                ready[FORWARD] = Instruction(FORWARD, forward[part], chunk)
        for chunk, part in reversed(self.own[stage]):
            if backward[part] < (forward[part] if part == last else backward[part + 1]):
                ready[BACKWARD_INPUT] = Instruction(BACKWARD_INPUT, backward[part], chunk)
            if weight[part] < backward[part]:
                ready[BACKWARD_WEIGHT] = Instruction(BACKWARD_WEIGHT, weight[part], chunk)
        return ready
