"""What a rank holds against what autograd keeps, and how many rows of logits are held at once."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.costs import accounting, memory
from fugaku_megatron.nn.passes import Pass
from tests.helpers import make_trainer, small_run
from tests.threads import ThreadWorld


def held_bytes(world: Comm, run: RunConfig) -> int:
    """What autograd keeps on this rank from the forward of a micro-batch to its backward."""
    trainer = make_trainer(world, run)
    tokens = torch.zeros(run.model.seq_length, run.batch.micro_batch_size, dtype=torch.int64)
    weights, saved = trainer.optimizer.flat.values.untyped_storage().data_ptr(), {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() != weights and tensor.dtype != torch.int64:
            saved[storage.data_ptr()] = storage  # holding it keeps its address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = trainer.stage.chunks[0](tokens, tokens, Pass(first_sample=0, recompute=run.training.recompute_granularity))
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


TP2 = {"tensor_model_parallel_size": 2}
PARTS = {**TP2, "sequence_parallel": True}


@pytest.mark.parametrize("changes", [
    {}, {"hidden_dropout": 0.1, "attention_dropout": 0.1}, {"bf16": True}, {"recompute_granularity": "selective"},
    {"recompute_granularity": "full"}, TP2, PARTS, {**PARTS, "bf16": True, "hidden_dropout": 0.1},
    {**PARTS, "recompute_granularity": "selective"}, {**PARTS, "recompute_granularity": "full"}])
def test_saved_bytes_are_those_that_autograd_keeps(changes):
    run = small_run(**changes)
    tp = run.parallel.tensor_model_parallel_size
    layout = Layout.from_run(run, tp)
    expected = memory.part_kept_bytes(run, tp, run.model.num_layers, accounting.part_recompute_groups(run, 0))[0]
    outside = sum(r.saved_bytes for place, r in accounting.stage_records(run, layout, 0) if place != "layer")
    for held in ThreadWorld(tp).run(held_bytes, run):
        assert held == pytest.approx(expected + outside, rel=0.02)


def test_a_layer_of_30b_keeps_less_between_parts_of_the_sequence():
    """The residual stream's share falls to an eighth. What a small real run holds is in the test above."""
    mib = [memory.layer_saved_bytes(make_run("30b", {"tensor_model_parallel_size": 8, "sequence_parallel": parts}), 8) / 2**20
           for parts in (False, True)]
    assert mib == pytest.approx([280, 84], rel=0.01)


@pytest.mark.parametrize(("changes", "rows"), [
    ({"micro_batch_size": 1}, 512),  # a quarter of what the layers keep holds half of the logits
    ({"micro_batch_size": 4}, 1024),  # the most
    ({"micro_batch_size": 1, "recompute_granularity": "full"}, 171),  # the least memory, in equal chunks
    ({"micro_batch_size": 1, "tensor_model_parallel_size": 4}, 1024),
])
def test_rows_of_logits(changes, rows):
    run = make_run("124m", {"vocab_size": 50257, **changes})
    assert memory.logits_rows(run, Layout.from_run(run, run.parallel.tensor_model_parallel_size)) == rows
