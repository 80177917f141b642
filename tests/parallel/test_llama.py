"""Llama, Mistral, Qwen2 and Qwen3 against transformers with the same random weights, and every layout against one rank."""

from __future__ import annotations

import functools

import pytest
import torch

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.passes import Pass
from tests.helpers import make_trainer, small_run, train
from tests.llama_models import FAMILIES, copy_to, in_their_shape, theirs
from tests.threads import ThreadWorld

SEQUENCE = 16
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.mark.parametrize("backend", ["native", "torch"])
@each_family
def test_logits_loss_and_gradients(family, backend):
    """The window is shorter than the sequence, and every weight is random, those of norms and biases as well."""
    pytest.importorskip("transformers")
    trainer = make_trainer(SoloComm(), small_run(**FAMILIES[family], init_method_std=0.2), Ops.build(backend))
    for p in trainer.optimizer.flat.parameters:
        p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    model, ours = theirs(family), {p.spec.name: p for p in trainer.optimizer.flat.parameters}
    copy_to(model, ours, family)
    tokens, labels = torch.randint(0, 96, (2, SEQUENCE, 2), generator=torch.Generator().manual_seed(3))  # (s, b) each
    chunk, at = trainer.stage.last, Pass(first_sample=0)
    expected = model(tokens.t()).logits
    logits = chunk.logits(chunk.decode(chunk.embedding(tokens, at), at)).transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    expected = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.t().flatten())
    expected.backward()
    trainer.optimizer.zero_grad()
    loss = chunk(tokens, labels, at)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    grads, parameters = in_their_shape({name: p.main_grad for name, p in ours.items()}, family), dict(model.named_parameters())
    assert grads.keys() == parameters.keys()
    for name, parameter in parameters.items():
        scale = parameter.grad.abs().max()
        torch.testing.assert_close(grads[name] / scale, parameter.grad / scale, rtol=0, atol=1e-5,
                                   msg=lambda m, n=name: f"{n}: {m}")


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
TP2 = {"tensor_model_parallel_size": 2}
TP2PP2 = {**TP2, "pipeline_model_parallel_size": 2}
LAYOUTS = {
    "tp2pp2dp2": (8, {**TP2PP2, "zero_stage": 1, "overlap_grad_reduce": True, "ddp_bucket_size": 3000}),
    "tp2pp2 sequence": (4, {**TP2PP2, "sequence_parallel": True}),
    "tp2 overlap": (2, {**TP2, "sequence_parallel": True, "tp_comm_overlap": True, "recompute_granularity": "selective"}),
    "pp2dp2 full": (4, {"pipeline_model_parallel_size": 2, "recompute_granularity": "full", "num_layers": 4}),
    "pp2 zbv": (2, {"pipeline_model_parallel_size": 2, "pipeline_schedule": "zbv", "num_layers": 4, "zero_stage": 1}),
    "pp2 interleaved": (2, {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "num_layers": 4}),
}


# What no published family mixes: every bias, interleaved rope of half a head, and norms of queries and keys without positions.
OTHERS = {
    "biases": {"num_layers": 2, "swiglu": True, "position_embedding_type": "rope", "rotary_percent": 0.5,
               "rotary_interleaved": True},
    "none": {"num_layers": 2, "normalization": "RMSNorm", "position_embedding_type": "none", "qk_layernorm": True,
             "group_query_attention": True, "num_query_groups": 4, "kv_channels": 12, "window_size": "2,0"},
}


@functools.cache
def losses(family: str, ranks: int, backend: str, changes: tuple) -> list[tuple[float, float]]:
    run = small_run(**{**(FAMILIES | OTHERS)[family], **DROPOUT, **dict(changes)})
    return ThreadWorld(ranks).run(lambda world: [(r.loss, r.grad_norm) for r in train(world, run, 4, Ops.build(backend))])[0]


@pytest.mark.parametrize(("family", "name"), [
    *((family, "tp2pp2dp2") for family in FAMILIES | OTHERS), *(("qwen3", name) for name in LAYOUTS if name != "tp2pp2dp2"),
    ("llama", "tp2pp2 sequence"), ("llama", "pp2 zbv")])
def test_layouts_equal_one_rank(family, name):
    """Losses and gradient norms, with dropout; the fourth iteration has felt every gradient of those before it."""
    ranks, changes = LAYOUTS[name]
    backend = "torch" if name == "tp2pp2 sequence" else "native"
    alone = losses(family, 1, backend, tuple({"num_layers": changes.get("num_layers", 2)}.items()))
    result = losses(family, ranks, backend, tuple(changes.items()))
    torch.testing.assert_close(torch.tensor(result), torch.tensor(alone), rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_close(precision):
    changes = ((precision, True), ("initial_loss_scale", 1024.0))
    alone = torch.tensor(losses("qwen3", 1, "native", changes))
    result = torch.tensor(losses("qwen3", 4, "native", (*changes, *TP2PP2.items(), ("sequence_parallel", True))))
    torch.testing.assert_close(result, alone, rtol=0.02, atol=0)
    torch.testing.assert_close(alone, torch.tensor(losses("qwen3", 1, "native", (("num_layers", 2),))), rtol=0.02, atol=0)
