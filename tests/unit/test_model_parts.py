"""Where the parts of a model are, and which messages their stages exchange."""

from __future__ import annotations

import pytest

from fugaku_megatron.pipeline.parts import (
    LOOP,
    NAMES,
    RECV_BACKWARD,
    RECV_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    Instruction,
    Placement,
    V,
    placement_of,
)

PLACEMENTS = [*(Placement(p, v) for p in (1, 2, 3, 8) for v in (1, 2, 5)), *(Placement(p, 2, V) for p in (1, 2, 3, 8))]


def test_loop_and_v():
    assert [[Placement(3, 2).part(stage, chunk) for chunk in range(2)] for stage in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [[Placement(3, 2, V).part(stage, chunk) for chunk in range(2)] for stage in range(3)] == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_owner_inverts_part_and_neighbours_follow_the_model(placement):
    owned = {(stage, chunk): placement.part(stage, chunk) for stage in range(placement.stages) for chunk in range(placement.chunks)}
    assert sorted(owned.values()) == list(range(placement.parts))
    for (stage, chunk), part in owned.items():
        assert placement.owner(part) == (stage, chunk)
        after, before = (placement.neighbour(stage, chunk, step) for step in (1, -1))
        assert owned.get(after) == (part + 1 if part + 1 < placement.parts else None)
        assert owned.get(before) == (part - 1 if part else None)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_both_ends_of_a_message_agree_and_no_two_kinds_share_a_tag(placement):
    tags = []
    for part in range(placement.parts - 1):
        (above, chunk_above), (below, chunk_below) = placement.owner(part), placement.owner(part + 1)
        for send, receive, source, target in ((SEND_FORWARD, RECV_FORWARD, (above, chunk_above), (below, chunk_below)),
                                              (SEND_BACKWARD, RECV_BACKWARD, (below, chunk_below), (above, chunk_above))):
            to, tag = placement.peer(source[0], Instruction(send, 0, source[1]))
            assert to == target[0] and placement.peer(target[0], Instruction(receive, 0, target[1])) == (source[0], tag)
            tags.append(tag)
    assert len(set(tags)) == len(tags)


def test_a_v_turns_on_the_last_stage_and_ends_where_it_began():
    assert Placement(4, 2, V).neighbour(3, 0, 1) == (3, 1)
    assert Placement(4, 2, V).owner(0)[0] == Placement(4, 2, V).owner(7)[0] == 0
    with pytest.raises(AssertionError):
        Placement(4, 3, V)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_forward_slots_follow_the_model_and_never_meet(placement):
    slots = {(m, part): placement.forward_slot(m, part) for m in range(20) for part in range(placement.parts)}
    assert all(slots[m, part] < slots[m, part + 1] for m in range(20) for part in range(placement.parts - 1))
    for stage in range(placement.stages):
        own = [slots[m, placement.part(stage, chunk)] for m in range(20) for chunk in range(placement.chunks)]
        assert len(set(own)) == len(own)


def test_the_placement_of_each_schedule():
    assert [placement_of(name, 4, {"interleaved": 3, "zbv": 2}.get(name, 1)).kind for name in NAMES] == [LOOP, LOOP, LOOP, V]
    with pytest.raises(AssertionError):
        placement_of("1f1b", 4, 2)
