"""Objects handed out by rank 0."""

import pytest

from fugaku_megatron.comm.agreement import scatter_object
from fugaku_megatron.comm.solo import SoloComm
from tests.threads import ThreadWorld


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_its_own_object(size):
    objects = [{"rank": rank, "values": list(range(rank))} for rank in range(size)]
    results = ThreadWorld(size).run(lambda comm: scatter_object(comm, objects if comm.rank == 0 else None))
    assert results == objects


def test_objects_of_following_calls_stay_apart():
    def rank(comm):
        return [scatter_object(comm, [f"{i} for {r}" for r in range(3)] if comm.rank == 0 else None) for i in range(4)]

    assert ThreadWorld(3).run(rank) == [[f"{i} for {rank}" for i in range(4)] for rank in range(3)]


def test_a_rank_that_pretends_gets_nothing():
    assert scatter_object(SoloComm(3, 8), None) is None
    assert scatter_object(SoloComm(0, 8), list("abcdefgh")) == "a"


def test_a_missing_object_is_our_mistake():
    with pytest.raises(AssertionError):
        scatter_object(SoloComm(0, 8), ["a"])
