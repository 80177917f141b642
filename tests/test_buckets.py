"""Gradient buckets: how a stage is cut into them, where they lie, and checkpoints whose shards were cut elsewhere."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.dry import DryComm
from fugaku_megatron.comm.local import ThreadWorld
from fugaku_megatron.run.accounting import Layout
from fugaku_megatron.run.arguments import make_run
from fugaku_megatron.run.buckets import bucket_elements, bucket_minimum, cut, stage_units
from fugaku_megatron.training import flat
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, make_trainer, small_run

TP2PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
LAYOUTS = {"one": (1, {}), "pp2": (2, {"pipeline_model_parallel_size": 2}), "pp4": (4, {"pipeline_model_parallel_size": 4}),
           "tp2dp2": (4, {"tensor_model_parallel_size": 2}), "tp2pp2dp2": (8, TP2PP2)}
BUCKETS = {"overlap_grad_reduce": True, "ddp_bucket_size": 20_000}  # a layer has 12,704 elements


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize(("units", "minimum", "tied", "buckets"), [
    ([1, 5, 5, 3], None, False, [[0, 1, 2, 3]]), ([1, 5, 5, 3], None, True, [[0, 1, 2, 3]]),
    ([1, 5, 5, 3], 6, False, [[0, 1], [2, 3]]), ([1, 5, 5, 3], 7, False, [[0, 1, 2], [3]]),
    ([1, 5, 5, 3], 1, False, [[0], [1], [2], [3]]), ([1, 5, 5, 3], 100, False, [[0, 1, 2, 3]]),
    ([1, 5, 5, 3], 100, True, [[0, 1, 2], [3]]), ([1, 5, 5, 3], 6, True, [[0, 1], [2], [3]]), ([4], 1, True, [[0]]),
])
def test_a_bucket_is_as_few_units_as_reach_the_minimum(units, minimum, tied, buckets):
    assert [list(bucket) for bucket in cut(units, minimum, tied)] == buckets


def test_the_smallest_bucket_is_megatrons():
    assert bucket_minimum(small_run(), 8) is None
    assert bucket_minimum(small_run(overlap_grad_reduce=True), 8) == 40_000_000
    assert bucket_minimum(small_run(overlap_grad_reduce=True), 64) == 64_000_000
    assert bucket_minimum(small_run(overlap_grad_reduce=True, ddp_bucket_size=5), 64) == 5


def test_buckets_of_gpt2():
    """A layer of 124M has 7.1 M parameters, the embeddings 39.4 M."""
    run = make_run("124m", {"overlap_grad_reduce": True, "make_vocab_size_divisible_by": 128, "vocab_size": 50257})
    assert [round(n / 1e6, 1) for n in bucket_elements(run, Layout.from_run(run, 8), 0)] == [42.5, 42.5, 39.4]


@pytest.mark.parametrize("changes", [{}, BUCKETS])
@pytest.mark.parametrize("name", LAYOUTS)
def test_buckets_lie_where_the_formula_says(name, changes):
    ranks, layout = LAYOUTS[name]
    run = small_run(**layout, **changes)
    for rank in range(ranks):
        comm = DryComm(rank, ranks)
        trainer = Trainer(run, comm, grid_groups(comm, run))
        buffer, stage = trainer.optimizer.flat, trainer.groups.pp.rank
        assert [b.end - b.start for b in buffer.buckets] == bucket_elements(run, trainer.layout, stage)
        assert [sum(p.numel() for p in unit) for unit in flat.stage_units(trainer.stage)] == stage_units(run, trainer.layout, stage)
        names = [[p.spec.name for p, start in zip(buffer.parameters, buffer.starts) if b.start <= start < b.end]
                 for b in buffer.buckets]
        if changes and trainer.layout.pp > 1 and (trainer.stage.is_first or trainer.stage.is_last):
            assert names[-1] == [trainer.stage.tied_weight.spec.name], "the tied embedding waits for the other stage alone"
        layers = [[int(n.split(".")[2]) for n in bucket if ".layers." in n] for bucket in names]
        assert all(min(a) > max(b) for a, b in zip(layers, layers[1:]) if a and b), "the last layers come first"


@pytest.mark.parametrize(("saved", "loaded"), [({}, BUCKETS), (BUCKETS, {}), (BUCKETS, {**BUCKETS, "ddp_bucket_size": 1})],
                         ids=["one-many", "many-one", "many-more"])
def test_a_checkpoint_loads_whatever_the_buckets_were(saved, loaded, tmp_path):
    """ZeRO-1 cuts its shards inside buckets, so a shard may lie in the files of several ranks."""
    def save_and_load(world) -> None:
        run = {"zero_stage": 1, "bf16": True, "tensor_model_parallel_size": 2, "max_position_embeddings": 512}
        trainers = [make_trainer(world, small_run(**run, **changes)) for changes in (saved, loaded)]
        trainers[0].train_step()
        trainers[0].save(str(tmp_path))
        trainers[1].load(str(tmp_path))
        results = [[(r.loss, r.grad_norm) for r in (t.train_step() for _ in range(2))] for t in trainers]
        assert results[0] == results[1]
        for trainer in trainers:
            trainer.close()

    ThreadWorld(8).run(save_and_load)
