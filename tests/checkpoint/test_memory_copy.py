"""Copies in the memory of other nodes: groups, parity, and the newest complete copy."""

import pytest

from fugaku_megatron.checkpoint import memory_copy
from fugaku_megatron.checkpoint.manifest import Description, file_name, list_iterations, read_head
from fugaku_megatron.checkpoint.memory_copy import MemoryCopies, group_of, node_groups
from fugaku_megatron.checkpoint.memory_slot import PARITY, Protection
from fugaku_megatron.checkpoint.save import BackgroundSave, run_steps
from tests.checks.memory_nodes import Cluster, copy, shards
from tests.helpers import one_error
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize(
    ("nodes", "size", "sizes"),
    [(2, 2, [2]), (4, 2, [2, 2]), (5, 2, [2, 3]), (3, 2, [3]), (7, 3, [3, 4]), (9, 4, [4, 5])],
)
def test_nodes_are_divided_into_groups(nodes, size, sizes):
    groups = node_groups(nodes, size)
    assert [len(group) for group in groups] == sizes
    assert [node for group in groups for node in group] == list(range(nodes))


def test_a_group_has_one_rank_of_each_of_its_nodes(tmp_path):
    cluster = Cluster(tmp_path, [f"n{rank % 4}" for rank in range(8)])

    def rank(world):
        return group_of(world, cluster.nodes(world), 2).all_gather_object(world.rank)

    assert ThreadWorld(8).run(rank) == [
        [0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]
    ]  # fmt: skip


def held(cluster, rank, iteration, name):
    path = cluster.folder(rank) / f"rank_{rank:05d}" / f"iter_{iteration:07d}" / name
    return path.read_bytes() if path.exists() else b""


def test_parity_of_three_takes_half_of_a_state(tmp_path):
    cluster = Cluster(tmp_path, ["a", "b", "c"])
    copy(cluster, [3000, 1000, 0], 3, 4)
    sizes = tuple(len(held(cluster, rank, 4, file_name(rank))) for rank in range(3))
    parities = {len(held(cluster, rank, 4, PARITY)) for rank in range(3)}
    assert sizes[2] == 0 and parities == {-(-sizes[0] // 2)}
    protection = Protection.of(read_head(cluster.folder(1) / "rank_00001", 4))
    assert protection.group == (0, 1, 2) and protection.sizes == sizes


def copies_of(cluster, world, **more):
    folder = cluster.folder(world.rank)
    return MemoryCopies(folder, world, cluster.nodes(world), size=2, run="run", **more)


def test_the_newest_complete_copy_stays_until_the_next_is_complete(tmp_path):
    cluster = Cluster(tmp_path, ["a", "b"])

    def rank(world):
        copies = copies_of(cluster, world)
        folder = cluster.folder(world.rank)
        own = folder / f"rank_{world.rank:05d}"
        seen = []
        for iteration in (2, 4, 6, 8):
            description = Description(iteration, {}, {}, {})
            steps = copies.steps(shards(world.rank, iteration, [500, 500]), description)
            work = next(steps)
            seen.append(list_iterations(own))
            world.barrier()
            outcome = work()
            with pytest.raises(StopIteration):
                steps.send(lambda result=outcome: result)
            seen.append(list_iterations(own))
        assert len(list(own.iterdir())) == 2
        copies.remove()
        assert not folder.exists()
        return seen

    for seen in ThreadWorld(2).run(rank):
        assert seen == [[], [2], [2], [2, 4], [4], [4, 6], [6], [6, 8]]


def test_training_may_change_the_state_while_it_is_sent(tmp_path):
    cluster = Cluster(tmp_path, ["a", "b"])

    def rank(world):
        copies = copies_of(cluster, world)
        own = shards(world.rank, 2, [5000, 5000])
        saving = BackgroundSave(copies.steps(own, Description(2, {}, {}, {})))
        for shard in own:
            shard.tensor.zero_()
        world.barrier()  # a rank that is a thread waits for work of the others
        saving.finish()

    ThreadWorld(2).run(rank)
    other = Cluster(tmp_path / "b", ["c", "d"])
    copy(other, [5000, 5000], 2, 2)
    for rank in range(2):
        for name in (file_name(rank), PARITY):
            assert held(cluster, rank, 2, name) == held(other, rank, 2, name)


def test_copies_that_the_run_does_not_continue_from_are_removed(tmp_path):
    cluster = Cluster(tmp_path, ["a", "b"])
    copy(cluster, [50, 50], 2, 4, 6)

    def rank(world):
        copies_of(cluster, world, iteration=4)
        return list_iterations(cluster.folder(world.rank) / f"rank_{world.rank:05d}")

    assert ThreadWorld(2).run(rank) == [[4], [4]]


def test_a_full_memory_is_one_line_on_all_ranks(tmp_path, monkeypatch):
    cluster = Cluster(tmp_path, ["a", "b"])
    take = memory_copy.Slot.begin

    def begin(slot, iteration, own):
        if slot.rank == 1:
            raise OSError(28, "No space left on device", str(slot.folder))
        take(slot, iteration, own)

    monkeypatch.setattr(memory_copy.Slot, "begin", begin)

    def rank(world):
        copies = copies_of(cluster, world)
        run_steps(copies.steps(shards(world.rank, 2, [5, 5]), Description(2, {}, {}, {})))

    message = one_error(2, rank)
    assert message.startswith("--save-memory: iteration 2 is not copied: rank 1: ")
    assert "No space left" in message and "omit --save-memory" in message
