"""Weights of data-parallel replicas, compared bit by bit."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.training.checksums import differing_replica, parameter_hashes
from tests.helpers import make_trainer, small_run
from tests.threads import ThreadWorld

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
OVERLAP = {"zero_stage": 1, "overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 1}


def compared(world, layout, flips) -> str | None:
    """What is found after a step, bits having flipped on some ranks: rank -> (layer of the stage, bit)."""
    torch.set_num_threads(1)
    trainer = make_trainer(world, small_run(num_layers=2, **layout))
    trainer.train_step()
    assert differing_replica(trainer) is None, "healthy replicas agree"
    trainer.train_step()
    if world.rank in flips:
        layer, bit = flips[world.rank]
        trainer.optimizer.buckets.await_weights()
        weight = trainer.stage.layers[layer].self_attention.linear_qkv.weight.data.view(-1)
        weight.view(torch.int16)[11] ^= 1 << bit
    found = differing_replica(trainer)
    trainer.close()
    return found


@pytest.mark.parametrize(("ranks", "layout", "flips", "named"), [
    (4, {}, {2: (0, 0)}, "rank 2 ({}, replica 2) holds other bits in decoder.layers.0.self_attention.linear_qkv.weight than 3 of"),
    (4, OVERLAP, {3: (1, 14)}, "rank 3 ({}, replica 3) holds other bits in decoder.layers.1.self_attention.linear_qkv.weight"),
    (3, {"bf16": True, "micro_batch_size": 1, "global_batch_size": 12}, {0: (0, 3)}, "rank 0 ({}, replica 0) holds other bits"),
    (6, {TP: 2, "micro_batch_size": 1, "global_batch_size": 12}, {5: (1, 7)}, "rank 5 ({}, replica 2) holds other bits"),
    (4, {PP: 2}, {3: (0, 7)}, "rank 1 ({0}, replica 0), rank 3 ({0}, replica 1) hold different bits in decoder.layers.1."),
], ids=["dp4", "zero-overlap", "bf16", "tp2-dp3", "pp2-dp2"])
def test_one_flipped_bit(ranks, layout, flips, named, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "c12")
    found = ThreadWorld(ranks).run(lambda world: compared(world, layout, flips))
    assert len(set(found)) == 1 and found[0].startswith(named.format("node c12")), found[0]


def test_one_rank_has_no_replicas_and_every_bit_counts():
    torch.set_num_threads(1)
    trainer = make_trainer(SoloComm(), small_run(num_layers=1))
    assert differing_replica(trainer) is None
    before, flat = parameter_hashes(trainer), trainer.optimizer.flat
    for index, parameter in enumerate(flat.parameters):
        bits = parameter.data.view(-1).view(torch.int32)
        bits[-1] ^= 1
        assert (parameter_hashes(trainer) != before).nonzero().tolist() == [[index]]
        bits[-1] ^= 1
    assert torch.equal(parameter_hashes(trainer), before)
