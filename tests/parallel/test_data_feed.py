"""One reader for several ranks: the micro-batches are those that each rank would read itself."""

import pytest
import torch

from fugaku_megatron.comm.agreement import find_nodes
from fugaku_megatron.data import sampler as feed_module
from fugaku_megatron.data.dataset import MockDataset
from fugaku_megatron.data.sampler import ReaderBatches, build_reader_group, micro_batches
from fugaku_megatron.training.train import Trainer, reads_data
from tests.helpers import grid_groups, mock, small_run
from tests.threads import ThreadWorld

DATA = MockDataset(50, 8, 100, 3)


def test_a_reader_serves_the_ranks_of_its_node_that_need_data():
    def rank(world):
        nodes = find_nodes(world, "ab"[world.rank % 2])
        feed = build_reader_group(world, nodes, dp_rank=10 + world.rank, needs_data=world.rank != 2)
        return feed and (feed.dp_ranks, feed.reads)

    assert ThreadWorld(6).run(rank) == [((10, 14), True), ((11, 13, 15), True), None, ((11, 13, 15), False), ((10, 14), False),
                                        ((11, 13, 15), False)]


def test_above_the_limit_a_reader_serves_several_nodes(monkeypatch):
    monkeypatch.setattr(feed_module, "MAX_NODES", 2)

    def rank(world):
        return build_reader_group(world, find_nodes(world, f"node{world.rank}"), world.rank, True).dp_ranks

    assert ThreadWorld(5).run(rank) == [(0, 1, 2)] * 3 + [(3, 4)] * 2


@pytest.mark.parametrize("dp_ranks", [(0, 1, 2), (1, 1, 0)])
def test_what_is_handed_out_is_what_each_rank_would_read(dp_ranks):
    def size(consumed):
        return 12 if consumed < 24 else 24

    def rank(world):
        feed = feed_module.ReaderGroup(world, dp_ranks)
        handout = ReaderBatches(feed, DATA if feed.reads else None, 0, size, 2, 3)
        own = micro_batches(DATA, 0, size, 2, dp_ranks[world.rank], 3)
        try:
            for count in (2, 2, 4, 4):
                handout.begin()
                for _ in range(count):
                    assert all(map(torch.equal, next(handout), next(own)))
                assert next(handout, None) is None  # the next iteration has not begun
        finally:
            handout.close()

    ThreadWorld(3).run(rank)


def test_an_error_of_the_reader_is_raised():
    class Broken(MockDataset):
        def __getitem__(self, index):
            raise ValueError("token id 99")

    def rank(world):
        data = Broken(50, 8, 100, 3) if world.rank == 0 else None
        handout = ReaderBatches(feed_module.ReaderGroup(world, (0, 1)), data, 0, lambda _: 4, 2, 2)
        try:
            handout.begin()
        finally:
            handout.close()

    with pytest.raises(ValueError, match="token id 99"):
        ThreadWorld(2).run(rank)


@pytest.mark.parametrize("changes", [{}, {"pipeline_model_parallel_size": 2}, {"tensor_model_parallel_size": 2}], ids=str)
def test_losses_do_not_depend_on_who_reads(changes):
    run = small_run(num_layers=2, **changes)

    def losses(world, shared):
        torch.set_num_threads(1)
        groups = grid_groups(world, run)
        feed = build_reader_group(world, find_nodes(world, "node"), groups.dp.rank, reads_data(run, groups)) if shared else None
        reads = feed.reads if shared and feed else not shared
        trainer = Trainer(run, world, groups, *((mock(run), mock(run, 8)) if reads else (None, None)), feed=feed)
        try:
            trained = [trainer.train_step().loss for _ in range(2)]
            return [*trained, trainer.evaluate(trainer.valid, 16, 2), trainer.train_step().loss]
        finally:
            trainer.close()

    assert ThreadWorld(4).run(losses, True) == ThreadWorld(4).run(losses, False)
