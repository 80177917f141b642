"""The lists themselves: exact for small cases, and what must hold for every number of stages, chunks and micro-batches."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fugaku_megatron.pipeline.parts import (
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
    SPLITS_BACKWARD,
    Held,
    Instruction,
    PartCosts,
    Placement,
    SplitCosts,
    receives_ahead,
)
from fugaku_megatron.pipeline.schedule import (
    Schedule,
    build,
    forward_only,
    held,
    in_flight,
    interleaved,
    one_f_one_b,
    receives,
    run,
    zb_h1,
    zbv,
)

CASES = [(stages, microbatches) for stages in (1, 2, 3, 4, 5, 8, 16) for microbatches in (0, 1, 2, 3, 4, 5, 7, 8, 16, 33)]
KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 5), ("zb-h1", 1), ("zb-h1", 3), ("zbv", 2)]
FAMILIES = [(name, chunks, stages) for name, chunks in KINDS for stages in (1, 2, 3, 4, 8)]
COSTS = [((6, 7, 5), 0), ((6, 12, 5), 0), ((3, 1, 1), 0), ((6, 7, 5), 50)]  # that lists are made for, and more of the last part's F
SHORT = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD_INPUT, "W": BACKWARD_WEIGHT, "rf": RECV_FORWARD, "sf": SEND_FORWARD,
         "rb": RECV_BACKWARD, "sb": SEND_BACKWARD}
LONG = {op: name for name, op in SHORT.items()}


def read(text: str) -> list[Instruction]:
    """ "rf0 F0" -> [recv_forward of 0, forward of 0]; F0' is chunk 1."""
    return [Instruction(SHORT[word.rstrip("0123456789'")], int(word.strip("rsfbFBIW'")), word.count("'")) for word in text.split()]


def work(instructions: Sequence[Instruction]) -> str:
    """The computations of a list, as `read` reads them."""
    return " ".join(LONG[i.op] + str(i.microbatch) + "'" * i.chunk for i in instructions if i.op not in SENDS + RECEIVES)


def schedules(name: str, chunks: int, stages: int) -> list[Schedule]:
    """For numbers of micro-batches below, at and above the stages, that divide and that do not; then the same of an evaluation."""
    training = [build(name, stages, chunks, microbatches) for microbatches in (0, 1, 2, 3, 5, 7, 8, 13)]
    if name in SPLITS_BACKWARD:
        training += [replace(schedule, costs=part_costs(schedule.placement.parts, each, head), pending=pending)
                     for schedule in training for each, head in COSTS for pending in {None, stages + 1 if head else None}]
    return [*training, *(schedule.forward_only() for schedule in training)]


def part_costs(parts: int, each: SplitCosts, head: int) -> PartCosts:
    return *(each,) * (parts - 1), (each[0] + head, *each[1:])


def lists_of(schedule: Schedule) -> list[list[Instruction]]:
    return [schedule.instructions(stage) for stage in range(schedule.placement.stages)]


@pytest.mark.parametrize(("stage", "stages", "microbatches", "expected"), [
    (0, 1, 3, "F0 B0 F1 B1 F2 B2"),
    (0, 2, 3, "F0 sf0  F1 sf1 rb0 B0  F2 sf2 rb1 B1  rb2 B2"),
    (1, 2, 3, "rf0 F0 B0 sb0  rf1 F1 B1 sb1  rf2 F2 B2 sb2"),
    (0, 3, 2, "F0 sf0 F1 sf1  rb0 B0 rb1 B1"),
    (1, 3, 4, "rf0 F0 sf0  rf1 F1 sf1 rb0 B0 sb0  rf2 F2 sf2 rb1 B1 sb1  rf3 F3 sf3 rb2 B2 sb2  rb3 B3 sb3"),
    (2, 3, 1, "rf0 F0 B0 sb0"),
    (0, 4, 1, "F0 sf0 rb0 B0"),
    (1, 4, 0, ""),
])
def test_small_cases_of_1f1b(stage, stages, microbatches, expected):
    assert one_f_one_b(stage, stages, microbatches) == read(expected)


def test_small_cases_of_the_others():
    assert interleaved(1, 2, 2, 2) == read("rf0 F0 sf0 rf1 F1 sf1  rf0' F0' B0' sb0'  rf1' F1' B1' sb1'  rb0 B0 sb0 rb1 B1 sb1")
    assert work(interleaved(0, 2, 2, 4)) == "F0 F1 F0' F1' F2 B0' F3 B1' F2' B0 F3' B1 B2' B3' B2 B3"
    assert work(interleaved(0, 2, 2, 3)) == "F0 F1 F0' F1' F2 B0' B1' F2' B0 B1 B2' B2"  # the same without the fourth
    assert interleaved(0, 1, 2, 1) == read("F0 F0' B0' B0")  # no messages where all parts share a stage
    assert zb_h1(1, 2, 2) == read("rf0 F0 I0 sb0 rf1 F1 I1 sb1 W0 W1")
    assert zb_h1(0, 2, 2) == read("F0 sf0 F1 sf1 rb0 I0 W0 rb1 I1 W1")
    assert zbv(1, 2, 1) == read("rf0 F0 F0' sf0' rb0' I0' I0 sb0 W0 W0'")  # the bottom of the V hands over without a message
    assert zbv(0, 2, 1) == read("F0 sf0 rf0' F0' I0' sb0' W0' rb0 I0 W0")


@pytest.mark.parametrize(("stages", "microbatches"), CASES)
def test_1f1b_is_in_order_and_holds_little(stages, microbatches):
    for stage in range(stages):
        instructions = one_f_one_b(stage, stages, microbatches)
        order = {op: [i.microbatch for i in instructions if i.op == op] for op in SHORT.values()}
        assert order[FORWARD] == order[BACKWARD] == list(range(microbatches))
        assert in_flight(instructions) == min(stages - stage, microbatches)


def needed(placement: Placement, stage: int, i: Instruction) -> list[Instruction]:
    """What must stand before an instruction in the same list; a whole backward is called I."""
    m, c = i.microbatch, i.chunk
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
    return [*first, Instruction(RECV_FORWARD if forward else RECV_BACKWARD, m, c)]


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_everything_once_after_what_it_needs(name, chunks, stages):
    for schedule in schedules(name, chunks, stages):
        placement, evaluates = schedule.placement, schedule.name == "forward-only"
        computed = [FORWARD] + [BACKWARD_INPUT] * (not evaluates) + [BACKWARD_WEIGHT] * schedule.splits_backward
        for stage, mine in enumerate(lists_of(schedule)):
            assert schedule.splits_backward == any(i.op == BACKWARD_INPUT for i in mine) or not schedule.microbatches
            mine = [Instruction(BACKWARD_INPUT, i.microbatch, i.chunk) if i.op == BACKWARD else i for i in mine]
            own = {Instruction(op, m, c) for op in computed for m in range(schedule.microbatches) for c in range(placement.chunks)}
            assert own == {i for i in mine if i.op not in SENDS + RECEIVES} and len(set(mine)) == len(mine)
            seen: set[Instruction] = set()
            for i in mine:
                assert set(needed(placement, stage, i)) <= seen, (stage, i)
                seen.add(i)


def simulate(placement: Placement, lists: list[list[Instruction]], ahead: int | None = None,
             queues: list[int] | None = None) -> int:
    """Walk all stages with blocking receives; returns the most sends that a stage had under way.

    ahead None: sends do not block; but with `queues` a stage with more sends under way waits until its oldest has been received.
    ahead n: a send blocks until its receive is posted, which the receiver does n receives of the same tag ahead of its list.
    Fails when no stage can go on, when a message is not the one that the receiver expects, or when one is never received.
    """
    places, most = [0] * len(lists), 0
    sent: dict[tuple, list[int]] = defaultdict(list)  # (sender, receiver, tag) -> micro-batches
    received: dict[tuple, int] = defaultdict(int)
    under_way: list[deque[tuple[tuple, int]]] = [deque() for _ in lists]

    def receive(stage: int, i: Instruction) -> bool:
        other, tag = placement.peer(stage, i)
        channel, number = (other, stage, tag), received[other, stage, tag]
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
        assert sum(places) > before, f"deadlock: {[mine[place:place + 2] for mine, place in zip(lists, places)]}"
    assert all(len(messages) == received[channel] for channel, messages in sent.items()), "a message was never received"
    return most


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_every_list_can_be_walked_whether_sends_block_or_not(name, chunks, stages):
    for schedule in schedules(name, chunks, stages):
        simulate(schedule.placement, lists_of(schedule))
        simulate(schedule.placement, lists_of(schedule), ahead=receives_ahead(name))


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_messages_of_a_tag_follow_the_order_of_the_microbatches(name, chunks, stages):
    for schedule in schedules(name, chunks, stages):
        for stage, mine in enumerate(lists_of(schedule)):
            by_tag = defaultdict(list)
            for i in mine:
                if i.op in SENDS + RECEIVES:
                    by_tag[i.op, schedule.placement.peer(stage, i)].append(i.microbatch)
            assert all(messages == list(range(schedule.microbatches)) for messages in by_tag.values())
            posted = {(i.op, i.chunk) for i in mine if i.op in RECEIVES}
            assert {tag: [i.microbatch for i in found] for tag, found in receives(mine).items()} == dict.fromkeys(
                posted, list(range(schedule.microbatches)))


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_the_send_queue_of_a_list_never_stops_a_stage(name, chunks, stages):
    for schedule in schedules(name, chunks, stages):
        queues = [schedule.send_queue(stage) for stage in range(schedule.placement.stages)]
        if schedule.name != "forward-only":  # where nothing tells that a send is finished, and stages wait
            assert simulate(schedule.placement, lists_of(schedule)) <= max(queues)
        simulate(schedule.placement, lists_of(schedule), queues=queues)


def test_the_send_queue_does_not_grow_with_the_batch():
    for name, chunks in KINDS:
        few, many = ([build(name, 4, chunks, m).send_queue(stage) for stage in range(4)] for m in (24, 96))
        assert many == few and max(few) <= 4 * 4 * chunks


def test_the_simulation_finds_deadlocks_and_crossed_messages():
    lists = [one_f_one_b(stage, 2, 2) for stage in range(2)]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate(Placement(2), [read("rb0 F0 sf0 B0"), lists[1]])
    with pytest.raises(AssertionError):
        simulate(Placement(2), [lists[0], read("rf1 F1 B1 sb1 rf0 F0 B0 sb0")])
    with pytest.raises(AssertionError, match="deadlock"):  # blocking sends need receives that are posted ahead
        simulate(Placement(2), [one_f_one_b(stage, 2, 3) for stage in range(2)], ahead=0)


def test_forward_only():
    assert forward_only(0, 1, 2) == read("F0 F1")
    assert forward_only(0, 2, 2) == read("F0 sf0 F1 sf1")
    assert forward_only(1, 3, 2) == read("rf0 F0 sf0 rf1 F1 sf1")
    assert work(forward_only(0, 2, 4, 2)) == "F0 F1 F0' F1' F2 F3 F2' F3'"
    assert work(forward_only(0, 2, 4, 2, "v")) == "F0 F1 F0' F2 F1' F3 F2' F3'"


def test_held():
    assert held(read("F0 F1 B0 F2 B1 B2")) == (Held((2,), (0,)),)
    assert set(held(read("F0 F1 I0 I1 W0 W1"))) == {Held((2,), (0,)), Held((1,), (1,)), Held((0,), (2,))}
    assert set(held(read("F0 F0' B0' B0 F1"), 2)) == {Held((1, 1), (0, 0))}
    assert held([]) == () and in_flight([]) == 0
    assert in_flight(read("F0 F1 F0' I0' W0' I0 W0 I1 W1")) == 3


@pytest.mark.parametrize(("name", "chunks", "stages"), FAMILIES)
def test_what_a_stage_holds(name, chunks, stages):
    for schedule in schedules(name, chunks, stages)[:8]:
        p, v = schedule.placement.stages, schedule.placement.chunks
        for stage, mine in enumerate(lists_of(schedule)):
            most = max((sum(h.activations) + sum(h.weight_inputs) for h in held(mine, v)), default=0)
            if schedule.name == "interleaved":
                assert most <= 2 * (p - stage - 1) + (v - 1) * p + 1  # what Megatron's first forwards and one more hold
            else:
                assert most <= (p - stage if schedule.name == "1f1b" else p * v)  # in all, no more than the first stage of 1F1B


def test_run_walks_the_list():
    class Executor:
        def __init__(self):
            self.calls = []

        def __getattr__(self, op):
            return lambda instruction: self.calls.append((op, instruction))

    instructions, executor = one_f_one_b(1, 3, 4), Executor()
    run(instructions, executor)
    assert executor.calls == [(i.op, i) for i in instructions]
