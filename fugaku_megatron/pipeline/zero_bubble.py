"""Zero-bubble schedules: forwards (F), input gradients (I) and weight gradients (W) of all stages in executable order.

A simulation with integer costs yields the lists, so every rank finds the same lists.
Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from .instructions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Instruction
from .placement import ALIKE, Placement, VirtualStageCosts
from .schedule_names import ZERO_BUBBLE_RECEIVES

OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
# Beyond ROUNDS x stages and LONG micro-batches, lists must be periodic.
ROUNDS = 4
LONG = 32
Lists = tuple[tuple[Instruction, ...], ...]


class NoList(ValueError):
    """Every candidate list deadlocks with blocking sends."""


class Policy(NamedTuple):
    """Rule for a stage's next operation.

    newest: prefer I on the last model chunk over the first; such lists need not become periodic.
    empties: prefer W if at most one more F fits.
    """

    costs: VirtualStageCosts
    newest: bool = False
    empties: bool = False


def lists(
    placement: Placement,
    microbatches: int,
    limit: int,
    costs: VirtualStageCosts = (),
    compared: VirtualStageCosts = (),
) -> Lists:
    """Return every stage's computations: the fastest candidate lists that do not deadlock with blocking sends.

    limit: (micro-batch, model chunk) pairs on a stage between F and W.
    costs: per virtual stage, for which lists are made; empty: all alike.
    compared: costs for comparison; default: `costs`.
    For many micro-batches, compare short lists by periodic policies only. Raise NoList if all candidates deadlock.
    """
    found = _lists(placement, microbatches, limit, costs, compared)
    if found is None:
        raise NoList(
            f"{placement.stages} stages of {placement.model_chunks} chunks that hold {limit} of them have no zero-bubble list "
            f"for {microbatches} micro-batches that blocking sends could not stop: pass another number of chunks "
            "(--num-virtual-stages-per-pipeline-rank) or --zero-bubble-max-pending-backward"
        )
    return found


@lru_cache(maxsize=16)  # one simulation makes the lists of all stages
def _lists(
    placement: Placement,
    microbatches: int,
    limit: int,
    costs: VirtualStageCosts,
    compared: VirtualStageCosts,
) -> Lists | None:
    virtual_stages = range(placement.virtual_stages)
    alike = Policy(tuple(ALIKE for _ in virtual_stages))
    if costs in ((), alike.costs):
        return _Simulation(placement, microbatches, limit, alike).lists
    middle_cost = sorted(costs)[len(costs) // 2]
    middle = tuple(middle_cost for _ in virtual_stages)
    policies = [
        alike,
        Policy(middle),
        Policy(middle, empties=True),
        Policy(costs, newest=True),
        Policy(costs, newest=True, empties=True),
    ]
    few = shortened_microbatches(placement.stages, microbatches)
    many = max(ROUNDS * placement.stages, LONG)
    short = {
        policy: _Simulation(placement, few, limit, policy).lists
        for policy in policies
        if microbatches <= many or not policy.newest
    }
    ends = {policy: end(placement, made, compared or costs) for policy, made in short.items()}
    fastest = sorted(ends, key=lambda policy: ends[policy])
    if few == microbatches:
        return next((short[policy] for policy in fastest if ends[policy] < math.inf), None)
    long = (_Simulation(placement, microbatches, limit, policy).lists for policy in fastest)
    return next((made for made in long if end(placement, made, costs) < math.inf), None)


def shortened_microbatches(stages: int, microbatches: int) -> int:
    """Return the fewest micro-batches with the same kind of lists."""
    many = max(ROUNDS * stages, LONG)
    return min(microbatches, many + 1 + (microbatches - many - 1) % stages)


def end(placement: Placement, lists: Lists, costs: VirtualStageCosts) -> float:
    """Return the time when the last stage ends, in units of the costs; infinity if blocking sends deadlock.

    A send blocks until its receive is posted, up to `receives_ahead` ahead.
    """
    finished: dict[tuple[str, int], list[int]] = {
        (op, virtual_stage): []
        for op in OPERATIONS
        for virtual_stage in range(placement.virtual_stages)
    }
    clock = [0 for _ in lists]
    places = [0 for _ in lists]
    moved = True
    routes = _routes(placement)
    while moved:
        moved = False
        for stage, mine in enumerate(lists):
            for i in mine[places[stage] :]:
                route = routes[stage][i.op, i.model_chunk]
                if places[stage] and _sends(routes[stage], mine[places[stage] - 1], finished):
                    break
                ready = clock[stage]
                if route.source is not None:
                    inputs = finished[i.op, route.source]
                    if len(inputs) <= i.microbatch:
                        break
                    ready = max(ready, inputs[i.microbatch])
                clock[stage] = ready + costs[route.virtual_stage][OPERATIONS.index(i.op)]
                finished[i.op, route.virtual_stage].append(clock[stage])
                places[stage] += 1
                moved = True
    return max(clock) if places == [*map(len, lists)] else math.inf


def _sends(
    routes: Mapping[tuple[str, int], Route],
    last: Instruction,
    finished: Mapping[tuple[str, int], list[int]],
) -> bool:
    to = routes[last.op, last.model_chunk]
    return (
        to.message
        and to.target is not None
        and len(finished[last.op, to.target]) <= last.microbatch - ZERO_BUBBLE_RECEIVES
    )


class Route(NamedTuple):
    """Virtual stages of a computation, its input and its result. message: the result goes to another stage."""

    virtual_stage: int
    source: int | None
    target: int | None
    message: bool


@lru_cache(maxsize=64)
def _routes(placement: Placement) -> tuple[Mapping[tuple[str, int], Route], ...]:
    return tuple(
        {
            (op, chunk): _route(placement, stage, op, chunk)
            for op in OPERATIONS
            for chunk in range(placement.model_chunks)
        }
        for stage in range(placement.stages)
    )


def _route(placement: Placement, stage: int, op: str, chunk: int) -> Route:
    here = placement.virtual_stage(stage, chunk)
    if op == BACKWARD_WEIGHT:
        return Route(here, source=None, target=None, message=False)
    step = 1 if op == FORWARD else -1
    source = placement.neighbour(stage, chunk, -step)
    target = placement.neighbour(stage, chunk, step)
    return Route(
        here,
        source=here - step if source else None,
        target=here + step if target else None,
        message=target is not None and target[0] != stage,
    )


class _Simulation:
    """A stage prefers I after F and F otherwise, because others wait for both, and fills gaps with W."""

    def __init__(self, placement: Placement, microbatches: int, limit: int, policy: Policy) -> None:
        self.placement = placement
        self.microbatches = microbatches
        self.limit = limit
        self.policy = policy
        self.end = 0
        chunks = range(placement.model_chunks)
        stages = range(placement.stages)
        self.own = [
            [(chunk, placement.virtual_stage(stage, chunk)) for chunk in chunks] for stage in stages
        ]
        self.done = {op: [0 for _ in range(placement.virtual_stages)] for op in OPERATIONS}
        self.in_flight = [0 for _ in stages]  # (micro-batch, model chunk) pairs between F and W
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
        last = self.did[stage][-1]
        route = _routes(self.placement)[stage][last.op, last.model_chunk]
        self.done[last.op][route.virtual_stage] += 1
        if last.op == FORWARD:
            self.in_flight[stage] += 1
        elif last.op == BACKWARD_WEIGHT:
            self.in_flight[stage] -= 1
        if route.message and route.target is not None:
            return self.placement.owner(route.target)[0]
        return stage

    def _begin(self, stage: int) -> int | None:
        ready = self._ready(stage)
        mine = self.did[stage]
        last = mine[-1].op if mine else None
        if last == FORWARD:
            order: Sequence[str] = (BACKWARD_INPUT, FORWARD, BACKWARD_WEIGHT)
        elif (
            self.policy.empties
            and last == BACKWARD_INPUT
            and self.in_flight[stage] >= self.limit - 1
        ):
            order = (BACKWARD_WEIGHT, FORWARD, BACKWARD_INPUT)
        else:
            order = OPERATIONS
        for op in order:
            if op in ready:
                chunk, part = ready[op]
                mine.append(Instruction(op, self.done[op][part], chunk))
                return self.policy.costs[part][OPERATIONS.index(op)]
        return None

    def _ready(self, stage: int) -> dict[str, tuple[int, int]]:
        """Return operation -> (model chunk, virtual stage) that a stage could run: F on its last chunk, W on its first, and an I.

        Memory is reserved for every later chunk against deadlock.
        """
        forward, backward, weight = (self.done[op] for op in OPERATIONS)
        chunks = self.placement.model_chunks
        last = self.placement.virtual_stages - 1
        ready = {}
        for chunk, part in self.own[stage]:
            given = self.microbatches if part == 0 else forward[part - 1]
            if forward[part] < given and self.in_flight[stage] + chunks - 1 - chunk < self.limit:
                ready[FORWARD] = chunk, part
            given = forward[part] if part == last else backward[part + 1]
            if backward[part] < given and (self.policy.newest or BACKWARD_INPUT not in ready):
                ready[BACKWARD_INPUT] = chunk, part
            if weight[part] < backward[part] and BACKWARD_WEIGHT not in ready:
                ready[BACKWARD_WEIGHT] = chunk, part
        return ready
