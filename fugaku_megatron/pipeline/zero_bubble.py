"""Zero-bubble lists: forwards (F), gradients of inputs (I) and of weights (W) of all stages, in the order in which they could run.

The stages are run with integer costs, and the list of a stage is what it did: so it can be walked whatever the times really
are, and every rank with the same numbers finds the same lists. Left out: messages, other schedules (`schedule`).
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .cuts import ALIKE, PartCosts
from .instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction
from .placement import Placement
from .schedule_names import ZBV, receives_ahead

OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
RECEIVES_AHEAD = receives_ahead(ZBV)
# of `stages` micro-batches, and micro-batches: more than both are so many that lists must be periodic
ROUNDS = 4
LONG = 32
Lists = tuple[tuple[Instruction, ...], ...]


class NoList(ValueError):
    """None of the lists that were made can be walked with sends that block."""


class Way(NamedTuple):
    """How stages choose what they do next.

    costs: of each part. newest: of several I a stage prefers that of its last chunk, the nearest to the loss, instead of that of
    its first; such lists need not become periodic. empties: a stage that could hold no more than one F more prefers W.
    """

    costs: PartCosts
    newest: bool = False
    empties: bool = False


def lists(
    placement: Placement,
    microbatches: int,
    limit: int,
    costs: tuple[tuple[int, int, int], ...] = (),
    compared: tuple[tuple[int, int, int], ...] = (),
) -> Lists:
    """The computations of every stage: of the lists that the ways to choose make, the fastest that blocking sends do not stop.

    limit: the (micro-batch, chunk)s that a stage may hold between F and W. costs: of each part of the model, which lists are made
    for; none: all alike. compared: those at which the fastest is sought, by default the same. The list for equal costs is among
    them, and one for parts that all cost what a middle one does. Of many micro-batches few are compared, and only ways whose lists
    become periodic. Raises NoList where blocking sends would stop them all.
    """
    found = _lists(placement, microbatches, limit, costs, compared)
    if found is None:
        raise NoList(
            f"{placement.stages} stages of {placement.model_chunks} chunks that hold {limit} of them have no zero-bubble list "
            f"for {microbatches} micro-batches that blocking sends could not stop: pass another number of chunks "
            "(--num-virtual-stages-per-pipeline-rank) or --zero-bubble-max-pending-backward"
        )
    return found


@lru_cache(maxsize=16)  # every stage's list comes from the same walk
def _lists(
    placement: Placement,
    microbatches: int,
    limit: int,
    costs: tuple[tuple[int, int, int], ...],
    compared: tuple[tuple[int, int, int], ...],
) -> Lists | None:
    alike = Way((ALIKE,) * placement.virtual_stages)
    if costs in ((), alike.costs):
        return _Stages(placement, microbatches, limit, alike).lists
    middle = (sorted(costs)[placement.virtual_stages // 2],) * placement.virtual_stages
    ways = [
        alike,
        *(
            Way(*each, empties)
            for each in ((middle, False), (costs, True))
            for empties in (False, True)
        ),
    ]
    few = shortened_microbatches(placement.stages, microbatches)
    many = max(ROUNDS * placement.stages, LONG)
    short = {
        way: _Stages(placement, few, limit, way).lists
        for way in ways
        if microbatches <= many or not way.newest
    }
    ends = {way: end(placement, made, compared or costs) for way, made in short.items()}
    fastest = sorted(ends, key=lambda way: ends[way])
    if few == microbatches:
        return next((short[way] for way in fastest if ends[way] < math.inf), None)
    long = (_Stages(placement, microbatches, limit, way).lists for way in fastest)
    return next((made for made in long if end(placement, made, costs) < math.inf), None)


def shortened_microbatches(stages: int, microbatches: int) -> int:
    """Micro-batches whose lists are of the same kind as those of `microbatches`, and can be extended by rounds of `stages`."""
    many = max(ROUNDS * stages, LONG)
    return min(microbatches, many + 1 + (microbatches - many - 1) % stages)


def end(placement: Placement, lists: Lists, costs: PartCosts) -> float:
    """When the last stage has finished, in the unit of the costs; infinity for lists that blocking sends would stop.

    A send blocks until its receive is posted. Some receives of each kind are posted ahead (`parts.receives_ahead`), so a result is
    sent once its receiver has begun to work on the one that is so many before it.
    """
    finished: dict[tuple[str, int], list[int]] = {
        (op, part): [] for op in OPERATIONS for part in range(placement.virtual_stages)
    }
    clock = [0] * placement.stages
    places = [0] * placement.stages
    moved = True
    routes = _routes(placement)
    while moved:
        moved = False
        for stage, mine in enumerate(lists):
            for i in mine[places[stage] :]:
                route = routes[stage][i.op, i.model_chunk]
                last = mine[places[stage] - 1] if places[stage] else None
                given = finished[i.op, route.source] if route.source is not None else None
                if (given is not None and len(given) <= i.microbatch) or (
                    last and _sends(routes[stage], last, finished)
                ):
                    break
                ready = max(clock[stage], given[i.microbatch] if given is not None else 0)
                clock[stage] = ready + costs[route.part][OPERATIONS.index(i.op)]
                finished[i.op, route.part].append(clock[stage])
                places[stage] += 1
                moved = True
    return max(clock) if places == [*map(len, lists)] else math.inf


def _sends(
    routes: Mapping[tuple[str, int], Route],
    last: Instruction,
    finished: Mapping[tuple[str, int], list[int]],
) -> bool:
    """Whether the last result of a stage is still being sent to another stage."""
    to = routes[last.op, last.model_chunk]
    return (
        to.message
        and to.target is not None
        and len(finished[last.op, to.target]) <= last.microbatch - RECEIVES_AHEAD
    )


class Route(NamedTuple):
    """The part that a computation is for, the parts from which its input comes and to which its result goes, if there are any.

    message: whether the result goes to another stage.
    """

    part: int
    source: int | None
    target: int | None
    message: bool


@lru_cache(maxsize=64)
def _routes(placement: Placement) -> tuple[Mapping[tuple[str, int], Route], ...]:
    """(operation, chunk) -> route, for each stage."""
    return tuple(
        {
            (op, chunk): _route(placement, stage, op, chunk)
            for op in OPERATIONS
            for chunk in range(placement.model_chunks)
        }
        for stage in range(placement.stages)
    )


def _route(placement: Placement, stage: int, op: str, chunk: int) -> Route:
    part = placement.virtual_stage(stage, chunk)
    step = 1 if op == FORWARD else -1
    source, target = (
        near if op != BACKWARD_WEIGHT and 0 <= near < placement.virtual_stages else None
        for near in (part - step, part + step)
    )
    return Route(part, source, target, target is not None and placement.owner(target)[0] != stage)


class _Stages:
    """All stages at work. A stage prefers I after an F and F after anything else, since others wait for both, and fills with W.

    end: when the last has finished, in the unit of the costs.
    """

    def __init__(self, placement: Placement, microbatches: int, limit: int, way: Way) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.limit = limit
        self.way = way
        self.end = 0
        chunks = range(placement.model_chunks)
        stages = range(placement.stages)
        self.own = [
            [(chunk, placement.virtual_stage(stage, chunk)) for chunk in chunks] for stage in stages
        ]
        self.done = {op: [0] * placement.virtual_stages for op in OPERATIONS}
        self.held = [0 for _ in stages]  # (micro-batch, chunk)s between F and W
        self.did: list[list[Instruction]] = [[] for _ in stages]
        self._run()
        still = f"{placement} with {microbatches} micro-batches does not go on when a stage may hold {limit}"
        assert min(self.done[BACKWARD_WEIGHT]) == microbatches, still

    @property
    def lists(self) -> Lists:
        return tuple(map(tuple, self.did))

    def _run(self) -> None:
        idle = set(range(self.placement.stages))
        woken = set(range(self.placement.stages))
        finishing: list[tuple[int, int]] = []
        while True:
            for stage in sorted(woken & idle):
                if (cost := self._begin(stage)) is not None:
                    idle.discard(stage)
                    heapq.heappush(finishing, (self.end + cost, stage))
            if not finishing:
                return
            self.end = finishing[0][0]
            woken = set()
            while finishing and finishing[0][0] == self.end:
                _, stage = heapq.heappop(finishing)
                idle.add(stage)
                woken |= {stage, self._finish(stage)}

    def _finish(self, stage: int) -> int:
        """The last computation of a stage is done; returns the stage that its result goes to, or this one."""
        last = self.did[stage][-1]
        route = _routes(self.placement)[stage][last.op, last.model_chunk]
        self.done[last.op][route.part] += 1
        self.held[stage] += (last.op == FORWARD) - (last.op == BACKWARD_WEIGHT)
        return (
            self.placement.owner(route.target)[0]
            if route.message and route.target is not None
            else stage
        )

    def _begin(self, stage: int) -> int | None:
        """Begin what an idle stage runs now; returns what it costs, None where the stage has to wait."""
        ready = self._ready(stage)
        mine = self.did[stage]
        last = mine[-1].op if mine else None
        if last == FORWARD:
            order: Sequence[str] = (BACKWARD_INPUT, FORWARD, BACKWARD_WEIGHT)
        elif self.way.empties and last == BACKWARD_INPUT and self.held[stage] >= self.limit - 1:
            order = (BACKWARD_WEIGHT, FORWARD, BACKWARD_INPUT)
        else:
            order = OPERATIONS
        for op in order:
            if op in ready:
                chunk, part = ready[op]
                mine.append(Instruction(op, self.done[op][part], chunk))
                return self.way.costs[part][OPERATIONS.index(op)]
        return None

    def _ready(self, stage: int) -> dict[str, tuple[int, int]]:
        """The (chunk, part)s whose next operations a stage could run: the F of its last chunk, the W of its first, and an I.

        A place in memory stays free for every later chunk, without which the forwards of an earlier one could lock the stages.
        """
        forward, backward, weight = (self.done[op] for op in OPERATIONS)
        chunks = self.placement.model_chunks
        last = self.placement.virtual_stages - 1
        ready = {}
        for chunk, part in self.own[stage]:
            given = self.microbatches if part == 0 else forward[part - 1]
            if forward[part] < given and self.held[stage] + chunks - 1 - chunk < self.limit:
                ready[FORWARD] = chunk, part
            given = forward[part] if part == last else backward[part + 1]
            if backward[part] < given and (self.way.newest or BACKWARD_INPUT not in ready):
                ready[BACKWARD_INPUT] = chunk, part
            if weight[part] < backward[part] and BACKWARD_WEIGHT not in ready:
                ready[BACKWARD_WEIGHT] = chunk, part
        return ready
