"""Schedules: exact lists of small cases, and invariants of all lists."""

import functools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import pytest

from fugaku_megatron.pipeline import schedule_names
from fugaku_megatron.pipeline.instruction_lists import send_queue
from fugaku_megatron.pipeline.instructions import (
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
    Instruction,
    peaks_in_flight,
)
from fugaku_megatron.pipeline.placement import Placement
from fugaku_megatron.pipeline.schedule import Schedule, build
from tests.checks.schedules import part_costs

pytestmark = pytest.mark.unit


KINDS = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 5),
    ("zb-h1", 1),
    ("zb-h1", 3),
    ("zbv", 2),
]


FAMILIES = [(name, chunks, stages) for name, chunks in KINDS for stages in (1, 2, 3, 4, 8)]


COSTS = [
    ((6, 7, 5), 0),
    ((6, 12, 5), 0),
    ((3, 1, 1), 0),
    ((6, 7, 5), 50),
]  # that lists are made for, and more of the last part's F


SHORT = {
    "F": FORWARD,
    "B": BACKWARD,
    "I": BACKWARD_INPUT,
    "W": BACKWARD_WEIGHT,
    "rf": RECV_FORWARD,
    "sf": SEND_FORWARD,
    "rb": RECV_BACKWARD,
    "sb": SEND_BACKWARD,
}


LONG = {op: name for name, op in SHORT.items()}


def read(text: str) -> list[Instruction]:
    """Parse "rf0 F0" into [recv_forward of 0, forward of 0]; F0' is model chunk 1."""
    return [
        Instruction(
            SHORT[word.rstrip("0123456789'")], int(word.strip("rsfbFBIW'")), word.count("'")
        )
        for word in text.split()
    ]


def work(instructions: Sequence[Instruction]) -> str:
    """Return the computations of a list in the notation of `read`."""
    return " ".join(
        "".join((LONG[i.op], str(i.microbatch), *repeat("'", i.model_chunk)))
        for i in instructions
        if i.op not in SENDS + RECEIVES
    )


@functools.cache
def schedules(name: str, chunks: int, stages: int) -> list[Schedule]:
    """Return schedules for micro-batches below, at and above the stages, divisible or not, and their evaluation schedules."""
    training = [build(name, stages, chunks, microbatches) for microbatches in (0, 1, 3, 5, 8, 13)]
    if name in schedule_names.splitting_backward():
        training += [
            replace(
                schedule,
                costs=part_costs(schedule.placement.virtual_stages, each, head),
                pending=pending,
            )
            for schedule in training
            for each, head in COSTS
            for pending in {None, stages + 1 if head else None}
        ]
    return [*training, *(schedule.forward_only() for schedule in training)]


@functools.cache
def lists_of(schedule: Schedule) -> list[list[Instruction]]:
    return [schedule.instructions(stage) for stage in range(schedule.placement.stages)]


def made(name: str, stage: int, stages: int, microbatches: int, chunks: int = 1):
    return build(name, stages, chunks, microbatches).instructions(stage)


def forward_only(name: str, stage: int, stages: int, microbatches: int, chunks: int = 1):
    return build(name, stages, chunks, microbatches).forward_only().instructions(stage)


SMALL = [
    *(
        (made("1f1b", stage, stages, microbatches), expected)
        for stage, stages, microbatches, expected in (
            (0, 1, 3, "F0 B0 F1 B1 F2 B2"),
            (2, 3, 1, "rf0 F0 B0 sb0"),
            (0, 4, 1, "F0 sf0 rb0 B0"),
            (1, 4, 0, ""),
            (0, 2, 3, "F0 sf0  F1 sf1 rb0 B0  F2 sf2 rb1 B1  rb2 B2"),
            (1, 2, 3, "rf0 F0 B0 sb0  rf1 F1 B1 sb1  rf2 F2 B2 sb2"),
            (0, 3, 2, "F0 sf0 F1 sf1  rb0 B0 rb1 B1"),
            (
                1,
                3,
                4,
                "rf0 F0 sf0  rf1 F1 sf1 rb0 B0 sb0  rf2 F2 sf2 rb1 B1 sb1  rf3 F3 sf3 rb2 B2 sb2  rb3 B3 sb3",
            ),
        )
    ),
    (
        made("interleaved", 1, 2, 2, chunks=2),
        "rf0 F0 sf0 rf1 F1 sf1  rf0' F0' B0' sb0'  rf1' F1' B1' sb1'  rb0 B0 sb0 rb1 B1 sb1",
    ),
    (
        made("interleaved", 0, 1, 1, chunks=2),
        "F0 F0' B0' B0",
    ),  # no messages where all parts share a stage
    (made("zb-h1", 1, 2, 2), "rf0 F0 I0 sb0 rf1 F1 I1 sb1 W0 W1"),
    (made("zb-h1", 0, 2, 2), "F0 sf0 F1 sf1 rb0 I0 W0 rb1 I1 W1"),
    (
        made("zbv", 1, 2, 1, chunks=2),
        "rf0 F0 F0' sf0' rb0' I0' I0 sb0 W0 W0'",
    ),  # no message at the V's bottom
    (made("zbv", 0, 2, 1, chunks=2), "F0 sf0 rf0' F0' I0' sb0' W0' rb0 I0 W0"),
    (forward_only("1f1b", 0, 1, 2), "F0 F1"),
    (forward_only("1f1b", 0, 2, 2), "F0 sf0 F1 sf1"),
    (forward_only("1f1b", 1, 3, 2), "rf0 F0 sf0 rf1 F1 sf1"),
]


def test_small_cases():
    assert [given for given, expected in SMALL if given != read(expected)] == []
    assert (
        work(made("interleaved", 0, 2, 4, chunks=2))
        == "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"
    )
    assert (
        work(made("interleaved", 0, 2, 3, chunks=2)) == "F0 F1 F0' F1' F2 B0' B1' F2' B0 B1 B2' B2"
    )  # the same without the fourth
    assert work(forward_only("interleaved", 0, 2, 4, chunks=2)) == "F0 F1 F0' F1' F2 F3 F2' F3'"
    assert work(forward_only("zbv", 0, 2, 4, chunks=2)) == "F0 F1 F0' F2 F1' F3 F2' F3'"


def needed(placement: Placement, stage: int, i: Instruction) -> list[Instruction]:
    """Return the instructions that must precede an instruction in the same list; a whole backward is called I."""
    m = i.microbatch
    c = i.model_chunk
    if i.op in RECEIVES:
        return []
    if i.op in SENDS:
        return [Instruction(FORWARD if i.op == SEND_FORWARD else BACKWARD_INPUT, m, c)]
    if i.op == BACKWARD_WEIGHT:
        return [Instruction(BACKWARD_INPUT, m, c)]
    forward = i.op == FORWARD
    source = placement.neighbour(stage, c, -1 if forward else 1)
    first = [] if forward else [Instruction(FORWARD, m, c)]
    if source is None:
        return first
    if source[0] == stage:
        return [*first, Instruction(i.op, m, source[1])]
    return [
        *first,
        Instruction(RECV_FORWARD if forward else RECV_BACKWARD, m, c),
    ]


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_everything_once_after_what_it_needs(name, chunks, stages):
    for schedule in schedules(name, chunks, stages):
        placement = schedule.placement
        evaluates = schedule.name == "forward-only"
        computed = [FORWARD]
        if not evaluates:
            computed.append(BACKWARD_INPUT)
        if schedule.splits_backward:
            computed.append(BACKWARD_WEIGHT)
        for stage, mine in enumerate(lists_of(schedule)):
            assert (
                schedule.splits_backward == any(i.op == BACKWARD_INPUT for i in mine)
                or not schedule.microbatches
            )
            mine = [
                Instruction(BACKWARD_INPUT, i.microbatch, i.model_chunk) if i.op == BACKWARD else i
                for i in mine
            ]
            own = {
                Instruction(op, m, c)
                for op in computed
                for m in range(schedule.microbatches)
                for c in range(placement.model_chunks)
            }
            assert own == {i for i in mine if i.op not in SENDS + RECEIVES} and len(
                set(mine)
            ) == len(mine)
            seen: set[Instruction] = set()
            for i in mine:
                assert set(needed(placement, stage, i)) <= seen, (stage, i)
                seen.add(i)


def simulate(
    placement: Placement,
    lists: list[list[Instruction]],
    ahead: int | None = None,
    queues: list[int] | None = None,
) -> int:
    """Execute all stages with blocking receives; return the most concurrent sends of a stage.

    ahead None: sends do not block; with `queues` a stage with more sends waits until its oldest has been received.
    ahead n: a send blocks until its receive is posted, n receives of the same tag ahead of the receiver's list.
    Fail if no stage can continue, if a message is not the expected one, or if one is never received.
    """
    places = [0] * len(lists)
    most = 0
    sent: dict[tuple, list[int]] = defaultdict(list)  # (sender, receiver, tag) -> micro-batches
    received: dict[tuple, int] = defaultdict(int)
    under_way: list[deque[tuple[tuple, int]]] = [deque() for _ in lists]

    def receive(stage: int, i: Instruction) -> bool:
        other, tag = placement.peer(stage, i)
        channel = (other, stage, tag)
        number = received[other, stage, tag]
        if number == len(sent[channel]):
            return False
        assert sent[channel][number] == i.microbatch, (stage, i)
        received[channel] += 1
        return True

    def free(stage: int) -> bool:
        mine = under_way[stage]
        while mine and mine[0][1] < received[mine[0][0]]:
            mine.popleft()
        if ahead is not None:
            return not mine or mine[-1][1] < received[mine[-1][0]] + ahead
        return queues is None or len(mine) <= queues[stage]

    while any(place < len(mine) for place, mine in zip(places, lists)):
        before = sum(places)
        for stage, mine in enumerate(lists):
            while places[stage] < len(mine) and free(stage):
                i = mine[places[stage]]
                if i.op in RECEIVES and not receive(stage, i):
                    break
                if i.op in SENDS:
                    other, tag = placement.peer(stage, i)
                    under_way[stage].append(((stage, other, tag), len(sent[stage, other, tag])))
                    sent[stage, other, tag].append(i.microbatch)
                    most = max(most, len(under_way[stage]))
                places[stage] += 1
        assert sum(places) > before, (
            f"deadlock: {[mine[place : place + 2] for mine, place in zip(lists, places)]}"
        )
    assert all(len(messages) == received[channel] for channel, messages in sent.items()), (
        "a message was never received"
    )
    return most


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_every_list_can_be_walked_whether_sends_block_or_not(name, chunks, stages):
    """Check also that its send queue never blocks a stage."""
    for schedule in schedules(name, chunks, stages):
        lists = lists_of(schedule)
        queues = [send_queue(schedule, stage) for stage in range(schedule.placement.stages)]
        simulate(schedule.placement, lists, ahead=schedule_names.row(name).receives_ahead)
        under_way = simulate(schedule.placement, lists)
        if (
            schedule.name != "forward-only"
        ):  # where nothing tells that a send is finished, and stages wait
            assert under_way <= max(queues)
        simulate(schedule.placement, lists, queues=queues)


def test_the_send_queue_does_not_grow_with_the_batch():
    for name, chunks in KINDS:
        few, many = (
            [send_queue(build(name, 4, chunks, m), stage) for stage in range(4)] for m in (24, 96)
        )
        assert many == few and max(few) <= 4 * 4 * chunks


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_what_a_stage_holds(name, chunks, stages):
    for schedule in schedules(name, chunks, stages)[:8]:
        p = schedule.placement.stages
        v = schedule.placement.model_chunks
        for stage, mine in enumerate(lists_of(schedule)):
            most = max(
                (sum(h.activations) + sum(h.weight_inputs) for h in peaks_in_flight(mine, v)),
                default=0,
            )
            if schedule.name == "interleaved":
                assert (
                    most <= 2 * (p - stage - 1) + (v - 1) * p + 1
                )  # what Megatron's first forwards and one more hold
            else:
                assert most <= (
                    p - stage if schedule.name == "1f1b" else p * v
                )  # in all, no more than the first stage of 1F1B
