"""Layers over 1, 2 and 4 tensor-parallel ranks: the same initial weights, outputs and gradients, with dropout and recompute."""

from collections.abc import Callable
from itertools import repeat

import pytest
import torch
from torch import Tensor, nn

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import ALONE, Groups
from fugaku_megatron.host import kernels
from fugaku_megatron.nn import blocks, layers
from fugaku_megatron.nn.attention.self_attention import SelfAttention
from fugaku_megatron.nn.forward_context import Pass
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.optim.flat import FlatParameters
from tests.helpers import dry_trainer, small_run
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

S = 6
B = 3
H = 32
SEED = 11


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


LAYERS: dict[str, Callable[[layers.Context], nn.Module]] = {
    "layer_norm": lambda c: layers.LayerNorm("x", c),
    "column": lambda c: layers.ColumnParallelLinear("x", H, (48,), c),
    "row": lambda c: layers.RowParallelLinear("x", H, 48, c),
    "words": lambda c: layers.VocabParallelEmbedding("x", 96, c),
    "positions": lambda c: layers.PositionEmbedding("x", c),
    "attention": lambda c: SelfAttention("x", 3, c),
    "mlp": lambda c: blocks.MLP("x", c),
    "transformer": lambda c: blocks.TransformerLayer(3, c),
}


def context(tp, **changes) -> layers.Context:
    run = small_run(seq_length=S, seed=SEED, init_method_std=0.2, **changes)
    return layers.Context(run, Groups(SoloComm(), tp, *repeat(ALONE, 3)), Ops.build())


def build(name: str, tp, **changes) -> tuple[nn.Module, FlatParameters]:
    """Build a layer with memory. Biases and norms, constant at first, are random."""
    layer = LAYERS[name](context(tp, **changes))
    flat = FlatParameters(layer, torch.float32, SEED, kernels)
    for p in flat.parameters:
        if p.spec.init_std is None:
            p.data.add_(place(p, random(*p.spec.shape, seed=len(p.spec.name))) * 0.3)
    return layer, flat


def place(p: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's slice of a global tensor."""
    return whole[tuple(slice(o, o + n) for o, n in zip(p.spec.offset, p.shape))]


def stage_parameters(rank: int, ranks: int, **changes) -> list[nn.Parameter]:
    return dry_trainer(
        rank, ranks, num_layers=2, max_position_embeddings=20, **changes
    ).optimizer.flat.parameters


def test_initial_weights_have_the_right_spread():
    for p in stage_parameters(0, 1, init_method_std=0.04):
        residual = "linear_proj.weight" in p.spec.name or "linear_fc2.weight" in p.spec.name
        if p.dim() == 1:
            assert torch.all(p == (1.0 if "layernorm.weight" in p.spec.name else 0.0)), p.spec.name
            continue
        std, n = 0.04 / (2.0 if residual else 1.0), p.numel()  # sqrt(2 x 2 layers) = 2
        assert abs(p.mean()) < 5 * std / n**0.5 and abs(p.std() / std - 1) < 5 / (2 * n) ** 0.5, (
            p.spec.name
        )
        assert p.abs().max() > 2.5 * std


def test_initial_weights_differ_by_name_and_seed():
    first = {p.spec.name: p for p in stage_parameters(0, 1) if p.dim() == 2}
    alike = [p for p in first.values() if p.shape == (128, 32)]
    assert len(alike) == 2 and not torch.equal(*alike)
    for p in stage_parameters(0, 1, seed=5):
        assert p.dim() < 2 or not torch.isclose(p, first[p.spec.name]).any(1).all()


def test_parameters_are_born_without_memory_and_know_their_place():
    second = context(SoloComm(1, 2))
    p = second.parameter("w", (8, 6), 1, 0.1)
    assert (
        p.is_meta
        and p.shape == (8, 3)
        and (p.spec.offset, p.spec.shape, p.spec.partition_dim) == ((0, 3), (8, 6), 1)
    )
    replicated = [context(SoloComm(rank, 2)).parameter("b", (8,)) for rank in range(2)]
    assert [(q.spec.counted, q.spec.owned) for q in replicated] == [(True, True), (False, False)]
    tied = second.parameter("head", (8, 6), 0, 0.1, init_name="embedding")
    assert tied.spec.owned and not tied.spec.counted
    with pytest.raises(AssertionError):
        context(SoloComm(0, 2)).parameter("w", (7, 6), 0)


def run_layer(name: str, tp, dropout: float = 0.0) -> tuple[Tensor, Tensor | None, dict]:
    """Return the output, the input gradient, and parameters with gradients by name; slices if the layer has slices."""
    layer, flat = build(name, tp, hidden_dropout=dropout, attention_dropout=dropout)
    tokens = torch.randint(0, 96, (S, B), generator=torch.Generator().manual_seed(1))
    x = random(S, B, H)
    if name == "row":
        x = x.chunk(tp.size, -1)[tp.rank].contiguous()
    x.requires_grad_()
    more = (
        (Pass(first_sample=40),)
        if name in ("attention", "mlp", "transformer", "column", "row")
        else ()
    )
    y = layer(tokens if name == "words" else x, *more)
    dy = random(S, B, y.shape[-1] * (tp.size if name == "column" else 1), seed=5)
    y.backward(dy.chunk(tp.size, -1)[tp.rank] if name == "column" else dy)
    return y.detach(), x.grad, {p.spec.name: (p, p.main_grad.clone()) for p in flat.parameters}


@pytest.mark.parametrize(
    ("name", "dropout"), [*((name, 0.0) for name in LAYERS), ("transformer", 0.4)]
)
def test_tensor_parallel_ranks_compute_what_one_rank_does(name, dropout):
    y, dx, grads = run_layer(name, SoloComm(), dropout)
    results = ThreadWorld(4).run(lambda tp: run_layer(name, tp, dropout))
    outputs = (
        [torch.cat([r[0] for r in results], -1)] if name == "column" else [r[0] for r in results]
    )
    for output in outputs:
        torch.testing.assert_close(output, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())
    if name != "words":
        inputs = (
            [torch.cat([r[1] for r in results], -1)] if name == "row" else [r[1] for r in results]
        )
        for gradient in inputs:
            torch.testing.assert_close(gradient, dx, rtol=1e-5, atol=1e-5 * dx.abs().max().item())
    for _, _, own in results:
        for key, (p, grad) in own.items():
            whole = grads[key][1]
            torch.testing.assert_close(
                grad,
                place(p, whole),
                rtol=1e-5,
                atol=1e-5 * whole.abs().max().item(),
                msg=lambda m, k=key: f"{k}: {m}",
            )


def test_every_site_of_every_layer_has_its_own_stream():
    streams = [
        layers.dropout_stream(layer, site) for layer in range(1, 100) for site in layers.SITES[:3]
    ]
    streams.append(layers.dropout_stream(0, "embedding"))
    assert len(set(streams)) == len(streams)
