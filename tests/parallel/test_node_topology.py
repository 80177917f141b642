"""Which ranks share a node."""

import zlib

from fugaku_megatron.comm import agreement
from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.comm.solo import SoloComm
from tests.threads import ThreadWorld


def found(names):
    def rank(world):
        nodes = find_nodes(world, names[world.rank])
        return nodes.ranks.all_gather_object(world.rank), nodes.number, nodes.count, nodes.leads

    return ThreadWorld(len(names)).run(rank)


def test_ranks_of_one_name_form_a_node_in_the_order_of_the_world():
    here, there = ([0, 2, 3], 0, 2), ([1, 4], 1, 2)
    assert found(["b", "a", "b", "b", "a"]) == [(*here, True), (*there, True), (*here, False), (*here, False), (*there, False)]


def test_names_of_one_checksum_are_told_apart(monkeypatch):
    monkeypatch.setattr(agreement.zlib, "crc32", lambda name: 7)
    assert zlib.crc32(b"a") == 7
    assert [ranks for ranks, *_ in found(["b", "a", "b"])] == [[0, 2], [1], [0, 2]]


def test_a_process_alone_is_a_node():
    nodes = find_nodes(SoloComm())
    assert (nodes.ranks.size, nodes.count, nodes.number, nodes.leads) == (1, 1, 0, True)
