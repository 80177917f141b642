"""Layers over 1, 2 and 4 tensor-parallel ranks: the same initial weights, outputs and gradients, with dropout and recompute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.nn import blocks, layers, parameter
from fugaku_megatron.nn.ops import Ops
from fugaku_megatron.nn.passes import Pass
from fugaku_megatron.training.flat import FlatParameters
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, small_run
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

S, B, H, SEED = 6, 3, 32, 11


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def model(**changes):
    return small_run(seq_length=S, **changes).model


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


LAYERS: dict[str, Callable[[layers.Context], nn.Module]] = {
    "layer_norm": lambda c: layers.LayerNorm("x", c),
    "column": lambda c: layers.ColumnParallelLinear("x", H, 48, c),
    "row": lambda c: layers.RowParallelLinear("x", H, 48, c),
    "words": lambda c: layers.VocabParallelEmbedding("x", 96, c),
    "positions": lambda c: layers.PositionEmbedding("x", c),
    "attention": lambda c: blocks.SelfAttention("x", 3, c),
    "mlp": lambda c: blocks.MLP("x", c),
    "transformer": lambda c: blocks.TransformerLayer(3, c),
}


def build(name: str, tp, **changes) -> tuple[nn.Module, FlatParameters]:
    """A layer with memory; biases and norms, which start at constants, get values that differ by element."""
    layer = LAYERS[name](layers.Context(model(init_method_std=0.2, **changes), tp, Ops.build(), SEED))
    flat = FlatParameters(layer, torch.float32, SEED, 1, kernels)
    for p in flat.parameters:
        if p.spec.init_std is None:
            p.data.add_(place(p, random(*p.spec.shape, seed=len(p.spec.name))) * 0.3)
    return layer, flat


def place(p: nn.Parameter, whole: Tensor) -> Tensor:
    """This rank's slice of a global tensor."""
    return whole[tuple(slice(o, o + n) for o, n in zip(p.spec.offset, p.shape))]


# Parameters -------------------------------------------------------------------------------------------------------------------

def stage_parameters(rank: int, ranks: int, **changes) -> list[nn.Parameter]:
    run = small_run(num_layers=2, max_position_embeddings=20, **changes)
    world = SoloComm(rank, ranks)
    return Trainer(run, world, grid_groups(world, run)).optimizer.flat.parameters


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_initial_weights_are_slices_of_the_whole(tp, pp, precision):
    low = {"bf16": True} if precision == "bf16" else {}
    whole = {p.spec.name: p for p in stage_parameters(0, 1, **low)}
    seen = set()
    for rank in range(tp * pp):
        for p in stage_parameters(rank, tp * pp, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, **low):
            source = whole["embedding.word_embeddings.weight" if p.spec.name == "output_layer.weight" else p.spec.name]
            assert p.spec.shape == tuple(source.shape) and torch.equal(p, place(p, source)), p.spec.name
            assert p.numel() * (tp if p.spec.partition_dim is not None else 1) == source.numel()
            seen.add(p.spec.name)
    assert seen - {"output_layer.weight"} == whole.keys()


def test_initial_weights_have_the_right_spread():
    for p in stage_parameters(0, 1, init_method_std=0.04):
        residual = "linear_proj.weight" in p.spec.name or "linear_fc2.weight" in p.spec.name
        if p.dim() == 1:
            assert torch.all(p == (1.0 if "layernorm.weight" in p.spec.name else 0.0)), p.spec.name
            continue
        std, n = 0.04 / (2.0 if residual else 1.0), p.numel()  # sqrt(2 x 2 layers) = 2
        assert abs(p.mean()) < 5 * std / n**0.5 and abs(p.std() / std - 1) < 5 / (2 * n) ** 0.5, p.spec.name
        assert p.abs().max() > 2.5 * std


def test_initial_weights_differ_by_name_and_seed():
    first = {p.spec.name: p for p in stage_parameters(0, 1) if p.dim() == 2}
    alike = [p for p in first.values() if p.shape == (128, 32)]
    assert len(alike) == 2 and not torch.equal(*alike)
    for p in stage_parameters(0, 1, seed=5):
        assert p.dim() < 2 or not torch.isclose(p, first[p.spec.name]).any(1).all()


def test_parameters_are_born_without_memory_and_know_their_place():
    p = parameter.make_parameter("w", (8, 6), SoloComm(1, 2), partition_dim=1, std=0.1)
    assert p.is_meta and p.shape == (8, 3) and (p.spec.offset, p.spec.shape, p.spec.partition_dim) == ((0, 3), (8, 6), 1)
    replicated = [parameter.make_parameter("b", (8,), SoloComm(rank, 2)) for rank in range(2)]
    assert [(q.spec.counted, q.spec.owned) for q in replicated] == [(True, True), (False, False)]
    tied = parameter.make_parameter("head", (8, 6), SoloComm(1, 2), 0, 0.1, init_name="embedding")
    assert tied.spec.owned and not tied.spec.counted
    with pytest.raises(AssertionError):
        parameter.make_parameter("w", (7, 6), SoloComm(0, 2), partition_dim=0)


# Outputs and gradients ----------------------------------------------------------------------------------------------------------

def run_layer(name: str, tp, dropout: float = 0.0, recompute: bool = False) -> tuple[Tensor, Tensor | None, dict]:
    """(output, input gradient, {name: (parameter, its gradient)}); slices where the layer takes or gives slices."""
    layer, flat = build(name, tp, hidden_dropout=dropout, attention_dropout=dropout)
    tokens = torch.randint(0, 96, (S, B), generator=torch.Generator().manual_seed(1))
    x = random(S, B, H)
    if name == "row":
        x = x.chunk(tp.size, -1)[tp.rank].contiguous()
    x.requires_grad_()
    at = Pass(first_sample=40, recompute="selective" if recompute else None)
    more = (at,) if name in ("attention", "mlp", "transformer") else ()
    y = layer(tokens if name == "words" else x, *more)
    dy = random(S, B, y.shape[-1] * (tp.size if name == "column" else 1), seed=5)
    y.backward(dy.chunk(tp.size, -1)[tp.rank] if name == "column" else dy)
    return y.detach(), x.grad, {p.spec.name: (p, p.main_grad.clone()) for p in flat.parameters}


@pytest.mark.parametrize(("name", "dropout"), [*((name, 0.0) for name in LAYERS), ("attention", 0.4), ("transformer", 0.4)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_ranks_compute_what_one_rank_does(name, ranks, dropout):
    y, dx, grads = run_layer(name, SoloComm(), dropout)
    results = ThreadWorld(ranks).run(lambda tp: run_layer(name, tp, dropout))
    outputs = [torch.cat([r[0] for r in results], -1)] if name == "column" else [r[0] for r in results]
    for output in outputs:
        torch.testing.assert_close(output, y, rtol=1e-5, atol=1e-5 * y.abs().max().item())
    if name != "words":
        inputs = [torch.cat([r[1] for r in results], -1)] if name == "row" else [r[1] for r in results]
        for gradient in inputs:
            torch.testing.assert_close(gradient, dx, rtol=1e-5, atol=1e-5 * dx.abs().max().item())
    for _, _, own in results:
        for key, (p, grad) in own.items():
            whole = grads[key][1]
            torch.testing.assert_close(grad, place(p, whole), rtol=1e-5, atol=1e-5 * whole.abs().max().item(),
                                       msg=lambda m, k=key: f"{k}: {m}")


def test_the_formulas_of_the_simple_layers():
    """Against torch's own modules' formulas; attention and the whole block are compared in test_model. Row-parallel layers leave
    their bias to the residual's addition."""
    x = random(S, B, H)
    for name, formula in {"column": lambda w: F.linear(x, w["x.weight"], w["x.bias"]),
                          "row": lambda w: F.linear(x, w["x.weight"]),
                          "layer_norm": lambda w: F.layer_norm(x, (H,), w["x.weight"], w["x.bias"]),
                          "positions": lambda w: x + w["x.weight"][:S].unsqueeze(1),
                          "mlp": lambda w: F.linear(F.gelu(F.linear(x, w["x.linear_fc1.weight"], w["x.linear_fc1.bias"]),
                                                           approximate="tanh"), w["x.linear_fc2.weight"]),
                          }.items():
        y, _, weights = run_layer(name, SoloComm())
        torch.testing.assert_close(y, formula({k: p for k, (p, _) in weights.items()}), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_recomputed_attention_has_the_same_bits(name):
    plain, again = run_layer(name, SoloComm(), 0.4), run_layer(name, SoloComm(), 0.4, recompute=True)
    assert torch.equal(plain[0], again[0]) and torch.equal(plain[1], again[1])
    assert all(torch.equal(grad, again[2][key][1]) for key, (_, grad) in plain[2].items())


def test_two_all_reduces_forward_and_two_backward():
    tp = RecordingComm(SoloComm(0, 2), "tp")
    layer, _ = build("transformer", tp)
    y = layer(random(S, B, H).requires_grad_(), Pass(first_sample=0))
    assert tp.records == [("all_reduce", S * B * H * 4)] * 2
    y.sum().backward()
    assert tp.records == [("all_reduce", S * B * H * 4)] * 4


def test_with_sequence_parallelism_gathers_and_reduce_scatters_in_their_place():
    """Two each forward; in backward one for each output's gradient, and each input is gathered again for the weights' gradients."""
    tp = RecordingComm(SoloComm(0, 2), "tp")
    context = layers.Context(model(), tp, Ops.build(), SEED, sequence_parallel=True)
    layer = blocks.TransformerLayer(3, context)
    FlatParameters(layer, torch.float32, SEED, 1, kernels)
    y = layer(random(S // 2, B, H).requires_grad_(), Pass(first_sample=0))
    gather, scatter = ("all_gather", S // 2 * B * H * 4), ("reduce_scatter", S * B * H * 4)
    assert y.shape == (S // 2, B, H) and tp.records == [gather, scatter] * 2
    tp.log.clear()
    y.sum().backward()
    assert tp.records == [gather, gather, scatter] * 2
    partial = {p.spec.name.removeprefix("decoder.layers.2.") for p in layer.parameters() if p.spec.sequence_parallel}
    assert partial == {f"{norm}.{kind}" for norm in ("input_layernorm", "pre_mlp_layernorm") for kind in ("weight", "bias")} | {
        "self_attention.linear_proj.bias", "mlp.linear_fc2.bias"}


# Dropout sites ------------------------------------------------------------------------------------------------------------------

def test_every_site_of_every_layer_has_its_own_stream():
    streams = [layers.dropout_stream(layer, site) for layer in range(1, 100) for site in layers.SITES[:3]]
    streams.append(layers.dropout_stream(0, "embedding"))
    assert len(set(streams)) == len(streams)


def test_sites_and_layers_are_independent():
    ones = torch.ones(32, 4, 512)
    masks = [Ops.build().dropout(ones, 0.5, layers.hidden_dropout_key(SEED, layer, site, 0)) != 0
             for layer, site in ((1, "residual_1"), (1, "residual_2"), (2, "residual_1"), (0, "embedding"))]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).double().mean() - 0.5) < 5 * 0.5 / ones.numel() ** 0.5


def test_evaluation_has_no_dropout():
    x = random(S, B, H)
    dropped, _ = build("transformer", SoloComm(), hidden_dropout=0.4, attention_dropout=0.4)
    plain, _ = build("transformer", SoloComm())
    with torch.no_grad():
        training, evaluation = Pass(first_sample=0), Pass(first_sample=0, training=False)
        assert not torch.equal(dropped(x, training), plain(x, training))
        assert torch.equal(dropped(x, evaluation), plain(x, training))


def test_a_mask_belongs_to_the_sample():
    """The same sample in another micro-batch, and on another data-parallel rank, is dropped alike."""
    layer, _ = build("transformer", SoloComm(), hidden_dropout=0.4, attention_dropout=0.4)
    x = random(S, 4, H)
    with torch.no_grad():
        together = layer(x, Pass(first_sample=8))
        for i in range(4):
            alone = layer(x[:, i : i + 1].contiguous(), Pass(first_sample=8 + i))
            torch.testing.assert_close(alone, together[:, i : i + 1], rtol=1e-5, atol=1e-5)
        assert not torch.allclose(layer(x, Pass(first_sample=9)), together, atol=1e-3)
