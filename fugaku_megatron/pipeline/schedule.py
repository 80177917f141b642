"""Pipeline schedules as pure lists of instructions, and the small loop that walks one.

    build("zbv", stages=8, chunks=2, microbatches=16).instructions(3)      what stage 3 of 8 does in an iteration

A stage owns one or more chunks of layers, each a part of the model (`parts`). F, B, I and W stand for forward, backward, and its
halves: gradient of the input, gradient of the weights. Sends are nonblocking, receives block.
`perf` costs the same lists. Left out: what an instruction does (`training.step.StepExecutor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from . import zero_bubble
from .cuts import PartCosts
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
from .placement import LOOP, Placement, placement_of
from .schedule_names import INTERLEAVED, ONE_F_ONE_B, SPLITS_BACKWARD

FORWARD_ONLY = "forward-only"
STEADY_ROUNDS = 3  # micro-batches for each that all chunks of a stage may hold, after which a list repeats itself


class Executor(Protocol):
    """What walks a schedule has one method per op, which receives the whole instruction."""

    def forward(self, instruction: Instruction) -> None: ...
    def backward(self, instruction: Instruction) -> None: ...
    def backward_input(self, instruction: Instruction) -> None: ...
    def backward_weight(self, instruction: Instruction) -> None: ...
    def recv_forward(self, instruction: Instruction) -> None: ...
    def send_forward(self, instruction: Instruction) -> None: ...
    def recv_backward(self, instruction: Instruction) -> None: ...
    def send_backward(self, instruction: Instruction) -> None: ...


# Lists ----------------------------------------------------------------------------------------------------------------------------


def one_f_one_b(stage: int, stages: int, microbatches: int) -> list[Instruction]:
    """1F1B for one stage: fill with forwards, then alternate, then drain. At most `stages - stage` micro-batches are in flight.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", figure 4 (2021).
    """
    forwards = [Instruction(FORWARD, m) for m in range(microbatches)]
    backwards = [Instruction(BACKWARD, m) for m in range(microbatches)]
    return with_messages(
        Placement(stages), stage, _alternate(forwards, backwards, stages - stage - 1)
    )


def interleaved(stage: int, stages: int, chunks: int, microbatches: int) -> list[Instruction]:
    """Megatron's interleaved 1F1B for one stage: the bubble of 1F1B divided by `chunks`.

    Any number of micro-batches: it is the list of the next multiple of `stages`, without those that do not exist. What is left of
    a list that can be walked can be walked, because a micro-batch depends on no other.
    Source: Narayanan et al. (2021), figure 4, bottom.
    """
    placement = Placement(stages, chunks)
    padded = -(-microbatches // stages) * stages
    order = [Instruction(FORWARD, m, c) for m, c in _forward_order(placement, stage, padded)]
    # Backwards run in the same order from the last chunk to the first.
    back = [Instruction(BACKWARD, i.microbatch, chunks - 1 - i.model_chunk) for i in order]
    both = _alternate(order, back, 2 * (stages - stage - 1) + (chunks - 1) * stages)
    return with_messages(placement, stage, [i for i in both if i.microbatch < microbatches])


def split_backward(
    placement: Placement,
    stage: int,
    microbatches: int,
    costs: PartCosts = (),
    compared: PartCosts = (),
    pending: int | None = None,
) -> list[Instruction]:
    """Zero Bubble H1 (a third of 1F1B's bubble) or, with the parts in a V, ZB-V (almost no bubble) for one stage.

    costs: of F, I and W of each part; none: all alike. compared: see `zero_bubble.lists`. pending: micro-batches that a stage may
    hold between F and W of each of its chunks, by default one for each stage: then it holds as much as the first stage does in
    1F1B. H1 with twice as many is ZB-H2, whose steady state has no bubble.
    Source: Qi et al., "Zero Bubble Pipeline Parallelism", sections 2 and 6 (2023).
    """
    limit = placement.model_chunks * (pending or placement.stages)
    return with_messages(
        placement, stage, zero_bubble.lists(placement, microbatches, limit, costs, compared)[stage]
    )


def forward_only(
    stage: int, stages: int, microbatches: int, chunks: int = 1, kind: str = LOOP
) -> list[Instruction]:
    """Evaluation: forwards alone."""
    placement = Placement(stages, chunks, kind)
    order = _forward_order(placement, stage, microbatches)
    return with_messages(placement, stage, [Instruction(FORWARD, m, c) for m, c in order])


def _alternate(
    forwards: list[Instruction], backwards: list[Instruction], fill: int
) -> list[Instruction]:
    """`fill` forwards, then one forward and one backward in turn, then the remaining backwards."""
    pairs = zip(forwards[fill:], backwards)
    return [
        *forwards[:fill],
        *(i for pair in pairs for i in pair),
        *backwards[max(0, len(forwards) - fill) :],
    ]


def _forward_order(placement: Placement, stage: int, microbatches: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of a stage's forwards in their order where nothing else keeps it busy."""
    both = [(m, c) for m in range(microbatches) for c in range(placement.model_chunks)]
    return sorted(
        both, key=lambda i: placement.forward_slot(i[0], placement.virtual_stage(stage, i[1]))
    )


def with_messages(
    placement: Placement, stage: int, computations: Iterable[Instruction]
) -> list[Instruction]:
    """The computations with a receive before and a send after each that needs one."""
    assert 0 <= stage < placement.stages, (stage, placement)
    result = []
    for i in computations:
        if i.op == BACKWARD_WEIGHT:
            result.append(i)
            continue
        forward = i.op == FORWARD
        source, target = (
            (placement.neighbour(stage, i.model_chunk, step))
            for step in ((-1, 1) if forward else (1, -1))
        )
        receive, send = (RECV_FORWARD, SEND_FORWARD) if forward else (RECV_BACKWARD, SEND_BACKWARD)
        result += (
            [Instruction(receive, i.microbatch, i.model_chunk)]
            if source and source[0] != stage
            else []
        )
        result.append(i)
        result += (
            [Instruction(send, i.microbatch, i.model_chunk)]
            if target and target[0] != stage
            else []
        )
    return result


# A schedule as a value ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    """The lists of all stages for an iteration. name: one of `parts.NAMES`, or FORWARD_ONLY.

    costs, compared, pending: what zero-bubble lists are made for, see `split_backward`; other lists do not depend on them.
    """

    name: str
    placement: Placement
    microbatches: int
    costs: PartCosts = ()
    compared: PartCosts = ()
    pending: int | None = None

    @property
    def splits_backward(self) -> bool:
        """Whether the lists hold I and W instead of B."""
        return self.name in SPLITS_BACKWARD

    def forward_only(self) -> Schedule:
        """The lists of an evaluation with the same parts of the model in the same places."""
        return replace(self, name=FORWARD_ONLY)

    def instructions(self, stage: int) -> list[Instruction]:
        """The list of one stage."""
        p = self.placement.stages
        v = self.placement.model_chunks
        m = self.microbatches
        if self.splits_backward:
            return split_backward(self.placement, stage, m, self.costs, self.compared, self.pending)
        lists = {
            ONE_F_ONE_B: lambda: one_f_one_b(stage, p, m),
            INTERLEAVED: lambda: interleaved(stage, p, v, m),
            FORWARD_ONLY: lambda: forward_only(stage, p, m, v, self.placement.kind),
        }
        return lists[self.name]()

    def shortened(self) -> Schedule:
        """The schedule of as many micro-batches as it takes to reach the steady state, so that more are only more rounds of it."""
        stages = self.placement.stages
        few = zero_bubble.shortened_microbatches(self.placement.stages, self.microbatches)
        enough = STEADY_ROUNDS * self.placement.model_chunks * max(stages, self.pending or 0)
        rounds = max(0, -(-(enough - few) // stages))
        return replace(self, microbatches=min(self.microbatches, few + rounds * stages))

    def in_flight(self, stage: int) -> tuple[InFlight, ...]:
        """What a stage holds at the moments that may need most memory, as `held` of its list.

        A list that is long enough to reach its steady state holds as much as any longer one.
        """
        if self.name == ONE_F_ONE_B:  # without its list: planners ask for thousands
            return (InFlight((min(self.placement.stages - stage, self.microbatches),), (0,)),)
        return peaks_in_flight(self.shortened().instructions(stage), self.placement.model_chunks)

    def send_queue(self, stage: int) -> int:
        """How many sends a stage has under way at most: when it starts one more, the oldest is finished.

        A send is finished once anything has come back that its receiver sent after it had received it. Where nothing comes back, in
        an evaluation, waiting for the oldest keeps nobody waiting, so one for each part of the model is enough.
        """
        return _send_queue(self, stage)


@lru_cache(maxsize=8)  # every iteration asks, and the answer takes the lists of all neighbours
def _send_queue(schedule: Schedule, stage: int) -> int:
    here = schedule.instructions(stage)
    others = {schedule.placement.peer(stage, i)[0] for i in here if _is_message(i)}
    position = {other: _positions(schedule, other) for other in others}
    seen = dict.fromkeys(position, -1)
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
        seen[other] = max(seen[other], place)
        while queue and queue[0][1] < seen[queue[0][0]]:
            queue.popleft()
    return min(most, schedule.placement.virtual_stages) if schedule.name == FORWARD_ONLY else most


def _positions(schedule: Schedule, stage: int) -> dict[tuple[int, int], int]:
    """(tag, micro-batch) of a stage's messages -> place in its list."""
    messages = ((n, i) for n, i in enumerate(schedule.instructions(stage)) if _is_message(i))
    return {(schedule.placement.peer(stage, i)[1], i.microbatch): n for n, i in messages}


def build(name: str, stages: int, chunks: int, microbatches: int) -> Schedule:
    """The schedule of one of `parts.NAMES`. chunks: of each stage; 1 for 1F1B and ZB-H1, 2 for ZBV."""
    return Schedule(name, placement_of(name, stages, chunks), microbatches)


def _is_message(instruction: Instruction) -> bool:
    return instruction.op in SENDS or instruction.op in RECEIVES


def receives(instructions: Iterable[Instruction]) -> dict[tuple[str, int], list[Instruction]]:
    """(op, chunk), which is to say tag -> the receives of a list in their order.

    A stage that has the next receives of each tag posted ahead (`parts.receives_ahead`), before it comes to them in its list, stops
    nobody: then every list can be walked even where a send blocks until its receive is posted.
    """
    result: dict[tuple[str, int], list[Instruction]] = {}
    for i in instructions:
        if i.op in RECEIVES:
            result.setdefault((i.op, i.model_chunk), []).append(i)
    return result


# What a list holds -------------------------------------------------------------------------------------------------------------


def peaks_in_flight(instructions: Sequence[Instruction], chunks: int = 1) -> tuple[InFlight, ...]:
    """The moments of a list that can need most memory: those at which no other moment holds as much of everything."""
    now = [0] * (2 * chunks)
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


def most_in_flight(instructions: Sequence[Instruction]) -> int:
    """The largest number of (micro-batch, chunk)s whose activations are held at once, from F to I or B."""
    chunks = 1 + max((i.model_chunk for i in instructions), default=0)
    return max(
        (sum(moment.activations) for moment in peaks_in_flight(instructions, chunks)), default=0
    )


def run(instructions: Iterable[Instruction], executor: Executor) -> None:
    """Walk the list."""
    for instruction in instructions:
        getattr(executor, instruction.op)(instruction)
