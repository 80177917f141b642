"""States of lost nodes from copies in the memory of others."""

import shutil

import pytest
from safetensors.torch import load_file

from fugaku_megatron.checkpoint import memory_copy, memory_rebuild
from fugaku_megatron.checkpoint.manifest import file_name, iteration_name, list_iterations
from fugaku_megatron.checkpoint.memory_rebuild import Held, choose
from fugaku_megatron.checkpoint.memory_slot import PARITY
from tests.checks.memory_nodes import Cluster, copy, find, shards
from tests.fault_injection import flip_file_bit

pytestmark = pytest.mark.parallel


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    for module in (memory_copy, memory_rebuild):
        monkeypatch.setattr(module, "PIECE", 1000)


def check_states(cluster, sizes, iteration):
    """Compare the state of every rank on its own node with the one that was copied."""
    for rank in range(len(sizes)):
        path = cluster.folder(rank) / f"rank_{rank:05d}" / iteration_name(iteration)
        expected = {shard.key: shard.tensor for shard in shards(rank, iteration, sizes)}
        found = load_file(path / file_name(rank)) if expected else {}
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in found), rank


SIX = ["a", "a", "b", "b", "c", "c"]
GROUPS = {
    "partners": (["a", "a", "b", "b"], 2, [700, 300, 2500, 0]),
    "three": (SIX, 3, [700, 300, 2500, 0, 100, 900]),
    "three as partners": (SIX, 2, [700, 300, 2500, 0, 100, 900]),
    "four in turn": ([f"n{rank % 4}" for rank in range(8)], 4, [900 for _ in range(8)]),
    "two pairs": (["a", "b", "c", "d"], 2, [1000, 2000, 3000, 4000]),
}


def copied(root, name, *iterations):
    """Copy the states of these iterations; return the cluster and its sizes."""
    places, group, sizes = GROUPS[name]
    cluster = Cluster(root, places)
    copy(cluster, sizes, group, *iterations)
    return cluster, sizes


@pytest.mark.parametrize("name", GROUPS)
def test_any_lost_node_is_computed(tmp_path, name):
    places, _, _ = GROUPS[name]
    for lost in sorted(set(places)):
        cluster, sizes = copied(tmp_path, name, 3, 5)
        cluster.lose(lost)
        found = find(cluster)
        ranks = [rank for rank, place in enumerate(places) if place == lost]
        assert {(each.iteration, tuple(each.lost), each.note) for each in found} == {
            (5, tuple(ranks), "")
        }
        check_states(cluster, sizes, 5)
        cluster.lose(*places)


def test_a_node_of_each_pair_may_be_lost(tmp_path):
    cluster, sizes = copied(tmp_path, "two pairs", 5)
    cluster.lose("b", "c")
    assert find(cluster)[0].lost == [1, 2]
    check_states(cluster, sizes, 5)


def test_two_lost_partners_are_said(tmp_path):
    cluster, _ = copied(tmp_path, "two pairs", 5)
    cluster.lose("a", "b")
    for found in find(cluster):
        assert found.iteration == 0
        assert found.note == (
            "note: --save-memory: the copies of iteration 5 are not complete (rank 0 and a rank of its group are lost), and not used"
        )


def test_a_spare_node_takes_the_place_of_any(tmp_path):
    """The order of nodes changes: the first is lost, so every rank begins on another node."""
    _, sizes = copied(tmp_path, "three", 5)
    shutil.rmtree(tmp_path / "a")
    cluster = Cluster(tmp_path, ["b", "b", "c", "c", "d", "d"])
    found = find(cluster)[0]
    assert found.lost == [0, 1] and sorted(found.moved) == [2, 3, 4, 5]
    assert found.text() == (
        "--save-memory: states of ranks 0, 1 computed from other nodes' copies, states of ranks 2, 3, 4, 5 moved between nodes"
    )
    check_states(cluster, sizes, 5)


def test_a_damaged_copy_counts_as_lost(tmp_path):
    cluster, sizes = copied(tmp_path, "partners", 3, 5)
    path = cluster.folder(2) / "rank_00002" / "iter_0000005"
    flip_file_bit(path / file_name(2))
    found = find(cluster)[0]
    assert (found.iteration, found.lost) == (5, [2])
    check_states(cluster, sizes, 5)


def test_an_older_copy_is_used_if_the_newest_is_not_complete(tmp_path):
    cluster, sizes = copied(tmp_path, "partners", 3, 5)
    for rank in (0, 2):
        path = cluster.folder(rank) / f"rank_{rank:05d}" / "iter_0000005"
        path.rename(path.with_name("12345678.iter_0000005.tmp"))
    found = find(cluster)[0]
    assert (found.iteration, found.lost) == (3, []) and "copies of iteration 5" in found.note
    check_states(cluster, sizes, 3)
    assert list_iterations(cluster.folder(1) / "rank_00001") == [3]


def test_a_state_without_parity_protects_no_other(tmp_path):
    cluster, _ = copied(tmp_path, "two pairs", 5)
    cluster.lose("b")
    assert find(cluster)[0].lost == [1]
    assert not (cluster.folder(1) / "rank_00001" / "iter_0000005" / PARITY).exists()
    cluster.lose("a")
    assert find(cluster)[0].iteration == 0
    copied(tmp_path, "two pairs", 7)
    cluster.lose("a")
    assert find(cluster)[0].lost == [0]


def test_copies_of_two_starts_are_not_mixed(tmp_path):
    """Both have iteration 5, and each lacks a pair."""
    cluster, _ = copied(tmp_path, "two pairs", 5)
    for rank in (2, 3):
        shutil.move(cluster.folder(rank), tmp_path / f"kept{rank}")
    cluster.lose("a", "b")
    copied(tmp_path, "two pairs", 5)
    for rank in (2, 3):
        shutil.rmtree(cluster.folder(rank))
        shutil.move(tmp_path / f"kept{rank}", cluster.folder(rank))
    assert find(cluster)[0].iteration == 0


def version(iteration, *ranks, group=(0, 1), attempt=1, holder=None):
    return [
        Held(
            iteration,
            attempt,
            rank,
            group=group,
            sizes=(),
            holder=rank if holder is None else holder,
        )
        for rank in ranks
    ]


@pytest.mark.parametrize(
    ("held", "expected", "lost", "missing"),
    [
        ([], (0, 0), [0, 1], []),
        (version(2, 0, 1) + version(4, 0, 1), (4, 1), [], []),
        (version(2, 0, 1) + version(4, 1), (4, 1), [0], []),
        (version(2, 0, 1) + version(4, 1, group=()), (2, 1), [], [0]),
        (version(4, 0) + version(4, 1, attempt=2), (4, 2), [0], []),
        (version(4, 0, group=(0, 2)), (0, 0), [0, 1], [1]),
    ],
)
def test_the_newest_from_which_every_rank_can_continue(held, expected, lost, missing):
    found, without = choose(held, [0, 1])
    assert (found.version, found.lost, without) == (expected, lost, missing)


def test_a_copy_on_the_node_of_its_rank_is_preferred():
    held = version(4, 0, 1) + version(4, 0, holder=1)
    for order in (held, held[::-1]):
        found, _ = choose(order, [0, 1])
        assert found.copies[0].holder == 0 and found.is_whole
