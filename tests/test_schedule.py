"""The 1F1B lists themselves: exact for small cases, and what must hold for every number of stages and micro-batches."""

from __future__ import annotations

from collections import Counter, defaultdict, deque

import pytest

from fugaku_megatron.schedule import (
    BACKWARD,
    FORWARD,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Instruction,
    forward_only,
    in_flight,
    max_in_flight,
    one_f_one_b,
    run,
)

CASES = [(stages, microbatches) for stages in (1, 2, 3, 4, 5, 8, 16) for microbatches in (0, 1, 2, 3, 4, 5, 7, 8, 16, 33)]
SHORT = {"F": FORWARD, "B": BACKWARD, "rf": RECV_FORWARD, "sf": SEND_FORWARD, "rb": RECV_BACKWARD, "sb": SEND_BACKWARD}


def read(text: str) -> list[Instruction]:
    """ "rf0 F0" -> [recv_forward of 0, forward of 0]."""
    return [Instruction(SHORT[word.rstrip("0123456789")], int(word.lstrip("rsfbFB"))) for word in text.split()]


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
def test_small_cases(stage, stages, microbatches, expected):
    assert one_f_one_b(stage, stages, microbatches) == read(expected)


@pytest.mark.parametrize(("stages", "microbatches"), CASES)
def test_every_microbatch_once_in_order_and_few_in_flight(stages, microbatches):
    for stage in range(stages):
        instructions = one_f_one_b(stage, stages, microbatches)
        order = {op: [i.microbatch for i in instructions if i.op == op] for op in SHORT.values()}
        whole = list(range(microbatches))
        assert order[FORWARD] == order[BACKWARD] == whole
        assert order[RECV_FORWARD] == order[SEND_BACKWARD] == (whole if stage > 0 else [])
        assert order[SEND_FORWARD] == order[RECV_BACKWARD] == (whole if stage < stages - 1 else [])
        at = {(i.op, i.microbatch): n for n, i in enumerate(instructions)}
        assert len(at) == len(instructions)
        for m in whole:
            needed = [RECV_FORWARD, FORWARD, SEND_FORWARD, RECV_BACKWARD, BACKWARD, SEND_BACKWARD]
            places = [at[op, m] for op in needed if (op, m) in at]
            assert places == sorted(places), (stage, m)
        assert in_flight(instructions) == min(stages - stage, microbatches) == max_in_flight(stage, stages, microbatches)


def simulate(lists: list[list[Instruction]]) -> int:
    """Walk all stages with blocking receives and nonblocking sends; returns the most sends a stage had under way.

    Fails when no stage can go on, or when a message is not the one that the receiver expects.
    """
    queues, todo, under_way, most = defaultdict(deque), [deque(x) for x in lists], Counter(), 0
    target = {SEND_FORWARD: 1, SEND_BACKWARD: -1, RECV_FORWARD: -1, RECV_BACKWARD: 1}
    while any(todo):
        moved = False
        for stage, mine in enumerate(todo):
            while mine:
                i = mine[0]
                other = stage + target.get(i.op, 0)
                if i.op in (SEND_FORWARD, SEND_BACKWARD):
                    queues[stage, other].append((i.op, i.microbatch))
                    under_way[stage] += 1
                    most = max(most, under_way[stage])
                elif i.op in (RECV_FORWARD, RECV_BACKWARD):
                    if not queues[other, stage]:
                        break
                    sent = queues[other, stage].popleft()
                    assert sent == (i.op.replace("recv", "send"), i.microbatch), (stage, sent, i)
                    under_way[other] -= 1
                moved = bool(mine.popleft())
        assert moved, f"deadlock: {[list(x)[:2] for x in todo]}"
    assert not any(queues.values()), "a message was never received"
    return most


@pytest.mark.parametrize(("stages", "microbatches"), CASES)
def test_neighbours_match_and_nothing_deadlocks(stages, microbatches):
    # `step` waits for the oldest send when more than 2 x stages are under way: that must never be needed to go on.
    assert simulate([one_f_one_b(stage, stages, microbatches) for stage in range(stages)]) <= 2 * stages
    simulate([forward_only(stage, stages, microbatches) for stage in range(stages)])


def test_the_simulation_finds_deadlocks_and_crossed_messages():
    lists = [one_f_one_b(stage, 2, 2) for stage in range(2)]
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([read("rb0 F0 sf0 B0"), lists[1]])
    with pytest.raises(AssertionError):
        simulate([lists[0], read("rf1 F1 B1 sb1 rf0 F0 B0 sb0")])


def test_forward_only():
    assert forward_only(0, 1, 2) == read("F0 F1")
    assert forward_only(0, 2, 2) == read("F0 sf0 F1 sf1")
    assert forward_only(1, 3, 2) == read("rf0 F0 sf0 rf1 F1 sf1")


def test_run_walks_the_list():
    class Executor:
        def __init__(self):
            self.calls = []

        def __getattr__(self, op):
            return lambda instruction: self.calls.append((op, instruction))

    instructions, executor = one_f_one_b(1, 3, 4), Executor()
    run(instructions, executor)
    assert executor.calls == [(i.op, i) for i in instructions]
