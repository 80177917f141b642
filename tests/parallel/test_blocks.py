"""A block of other parts: another norm is one class and one row, biases are a flag.

It trains under TP2, and its accounting holds.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.config import model_config
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import accounting
from fugaku_megatron.nn import layers
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.passes import Pass
from fugaku_megatron.nn.shared import accumulate
from tests.helpers import make_trainer, small_run, train
from tests.parallel.test_accounting import LAYOUTS, check_bytes, counted_flops, sizes
from tests.threads import ThreadWorld


class _Scale(torch.autograd.Function):
    """x / sqrt(mean(x^2) + epsilon) * weight."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return x * rstd * weight

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        x, rstd = ctx.saved_tensors
        accumulate(ctx.weight, (dy * x * rstd).sum((0, 1)))
        scaled = dy * ctx.weight
        return rstd * (scaled - x * rstd.square() * (scaled * x).mean(-1, keepdim=True)), None, None


class ScaleNorm(layers.Norm):
    """The one class."""

    def __init__(self, name: str, context: layers.Context) -> None:
        super().__init__(name, context)
        self.weight = context.parameter(f"{name}.weight", (context.model.hidden_size,), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return _Scale.apply(x, self.weight, self.epsilon)


OTHER = {"normalization": "ScaleNorm", "disable_bias_linear": True}


@pytest.fixture(autouse=True)
def scale_norm(monkeypatch):
    """The one row."""
    monkeypatch.setitem(model_config.NORMS, "ScaleNorm",
                        model_config.NormPart(layer="tests.parallel.test_blocks:ScaleNorm", vectors=1, statistics=1))


def test_an_unknown_norm_is_refused():
    with pytest.raises(ValueError, match="--normalization is BatchNorm: pass LayerNorm or RMSNorm or ScaleNorm"):
        small_run(normalization="BatchNorm")


def test_parameters_have_neither_biases_nor_a_second_vector_in_the_norms():
    trainer = make_trainer(SoloComm(), small_run(**OTHER))
    names = {p.spec.name for p in trainer.optimizer.flat.parameters}
    assert not [name for name in names if name.endswith(".bias")]
    assert {"decoder.layers.0.mlp.linear_fc1.weight", "decoder.final_layernorm.weight"} <= names


@pytest.mark.parametrize(("backend", "changes"), [
    ("native", {}), ("torch", {"hidden_dropout": 0.1, "attention_dropout": 0.1}), ("native", {"recompute_granularity": "full"}),
    ("native", {"sequence_parallel": True, "hidden_dropout": 0.1}), ("torch", {"sequence_parallel": True})])
def test_it_trains_under_tp2_as_on_one_rank(backend, changes):
    run = small_run(**OTHER, **changes)
    alone = [r.loss for r in train(SoloComm(), run, 5, Ops.build(backend))]
    run = small_run(**OTHER, **changes, tensor_model_parallel_size=2)
    ranks = ThreadWorld(2).run(lambda world: [r.loss for r in train(world, run, 5, Ops.build(backend))])
    assert ranks[0] == ranks[1] and alone[-1] < alone[0]
    torch.testing.assert_close(torch.tensor(ranks[0]), torch.tensor(alone), rtol=1e-5, atol=0)


def test_gradients_are_slopes():
    """The gradient of the block's input against differences of the loss, in the direction of a random vector."""
    trainer = make_trainer(SoloComm(), small_run(**OTHER))
    layer, at = trainer.stage.layers[0], Pass(first_sample=0)
    x, direction, dy = (torch.randn(16, 2, 32, generator=torch.Generator().manual_seed(i)) for i in range(3))
    x.requires_grad_()
    (layer(x, at) * dy).sum().backward()
    slope = sum(sign * (layer(x.detach() + sign * 1e-2 * direction, at).double() * dy).sum() for sign in (1, -1)) / 2e-2
    torch.testing.assert_close((x.grad * direction).double().sum(), slope, rtol=2e-3, atol=0)


@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_parameters_are_accounted_for(world, tp, pp):
    run = small_run(**OTHER, **sizes(tp, pp))
    held = ThreadWorld(world).run(lambda comm: sum(p.numel() for p in make_trainer(comm, run).stage.parameters()))
    assert held == [accounting.stage_parameters(run, Layout.from_run(run, world), rank // tp % pp) for rank in range(world)]


def test_flops_are_accounted_for():
    run = small_run(**OTHER, num_layers=2, micro_batch_size=1)
    records = [r for _, r in accounting.stage_records(run, Layout.from_run(run, 1), 0)]
    assert counted_flops(run) == (sum(r.flops_forward for r in records), sum(r.flops_backward for r in records))


@pytest.mark.parametrize(("world", "tp", "pp"), LAYOUTS)
def test_bytes_are_accounted_for(world, tp, pp):
    check_bytes(small_run(**OTHER, **sizes(tp, pp)), world)
    if tp > 1:
        check_bytes(small_run(**OTHER, **sizes(tp, pp), sequence_parallel=True), world)


def test_saved_bytes_are_accounted_for():
    run = small_run(**OTHER)
    trainer, at, saved = make_trainer(SoloComm(), run), Pass(first_sample=0), {}
    x = torch.randn(16, 2, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(t.data_ptr(), t) is None or t, lambda t: t):
        trainer.stage.layers[0](x, at)
    held = sum(t.numel() * t.element_size() for t in saved.values())
    assert held == pytest.approx(sum(r.saved_bytes for r in accounting.layer_records(run, 1)), rel=0.02)
