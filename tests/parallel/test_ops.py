"""Every operation of a step against plain formulas under torch's autograd in double precision, and dropout's statistics."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.comm.autograd import copy_to_tensor_parallel
from fugaku_megatron.comm.solo import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.nn import torch_ops
from fugaku_megatron.nn.ops import BACKENDS, FAMILIES, DropoutKey, Ops, recompute
from tests.threads import ThreadWorld

S, B, H, OUT = 5, 3, 12, 7
DTYPES = {"fp32": (torch.float32, 2e-6), "bf16": (torch.bfloat16, 3e-2), "fp16": (torch.float16, 4e-3)}
KEY = DropoutKey(seed=5, stream=9, first_sample=40, sample_dim=1)


NATIVE = Ops.build()  # dropout's masks are the same on both


@pytest.fixture(params=["native", "torch"])
def ops(request):
    torch.set_num_threads(1)
    return Ops.build(request.param)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def parameter(tensor: Tensor) -> torch.nn.Parameter:
    """As optim.FlatParameters makes them: with an FP32 gradient, which here is not zero to begin with."""
    made = torch.nn.Parameter(tensor)
    made.main_grad = torch.full(tensor.shape, 0.5)
    return made


def check(op, plain, inputs: list[Tensor], weights: list[Tensor], tolerance: float) -> None:
    """op(*inputs, *weights) against plain(the same in double): output, input gradients, and weight gradients added twice."""
    parameters = [parameter(w) for w in weights]
    exact = [t.detach().double().requires_grad_() for t in (*inputs, *weights)]
    expected = plain(*exact)
    dy = random(*expected.shape, seed=77, dtype=inputs[0].dtype)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    for times in (1, 2):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        y = op(*leaves, *parameters)
        assert y.dtype == inputs[0].dtype and y.shape == expected.shape
        y.backward(dy)
        close(y, expected, tolerance)
        for leaf, exact_gradient in zip(leaves, gradients):
            close(leaf.grad, exact_gradient, tolerance)
        for p, exact_gradient in zip(parameters, gradients[len(inputs):]):
            assert p.grad is None and p.main_grad.dtype == torch.float32
            close(p.main_grad, 0.5 + times * exact_gradient, tolerance * times)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=0, atol=tolerance * max(1.0, scale))


each_dtype = pytest.mark.parametrize("name", DTYPES)


@each_dtype
@pytest.mark.parametrize("bias", [True, False])
def test_linear(ops, name, bias):
    dtype, tolerance = DTYPES[name]
    weights = [random(OUT, H, seed=1, dtype=dtype), *([random(OUT, seed=2, dtype=dtype)] if bias else [])]
    check(ops.linear, F.linear, [random(S, B, H, dtype=dtype)], weights, tolerance)


@each_dtype
def test_layer_norm(ops, name):
    dtype, tolerance = DTYPES[name]
    x = random(S, B, H, dtype=dtype) * 3 + 1
    check(lambda *a: ops.layer_norm(*a, 1e-3), lambda x, w, b: F.layer_norm(x, (H,), w, b, 1e-3), [x],
          [random(H, seed=1, dtype=dtype), random(H, seed=2, dtype=dtype)], tolerance)


@each_dtype
def test_gelu(name):
    dtype, tolerance = DTYPES[name]
    check(torch_ops.gelu, lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
          [random(S, B, H, dtype=dtype) * 3], [], tolerance)


@each_dtype
def test_add_bias(name):
    dtype, tolerance = DTYPES[name]
    check(torch_ops.add_bias, lambda x, b: x + b, [random(S, B, H, dtype=dtype)], [random(H, seed=1, dtype=dtype)], tolerance)


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@each_dtype
def test_mlp(ops, name):
    dtype, tolerance = DTYPES[name]
    weights = [random(4 * H, H, seed=1, dtype=dtype), random(4 * H, seed=2, dtype=dtype), random(H, 4 * H, seed=3, dtype=dtype) / 4]
    check(ops.mlp, lambda x, w1, b1, w2: plain_gelu(x @ w1.t() + b1) @ w2.t(), [random(S, B, H, dtype=dtype)], weights,
          3 * tolerance)


@each_dtype
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_layers_without_biases(ops, name, p):
    dtype, tolerance = DTYPES[name]
    keep = NATIVE.dropout(torch.ones(S, B, H), p, KEY).double()
    x, residual = random(S, B, H, dtype=dtype), random(S, B, H, seed=5, dtype=dtype)
    check(lambda x, w1, w2: ops.mlp(x, w1, None, w2), lambda x, w1, w2: plain_gelu(x @ w1.t()) @ w2.t(), [x],
          [random(4 * H, H, seed=1, dtype=dtype), random(H, 4 * H, seed=3, dtype=dtype) / 4], 3 * tolerance)
    check(lambda x, r: ops.bias_dropout_add(x, None, r, p, KEY), lambda x, r: r + x * keep, [x, residual], [], 2 * tolerance)
    check(lambda x, r, w, c: ops.bias_dropout_add_layer_norm(x, None, r, p, KEY, w, c, 1e-3)[1],
          lambda x, r, w, c: F.layer_norm(r + x * keep, (H,), w, c, 1e-3), [x, residual],
          [random(H, seed=i, dtype=dtype) for i in (1, 2)], 4 * tolerance)


@each_dtype
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_bias_dropout_add(ops, name, p):
    dtype, tolerance = DTYPES[name]
    keep = ops.dropout(torch.ones(S, B, H), p, KEY).double()
    check(lambda x, r, b: ops.bias_dropout_add(x, b, r, p, KEY), lambda x, r, b: r + (x + b) * keep,
          [random(S, B, H, dtype=dtype), random(S, B, H, seed=5, dtype=dtype)], [random(H, seed=1, dtype=dtype)], 2 * tolerance)


@each_dtype
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_bias_dropout_add_layer_norm(ops, name, p):
    """Both results are used, as in a layer: their sum, the norm doubled."""
    dtype, tolerance = DTYPES[name]
    keep = ops.dropout(torch.ones(S, B, H), p, KEY).double()

    def fused(x, r, b, w, c):
        total, y = ops.bias_dropout_add_layer_norm(x, b, r, p, KEY, w, c, 1e-3)
        return total + 2 * y

    def plain(x, r, b, w, c):
        total = r + (x + b) * keep
        return total + 2 * F.layer_norm(total, (H,), w, c, 1e-3)

    weights = [random(H, seed=i, dtype=dtype) for i in (1, 2, 3)]
    check(fused, plain, [random(S, B, H, dtype=dtype), random(S, B, H, seed=5, dtype=dtype)], weights, 4 * tolerance)


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("rows_at_once", [None, 4])
def test_head_loss(ops, name, ranks, rows_at_once):
    """In one chunk and in several, over one and two tensor-parallel ranks."""
    dtype, tolerance = DTYPES[name]
    x, table, factor = random(S, B, H, dtype=dtype), random(16, H, seed=1, dtype=dtype), 0.25
    labels = torch.randint(0, 16, (S, B), generator=torch.Generator().manual_seed(1))
    exact = [t.double().requires_grad_() for t in (x, table)]
    expected = F.cross_entropy((exact[0] @ exact[1].t()).flatten(0, 1), labels.flatten()) * factor
    exact_gradient = torch.autograd.grad(expected, exact)

    def part(tp):
        own = parameter(table.chunk(tp.size)[tp.rank].clone())
        leaf = x.clone().requires_grad_()
        first_row = tp.rank * 16 // tp.size
        loss = ops.head_loss(copy_to_tensor_parallel(leaf, tp), own, labels, tp, first_row, factor, rows_at_once) * factor
        loss.backward()
        return loss, leaf.grad, own.main_grad - 0.5

    results = ThreadWorld(ranks).run(part)
    for loss, grad, _ in results:
        close(loss, expected, tolerance)
        close(grad, exact_gradient[0], tolerance)
    close(torch.cat([grad for *_, grad in results]), exact_gradient[1], tolerance)


@each_dtype
@pytest.mark.parametrize(("ranks", "words"), [(1, 13), (2, 13), (4, 9), (4, 3)])
@pytest.mark.parametrize("rows_at_once", [None, 4])
def test_head_loss_masks_what_is_no_word(ops, name, ranks, words, rows_at_once):
    """The words' logits are near -60, so that other rows would have all of the softmax; some ranks have no word at all."""
    dtype, tolerance = DTYPES[name]
    x, table = random(S, B, H, dtype=dtype), random(16, H, seed=1, dtype=dtype)
    x[..., 0], table[:words, 0], table[words:, 0] = 1.0, -60.0, 0.0
    labels = torch.randint(0, words, (S, B), generator=torch.Generator().manual_seed(1))
    exact = [t.double().requires_grad_() for t in (x, table)]
    expected = F.cross_entropy((exact[0] @ exact[1][:words].t()).flatten(0, 1), labels.flatten())
    exact_gradient = torch.autograd.grad(expected, exact)

    def part(tp):
        own, first_row = parameter(table.chunk(tp.size)[tp.rank].clone()), tp.rank * 16 // tp.size
        leaf, own_words = x.clone().requires_grad_(), min(max(0, words - first_row), len(own))
        loss = ops.head_loss(copy_to_tensor_parallel(leaf, tp), own, labels, tp, first_row, 1.0, rows_at_once, own_words)
        loss.backward()
        return loss, leaf.grad, own.main_grad

    results = ThreadWorld(ranks).run(part)
    gradient = torch.cat([grad for *_, grad in results])
    tolerance *= 20 if ops.choice["loss"] == "torch" else 4  # torch's logits are in the dtype of x, and 60 has few digits there
    for loss, grad, _ in results:
        close(loss, expected, tolerance)
        close(grad, exact_gradient[0], tolerance)
    close(gradient[:words] - 0.5, exact_gradient[1][:words], tolerance)
    assert (gradient[words:] == 0.5).all(), "nothing at all is added to rows that are no words"


def test_head_loss_without_gradients(ops):
    x, table = random(S, B, H), parameter(random(16, H, seed=1))
    with torch.no_grad():
        loss = ops.head_loss(x, table, torch.zeros(S, B, dtype=torch.int64), SoloComm(), 0, 1.0)
    assert math.isfinite(loss) and torch.equal(table.main_grad, torch.full((16, H), 0.5))


@each_dtype
@pytest.mark.parametrize("first", [0, 3])
def test_add_position(ops, name, first):
    dtype, tolerance = DTYPES[name]
    check(lambda x, w: ops.add_position(x, w, first), lambda x, w: x + w[first : first + S].unsqueeze(1),
          [random(S, B, H, dtype=dtype)], [random(S + 4, H, seed=1, dtype=dtype)], tolerance)


@each_dtype
@pytest.mark.parametrize("first_row", [0, 4])
def test_embedding(ops, name, first_row):
    """Tokens repeat, and with first_row some rows belong to other ranks."""
    dtype, tolerance = DTYPES[name]
    tokens = torch.tensor([[0, 3, 9], [3, 3, 12], [4, 5, 6]])  # (s, b)
    tokens = tokens if first_row else tokens.clamp(max=7)
    table = parameter(random(8, H, dtype=dtype))
    exact = table.detach().double().requires_grad_()
    mine = (tokens >= first_row) & (tokens < first_row + 8)
    expected = exact[(tokens - first_row).where(mine, 0)] * mine.unsqueeze(-1)
    dy = random(3, 3, H, seed=3, dtype=dtype)
    (exact_gradient,) = torch.autograd.grad(expected, exact, dy.double())
    for times in (1, 2):
        y = ops.embedding(tokens, table, first_row)
        y.backward(dy)
        assert y.dtype == dtype
        close(y, expected, 0.0)
        close(table.main_grad, 0.5 + times * exact_gradient, 1e-6)


def plain_attention(qkv: Tensor, d: int, keep: Tensor | float = 1.0) -> Tensor:
    """The textbook's formula, head by head, on (s, b, n 3 d); `keep` multiplies the probabilities (b, n, s, s)."""
    s, b, width = qkv.shape
    query, key, value = qkv.view(s, b, width // (3 * d), 3, d).permute(3, 1, 2, 0, 4)
    scores = (query @ key.transpose(-1, -2) / math.sqrt(d)).masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf)
    return ((scores.softmax(-1) * keep) @ value).permute(2, 0, 1, 3).reshape(s, b, -1)


@each_dtype
def test_attention(ops, name):
    dtype, tolerance = DTYPES[name]
    place = DropoutKey(1, 2, 3, sample_dim=0)
    check(lambda x: ops.attention(x, 4, 0.0, place), lambda x: plain_attention(x, 4), [random(S, B, 3 * H, dtype=dtype)], [],
          2 * tolerance)


@each_dtype
def test_attention_with_dropout_on_its_probabilities(ops, name):
    dtype, tolerance = DTYPES[name]
    place = DropoutKey(1, 2, 3, sample_dim=0)
    keep = ops.dropout(torch.ones(B, 3, S, S), 0.4, place).double()
    check(lambda x: ops.attention(x, 4, 0.4, place), lambda x: plain_attention(x, 4, keep), [random(S, B, 3 * H, dtype=dtype)], [],
          3 * tolerance)


def test_attention_does_not_look_ahead(ops):
    x = random(S, B, 3 * H).requires_grad_()
    for t in range(S):
        (grad,) = torch.autograd.grad(ops.attention(x, 4, 0.0, KEY)[t].sum(), x)
        assert not grad[t + 1 :].any() and grad[t].any()


@each_dtype
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vocab_parallel_cross_entropy(name, ranks):
    dtype, tolerance = DTYPES[name]
    vocabulary = 16
    logits = (random(S, B, vocabulary) * 5 + 60).to(dtype)  # far from 0: exp would overflow without the maximum
    labels = torch.randint(0, vocabulary, (S, B), generator=torch.Generator().manual_seed(1))
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    weight = random(S, B, seed=4)
    (exact_gradient,) = torch.autograd.grad(expected, exact, weight.double())

    def part(tp):
        own = logits.chunk(tp.size, -1)[tp.rank].contiguous().requires_grad_()
        loss = torch_ops.vocab_parallel_cross_entropy(own, labels, tp, tp.rank * vocabulary // tp.size)
        loss.backward(weight)
        return loss, own.grad

    results = ThreadWorld(ranks).run(part)
    for loss, _ in results:
        assert loss.dtype == torch.float32
        close(loss, expected, 2e-6)
    gradient = torch.cat([grad for _, grad in results], -1)
    assert gradient.dtype == dtype
    close(gradient, exact_gradient, tolerance)


# Sums in FP16 -------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def portable():
    """A target that can sum in FP16."""
    with kernels.target("portable"):
        yield


def results(ops: Ops, dtype: torch.dtype) -> list[Tensor]:
    """Everything that linear and mlp compute, forward and backward."""
    f = 4 * H
    weights = [parameter(random(*shape, seed=i, dtype=dtype)) for i, shape in enumerate([(H, H), (H,), (f, H), (f,), (H, f)])]
    x = random(S, B, H, dtype=dtype).requires_grad_()
    y, z = ops.linear(x, *weights[:2]), ops.mlp(x, *weights[2:])
    (y.sum() + z.sum()).backward()
    return [y.detach(), z.detach(), x.grad, *(w.main_grad for w in weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_linear_layers_sum_in_fp16_on_request(backend, dtype, portable):
    """Eight products at a time."""
    tensors, expected = (results(Ops.build(backend, fp16_chunk=chunk), dtype) for chunk in (8, 0))
    for other, exact in zip(tensors, expected):
        close(other, exact.double(), 1e-2)
    in_fp16 = backend == "native" and dtype == torch.float16
    linear_bias = 4  # its gradient is a sum of dy in FP32
    assert [torch.equal(a, b) for a, b in zip(tensors, expected)] == [not in_fp16 or i == linear_bias for i in range(8)]


def test_logits_are_summed_in_fp32(portable):
    def loss(ops: Ops) -> Tensor:
        weight = parameter(random(16, H, seed=1, dtype=torch.float16))
        x = random(S, B, H, dtype=torch.float16).requires_grad_()
        value = ops.head_loss(x, weight, torch.arange(S * B).view(S, B), SoloComm(), 0, 1.0)
        value.backward()
        return torch.cat([value.detach().view(1), x.grad.float().flatten(), weight.main_grad.flatten()])

    assert torch.equal(loss(Ops.build(fp16_chunk=8)), loss(Ops.build()))


# Packed weights -----------------------------------------------------------------------------------------------------------------

def test_packed_weights_follow_the_optimizer_and_the_target():
    ops, weight = Ops.build(keep_packed_weights=True), parameter(random(OUT, H))
    x = random(S, B, H)
    for change in range(2):
        with torch.no_grad():
            weight.add_(change)
        ops.weights_changed()
        assert torch.equal(ops.linear(x, weight), Ops.build().linear(x, weight))
    with torch.no_grad():
        weight.add_(1)
    assert not torch.equal(ops.linear(x, weight), Ops.build().linear(x, weight)), "packed before the change, as nobody told"
    with kernels.target("portable"):
        close(ops.linear(x, weight), x.double() @ weight.double().t(), 2e-6)


# Choices ------------------------------------------------------------------------------------------------------------------------

def test_each_family_has_its_backend():
    assert Ops.build().choice == dict.fromkeys(FAMILIES, "native")
    assert Ops.build({"loss": "torch"}).choice == {**dict.fromkeys(FAMILIES, "native"), "loss": "torch"}
    with pytest.raises(ValueError, match="native or torch"):
        Ops.build("cuda")
    with pytest.raises(ValueError, match="gemm"):
        Ops.build({"gem": "native"})


# Dropout ------------------------------------------------------------------------------------------------------------------------

def mask(p: float, *, shape: tuple[int, ...] = (32, 8, 512), **place) -> Tensor:
    """1 where an element is kept."""
    return (NATIVE.dropout(torch.ones(shape), p, DropoutKey(**{**vars(KEY), **place})) != 0).double()


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_and_scales(ops, p):
    x = random(32, 8, 512) + 10.0
    y, kept = ops.dropout(x, p, KEY), mask(p)
    torch.testing.assert_close(y, x / (1 - p) * kept.float(), rtol=1e-6, atol=0)
    n = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n), "the share that is kept"
    for dim in range(3):  # every row, sample and column on its own
        share = kept.mean([d for d in range(3) if d != dim])
        assert (share - (1 - p)).abs().max() < 5.5 * math.sqrt(p * (1 - p) * kept.shape[dim] / n)


def test_dropout_backward_has_the_same_mask_and_p_0_is_the_identity(ops):
    x = random(32, 8, 512).requires_grad_()
    ops.dropout(x, 0.3, KEY).sum().backward()
    assert torch.equal(x.grad, mask(0.3).float() / torch.tensor(0.7))
    assert ops.dropout(x, 0.0, KEY) is x


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    return ((a * b).mean() / (a.std() * b.std())).item()


def test_masks_of_seeds_streams_samples_and_rows_are_independent():
    first, limit = mask(0.5), 5 / math.sqrt(32 * 8 * 512)
    for other in ({"seed": 6}, {"stream": 10}, {"stream": 8}, {"first_sample": 48}, {"row0": 32}):
        assert abs(correlation(first, mask(0.5, **other))) < limit, other
    assert abs(correlation(first[:, :-1], first[:, 1:])) < limit, "samples"
    assert abs(correlation(first[:-1], first[1:])) < limit and abs(correlation(first[..., :-1], first[..., 1:])) < limit
    assert torch.equal(first, mask(0.5))


def test_a_mask_is_a_function_of_the_place():
    whole = mask(0.5, first_sample=0)
    assert torch.equal(whole[:, 3:5], mask(0.5, first_sample=3, shape=(32, 2, 512))), "samples"
    assert torch.equal(whole[10:20], mask(0.5, first_sample=0, row0=10, shape=(10, 8, 512))), "rows"
    scores = mask(0.5, sample_dim=0, shape=(4, 6, 16, 16))  # (b, heads, s, s)
    part = mask(0.5, sample_dim=0, first_sample=KEY.first_sample + 1, row0=2 * 16, shape=(2, 2, 16, 16))
    assert torch.equal(scores[1:3, 2:4], part), "heads"


def test_recompute_has_the_same_bits_and_keeps_no_intermediate(ops):
    weight = parameter(random(H, H, seed=3))
    saved = []

    def block(x: Tensor, scale: float) -> Tensor:
        return ops.dropout(torch_ops.gelu(ops.linear(x, weight)) * scale, 0.3, KEY)

    def step(again: bool) -> tuple[Tensor, Tensor, Tensor, int]:
        saved.clear()
        weight.main_grad.zero_()
        x = random(S, B, H).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            y = recompute(block, x, 2.0) if again else block(x, 2.0)
        held = sum(saved)
        y.square().sum().backward()
        return y.detach(), x.grad, weight.main_grad.clone(), held

    plain, again = step(False), step(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[:3], again[:3]))
    assert again[3] == S * B * H < plain[3]


def test_mlp_for_backward_alone_has_the_same_gradients(ops):
    weights = [parameter(random(*shape, seed=3)) for shape in ((4 * H, H), (4 * H,), (H, 4 * H))]

    def step(needs_values: bool) -> list[Tensor]:
        for weight in weights:
            weight.main_grad.zero_()
        x = random(S, B, H).requires_grad_()
        ops.mlp(x, *weights, needs_values).backward(random(S, B, H, seed=5))
        return [x.grad, *(weight.main_grad.clone() for weight in weights)]

    assert all(torch.equal(a, b) for a, b in zip(step(True), step(False)))


def test_size_1_needs_no_communication():
    loss = torch_ops.vocab_parallel_cross_entropy(torch.zeros(S, B, 8), torch.zeros(S, B, dtype=torch.int64), SoloComm(), 0)
    torch.testing.assert_close(loss, torch.full((S, B), math.log(8)))
