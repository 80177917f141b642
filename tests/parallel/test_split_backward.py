"""Backward in two halves: the same bits as the whole one, and weight gradients that wait until they are asked for."""

from __future__ import annotations

import pytest
import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.nn.ops import FAMILIES, Ops, backward
from fugaku_megatron.nn.passes import Pass
from tests.helpers import flat_gradients, make_trainer, small_run
from tests.threads import ThreadWorld

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
TP2 = {"tensor_model_parallel_size": 2}
RUNS = {"native": {}, "bf16": {"bf16": True}, "tp2": TP2, "parts of the sequence": {**TP2, "sequence_parallel": True},
        "full recompute": {"recompute_granularity": "full"}, "selective recompute": {"recompute_granularity": "selective"},
        "no biases": {"disable_bias_linear": True}, "packed weights": {"cache_packed_weights": True}}


def gradients(world: Comm, changes: dict, backend, split: bool) -> torch.Tensor:
    """The flat gradients of three micro-batches, whose weight gradients are computed one micro-batch late where split."""
    torch.set_num_threads(1)
    run = small_run(**DROPOUT, **changes)
    trainer = make_trainer(world, run, Ops.build(backend, keep_packed_weights=run.system.cache_packed_weights))
    chunk, late = trainer.stage.chunks[0], None
    trainer.optimizer.zero_grad()
    generator = torch.Generator().manual_seed(5)
    for sample in range(0, 6, 2):
        tokens, labels = torch.randint(0, run.model.vocab_size, (2, run.model.seq_length, 2), generator=generator)
        loss = chunk(tokens, labels, Pass(first_sample=sample, recompute=run.training.recompute_granularity), 0.25)
        if not split:
            backward(loss, None)
            continue
        weights = [p for p in chunk.layers[0].parameters() if p.dim() == 2]
        starts = [p.main_grad.clone() for p in weights]
        with trainer.ops.weight_gradients.put_off() as waiting:
            backward(loss, None)
        assert all(torch.equal(now.main_grad, then) for now, then in zip(weights, starts, strict=True)), "they wait"
        if late is not None:
            late.run()
        late = waiting
    if late is not None:
        late.run()
    trainer.close()
    return flat_gradients(trainer)


@pytest.mark.parametrize("backend", ["native", "torch", {"gemm": "torch"}, dict.fromkeys(FAMILIES, "torch") | {"gemm": "native"}],
                         ids=["native", "torch", "torch gemm", "native gemm"])
@pytest.mark.parametrize("name", RUNS)
def test_split_and_whole_backward_have_the_same_bits(name, backend):
    changes = RUNS[name]
    whole, split = (ThreadWorld(changes.get("tensor_model_parallel_size", 1)).run(gradients, changes, backend, halves)
                    for halves in (False, True))
    for ours, theirs in zip(split, whole, strict=True):
        assert ours.abs().max() > 0
        assert torch.equal(ours, theirs)
