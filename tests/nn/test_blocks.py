"""Other blocks than GPT-2's: published families against transformers, and a norm that is one class and one row."""

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.config import model as model_module
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from tests.checks.costs import check_bytes, check_flops, check_kept, check_parameters
from tests.helpers import TP2, TP2PP2, assert_near, make_trainer, small_run, train
from tests.llama_models import FAMILIES, copy_to, shaped_like_theirs, theirs
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients(family, backend):
    """The window is shorter than the sequence, and every weight is random, norms and biases included."""
    pytest.importorskip("transformers")
    trainer = make_trainer(
        SoloComm(), small_run(**FAMILIES[family], init_method_std=0.2), Ops.build(backend)
    )
    for p in trainer.optimizer.flat.parameters:
        p.data.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    model = theirs(family)
    ours = {p.spec.name: p for p in trainer.optimizer.flat.parameters}
    copy_to(model, ours, family)
    tokens, labels = torch.randint(
        0, 96, (2, 16, 2), generator=torch.Generator().manual_seed(3)
    )  # (s, b) each
    chunk = trainer.stage.last
    at = Pass(first_sample=0)
    expected = model(tokens.t()).logits
    logits = chunk.logits(chunk.decode(chunk.embedding(tokens, at), at)).transpose(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    expected = torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.t().flatten())
    expected.backward()
    trainer.optimizer.zero_grad()
    loss = chunk(tokens, labels, at)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    grads = shaped_like_theirs({name: p.main_grad for name, p in ours.items()}, family)
    parameters = dict(model.named_parameters())
    assert grads.keys() == parameters.keys()
    assert_near(grads, {name: parameter.grad for name, parameter in parameters.items()}, 1e-5)


def test_biases_are_not_decayed():
    """A gated MLP's biases have two dimensions."""
    run = small_run(**{**FAMILIES["llama"], "disable_bias_linear": False, "weight_decay": 0.5})
    flat = make_trainer(SoloComm(), run).optimizer.flat
    decayed = {
        p.spec.name.split(".")[-1]
        for p, start in zip(flat.parameters, flat.starts)
        if any(r.decayed and r.start <= start < r.end for r in flat.ranges(0, flat.numel))
    }
    assert decayed == {"weight"} and any(
        p.dim() == 2 and p.spec.name.endswith(".bias") for p in flat.parameters
    )


# Another norm ---------------------------------------------------------------------------------------------------------------------


OTHER = {"normalization": "ScaleNorm", "disable_bias_linear": True}


@pytest.fixture
def other(monkeypatch):
    """Return flags for a block with the norm and without biases."""
    monkeypatch.setitem(
        model_module.NORMS,
        "ScaleNorm",
        model_module.NormPart(layer="tests.outside_rows:RootMeanSquare", vectors=1, statistics=1),
    )
    return {"normalization": "ScaleNorm", "disable_bias_linear": True}


def test_an_unknown_norm_is_refused(other):
    with pytest.raises(
        ValueError,
        match="--normalization is BatchNorm: pass LayerNorm or RMSNorm or .* or ScaleNorm",
    ):
        small_run(normalization="BatchNorm")


@pytest.mark.parametrize(
    ("backend", "changes"),
    [
        ("torch", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
        ("native", {"recompute_granularity": "full"}),
        ("native", {"sequence_parallel": True, "hidden_dropout": 0.1}),
    ],
)
def test_it_trains_under_tp2_as_on_one_rank(backend, changes, other):
    run = small_run(**other, **changes)
    parts = small_run(**other, **changes, **TP2)
    alone = [r.loss for r in train(SoloComm(), run, 5, Ops.build(backend))]
    ranks = ThreadWorld(2).run(
        lambda world: [r.loss for r in train(world, parts, 5, Ops.build(backend))]
    )
    assert ranks[0] == ranks[1] == pytest.approx(alone, rel=1e-5) and alone[-1] < alone[0]


def test_gradients_are_slopes(other):
    """The input gradient against loss differences, along a random vector."""
    trainer = make_trainer(SoloComm(), small_run(**other))
    layer = trainer.stage.layers[0]
    at = Pass(first_sample=0)
    x, direction, dy = (
        torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )
    x.requires_grad_()
    (layer(x, at) * dy).sum().backward()
    slope = (
        sum(
            sign * (layer(x.detach() + sign * 1e-2 * direction, at).double() * dy).sum()
            for sign in (1, -1)
        )
        / 2e-2
    )
    torch.testing.assert_close((x.grad * direction).double().sum(), slope, rtol=2e-3, atol=0)


def test_it_is_accounted_for(other):
    """Parameters, FLOPs, messages and saved bytes."""
    check_parameters(small_run(**other, **TP2PP2), 8)
    check_bytes(small_run(**other, **TP2PP2, zero_stage=1), 8)
    check_bytes(small_run(**other, **TP2PP2, sequence_parallel=True), 4)
    check_flops(small_run(**other, num_layers=2, micro_batch_size=1))
    check_kept(small_run(**other))
    names = {
        p.spec.name for p in make_trainer(SoloComm(), small_run(**other)).optimizer.flat.parameters
    }
    assert "decoder.final_layernorm.weight" in names and not [
        name for name in names if name.endswith(".bias")
    ]
