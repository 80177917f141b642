"""Pipeline schedules as lists of instructions, and the loop that executes a list.

F, B, I and W are forward, backward, and backward's halves: input gradient and weight gradient.
Sends are nonblocking.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pkgutil import resolve_name
from typing import Protocol

from . import zero_bubble
from .cuts import VirtualStageCosts
from .instructions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    RECEIVES,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    SENDS,
    InFlight,
    Instruction,
)
from .placement import Placement, placement_of
from .schedule_names import FORWARD_ONLY, row

STEADY_ROUNDS = 3  # times the micro-batches in flight of all model chunks, then a list is periodic

Instructions = list[Instruction]


class Executor(Protocol):
    """One method per op, called with the whole instruction."""

    def forward(self, instruction: Instruction) -> None: ...
    def backward(self, instruction: Instruction) -> None: ...
    def backward_input(self, instruction: Instruction) -> None: ...
    def backward_weight(self, instruction: Instruction) -> None: ...
    def recv_forward(self, instruction: Instruction) -> None: ...
    def send_forward(self, instruction: Instruction) -> None: ...
    def recv_backward(self, instruction: Instruction) -> None: ...
    def send_backward(self, instruction: Instruction) -> None: ...


# Lists ----------------------------------------------------------------------------------------------------------------------------


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


# A schedule as a value ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """Instruction lists for all stages in an iteration. name: in `SCHEDULES`, or FORWARD_ONLY.

    costs: for F, I and W per virtual stage, if backward is split; empty: all alike. compared: see `zero_bubble.lists`.
    pending: micro-batches between F and W per model chunk; default: one per stage. H1 with twice as many is ZB-H2, without a bubble.
    """

    name: str
    placement: Placement
    microbatches: int
    costs: VirtualStageCosts = ()
    compared: VirtualStageCosts = ()
    pending: int | None = None

    @property
    def splits_backward(self) -> bool:
        return row(self.name).splits_backward

    def forward_only(self) -> Schedule:
        return replace(self, name=FORWARD_ONLY)

    def instructions(self, stage: int) -> Instructions:
        made: Instructions = resolve_name(row(self.name).lists)(self, stage)
        return made

    def shortened(self) -> Schedule:
        """Return the schedule with the fewest micro-batches that reach the steady state."""
        stages = self.placement.stages
        few = zero_bubble.shortened_microbatches(self.placement.stages, self.microbatches)
        enough = STEADY_ROUNDS * self.placement.model_chunks * max(stages, self.pending or 0)
        rounds = max(0, -(-(enough - few) // stages))
        return replace(self, microbatches=min(self.microbatches, few + rounds * stages))

    def in_flight(self, stage: int) -> tuple[InFlight, ...]:
        """Return a stage's `peaks_in_flight` from a shortened list; a longer one has no higher peaks."""
        if row(self.name).is_1f1b:  # planners ask thousands of times
            return (InFlight((min(self.placement.stages - stage, self.microbatches),), (0,)),)
        return peaks_in_flight(self.shortened().instructions(stage), self.placement.model_chunks)


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


def build(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """Build a schedule by name. chunks: per stage; 1 for 1F1B and ZB-H1, 2 for ZBV."""
    return Schedule(name, placement_of(name, stages, chunks), microbatches)


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


# What a list holds -------------------------------------------------------------------------------------------------------------


def peaks_in_flight(instructions: Sequence[Instruction], chunks: int = 1) -> tuple[InFlight, ...]:
    """Return a list's moments that can need most memory: no other moment has as much in every respect."""
    now = [0] * (2 * chunks)  # activations, then weight inputs, of each model chunk
    moments = set()
    for i in instructions:
        if i.op in (FORWARD, BACKWARD, BACKWARD_INPUT):
            now[i.model_chunk] += 1 if i.op == FORWARD else -1
        if i.op in (BACKWARD_INPUT, BACKWARD_WEIGHT):
            now[chunks + i.model_chunk] += 1 if i.op == BACKWARD_INPUT else -1
        moments.add(tuple(now))
    largest: list[tuple[int, ...]] = []
    for moment in sorted(moments, key=sum, reverse=True):
        if not any(all(a <= b for a, b in zip(moment, other)) for other in largest):
            largest.append(moment)
    return tuple(InFlight(moment[:chunks], moment[chunks:]) for moment in largest)


def run(instructions: Iterable[Instruction], executor: Executor) -> None:
    for instruction in instructions:
        getattr(executor, instruction.op)(instruction)
