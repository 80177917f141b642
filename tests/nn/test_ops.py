"""Every operation of a step against plain formulas under torch's autograd in double precision, and dropout's statistics."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.comm.autograd import copy_to_tensor_parallel
from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.host import kernels
from fugaku_megatron.nn.attention.heads import Heads
from fugaku_megatron.nn.dropout_key import Dropout
from fugaku_megatron.nn.ops import BACKENDS, FAMILIES, DropoutKey, Ops
from fugaku_megatron.nn.ops.activation import Activation
from fugaku_megatron.nn.ops.dropout import add_bias
from fugaku_megatron.nn.ops.loss import HeadLoss
from fugaku_megatron.nn.ops.mlp import MLPWeights
from fugaku_megatron.nn.ops.norm import NormArguments
from tests.checks.ops import (
    DTYPES,
    OUT,
    B,
    H,
    S,
    check,
    close,
    each_dtype,
    ops,
    parameter,
    plain_rms_norm,
    random,
)
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

__all__ = ["ops"]  # the fixture

KEY = DropoutKey(seed=5, stream=9, first_sample=40, sample_dim=1)


def plain_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def plain_gated_mlp(
    x: Tensor, w1: Tensor, w2: Tensor, b1: Tensor | None = None, function=F.silu
) -> Tensor:
    gates, values = (x @ w.t() + (0 if b1 is None else b1[i]) for i, w in enumerate(w1))
    return (function(gates) * values) @ w2.t()


def plain_attention(
    qkv: Tensor, d: int, groups: int = 0, window: int | None = None, keep: Tensor | None = None
) -> Tensor:
    """Head by head, each with its group's key and value; `keep` multiplies the probabilities (b, heads, s, s)."""
    s, b, width = qkv.shape
    groups = groups or width // (3 * d)
    each = width // (groups * d) - 2
    slots = qkv.view(s, b, groups, each + 2, d)
    heads = []
    distance = torch.arange(s)[:, None] - torch.arange(s)
    for head in range(groups * each):
        group, query = divmod(head, each)
        q, k, v = (
            slots[:, :, group, slot].transpose(0, 1) for slot in (query, each, each + 1)
        )  # (b, s, d)
        scores = (q @ k.transpose(1, 2) / d**0.5).masked_fill(
            (distance < 0) | (distance >= (window or s)), -math.inf
        )
        heads.append((scores.softmax(-1) * (1 if keep is None else keep[:, head])) @ v)
    return torch.cat(heads, -1).transpose(0, 1)


def both(results: tuple[Tensor, Tensor]) -> Tensor:
    """The new residual and its norm are both used, as in a layer."""
    return results[0] + 2 * results[1]


def norm(x: Tensor, *weights: Tensor) -> Tensor:
    return F.layer_norm(x, (H,), *weights, 1e-3)


NATIVE, P = Ops.build(), 0.4  # dropout's masks are the same on both backends
KEEP = NATIVE.dropout(torch.ones(S, B, H), Dropout(P, KEY)).double()
PLACE = DropoutKey(5, 9, 40, sample_dim=0, row0=S)
KEPT_SCORES = NATIVE.dropout(torch.ones(B, 4, S, S), Dropout(P, PLACE)).double()
X = (S, B, H)
W1 = (4 * H, H)
W2 = (H, 4 * H)
B1 = (4 * H,)
GATED = (2, 20, H)
OPERATIONS = {  # (with ops, in plain torch, shapes of inputs, shapes of weights, how many roundings more than one)
    "linear": (lambda o, *a: o.linear(*a), F.linear, [X], [(OUT, H), (OUT,)], 1),
    "linear, no bias": (lambda o, *a: o.linear(*a), F.linear, [X], [(OUT, H)], 1),
    "layer norm": (
        lambda o, x, w, c: o.norm(x, NormArguments(w, c, 1e-3)),
        norm,
        [X],
        [(H,), (H,)],
        1,
    ),
    "rms norm": (
        lambda o, x, w: o.norm(x, NormArguments(w, None, 1e-3)),
        plain_rms_norm,
        [X],
        [(H,)],
        1,
    ),
    "gelu": (lambda o, x: Activation("gelu").value(x), plain_gelu, [X], [], 1),
    "add bias": (lambda o, *a: add_bias(*a), torch.add, [X], [(H,)], 1),
    "mlp": (
        lambda o, x, *w: o.mlp(x, MLPWeights(*w)),
        lambda x, w1, b1, w2: plain_gelu(x @ w1.t() + b1) @ w2.t(),
        [X],
        [W1, B1, W2],
        3,
    ),
    "mlp, no bias": (
        lambda o, x, w1, w2: o.mlp(x, MLPWeights(w1, None, w2)),
        lambda x, w1, w2: plain_gelu(x @ w1.t()) @ w2.t(),
        [X],
        [W1, W2],
        3,
    ),
    "mlp, exact gelu": (
        lambda o, x, *w: o.mlp(x, MLPWeights(*w, activation=Activation("gelu_exact"))),
        lambda x, w1, b1, w2: F.gelu(x @ w1.t() + b1) @ w2.t(),
        [X],
        [W1, B1, W2],
        3,
    ),
    "mlp, squared relu": (
        lambda o, x, *w: o.mlp(x, MLPWeights(*w, activation=Activation("squared_relu"))),
        lambda x, w1, b1, w2: F.relu(x @ w1.t() + b1).square() @ w2.t(),
        [X],
        [W1, B1, W2],
        6,
    ),
    "mlp, gated gelu": (
        lambda o, x, w1, w2, b1: o.mlp(x, MLPWeights(w1, b1, w2, Activation("geglu"))),
        lambda *a: plain_gated_mlp(*a, function=plain_gelu),
        [X],
        [GATED, (H, 20), (2, 20)],
        4,
    ),
    "gated mlp": (
        lambda o, x, w1, w2, b1: o.mlp(x, MLPWeights(w1, b1, w2, Activation("swiglu"))),
        plain_gated_mlp,
        [X],
        [GATED, (H, 20), (2, 20)],
        4,
    ),
    "gated mlp, no bias": (
        lambda o, x, w1, w2: o.mlp(x, MLPWeights(w1, None, w2, Activation("swiglu"))),
        plain_gated_mlp,
        [X],
        [GATED, (H, 20)],
        4,
    ),
    "residual": (
        lambda o, x, r, b: o.bias_dropout_add(x, b, r, Dropout(P, KEY)),
        lambda x, r, b: r + (x + b) * KEEP,
        [X, X],
        [(H,)],
        2,
    ),
    "residual, no bias": (
        lambda o, x, r: o.bias_dropout_add(x, None, r, Dropout(P, KEY)),
        lambda x, r: r + x * KEEP,
        [X, X],
        [],
        2,
    ),
    "residual and layer norm": (
        lambda o, x, r, b, w, c: both(
            o.bias_dropout_add_norm(x, b, r, Dropout(P, KEY), NormArguments(w, c, 1e-3))
        ),
        lambda x, r, b, *w: both((total := r + (x + b) * KEEP, norm(total, *w))),
        [X, X],
        [(H,), (H,), (H,)],
        4,
    ),
    "residual and layer norm, no bias, no dropout": (
        lambda o, x, r, w, c: both(
            o.bias_dropout_add_norm(x, None, r, Dropout(0.0, KEY), NormArguments(w, c, 1e-3))
        ),
        lambda x, r, *w: both((x + r, norm(x + r, *w))),
        [X, X],
        [(H,), (H,)],
        4,
    ),
    "residual and rms norm": (
        lambda o, x, r, b, w: both(
            o.bias_dropout_add_norm(x, b, r, Dropout(P, KEY), NormArguments(w, None, 1e-3))
        ),
        lambda x, r, b, w: both((total := r + (x + b) * KEEP, plain_rms_norm(total, w))),
        [X, X],
        [(H,), (H,)],
        4,
    ),
    "residual and rms norm, no bias, no dropout": (
        lambda o, x, r, w: both(
            o.bias_dropout_add_norm(x, None, r, Dropout(0.0, KEY), NormArguments(w, None, 1e-3))
        ),
        lambda x, r, w: both((x + r, plain_rms_norm(x + r, w))),
        [X, X],
        [(H,)],
        4,
    ),
    "add position": (
        lambda o, x, w: o.add_position(x, w, 3),
        lambda x, w: x + w[3 : 3 + S].unsqueeze(1),
        [X],
        [(S + 4, H)],
        1,
    ),
    "attention": (
        lambda o, x: o.attention(x, Heads(H // 4, H // 4, 4), Dropout(0.0, PLACE)),
        lambda x: plain_attention(x, 4),
        [(S, B, 3 * H)],
        [],
        2,
    ),
    "attention, dropout": (
        lambda o, x: o.attention(x, Heads(4, 4, 4), Dropout(P, PLACE)),
        lambda x: plain_attention(x, 4, keep=KEPT_SCORES),
        [(S, B, 3 * 16)],
        [],
        4,
    ),
    "attention, groups": (
        lambda o, x: o.attention(x, Heads(4, 2, 8), Dropout(P, PLACE)),
        lambda x: plain_attention(x, 8, 2, None, KEPT_SCORES),
        [(S, B, 8 * 8)],
        [],
        4,
    ),
    "attention, one group and a window": (
        lambda o, x: o.attention(x, Heads(4, 1, 8), Dropout(P, PLACE), 3),
        lambda x: plain_attention(x, 8, 1, 3, KEPT_SCORES),
        [(S, B, 6 * 8)],
        [],
        4,
    ),
    "attention, a window of one": (
        lambda o, x: o.attention(x, Heads(2, 2, 8), Dropout(0.0, PLACE), 1),
        lambda x: plain_attention(x, 8, 2, 1),
        [(S, B, 6 * 8)],
        [],
        4,
    ),
    "attention, a window beyond": (
        lambda o, x: o.attention(x, Heads(3, 3, 8), Dropout(0.0, PLACE), 7),
        lambda x: plain_attention(x, 8, 3),
        [(S, B, 9 * 8)],
        [],
        4,
    ),
}


@each_dtype
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_its_formula(ops, name, operation):
    dtype, tolerance = DTYPES[name]
    op, plain, inputs, weights, roundings = OPERATIONS[operation]
    own = [random(*shape, seed=7 * i, dtype=dtype) * 2 for i, shape in enumerate(inputs)]
    scaled = [
        random(*shape, seed=i, dtype=dtype) / shape[-1] ** 0.5 for i, shape in enumerate(weights, 1)
    ]
    check(lambda *a: op(ops, *a), plain, own, scaled, roundings * tolerance)


def head_losses(
    ops, ranks, x, table, labels, rows_at_once, words=None, **options
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(loss, gradient of x, gradient of its part of the table (16, H)) of each rank."""

    def part(tp):
        own = parameter(table.chunk(tp.size)[tp.rank].clone())
        first_row = tp.rank * 16 // tp.size
        leaf = x.clone().requires_grad_()
        own_words = None if words is None else min(max(0, words - first_row), len(own))
        loss = (
            ops.head_loss(
                copy_to_tensor_parallel(leaf, tp),
                own,
                labels,
                HeadLoss(tp, first_row, 0.25, rows_at_once, own_words, **options),
            )
            * 0.25
        )
        loss.backward()
        return loss, leaf.grad, own.main_grad

    return ThreadWorld(ranks).run(part)


@each_dtype
@pytest.mark.parametrize(
    ("ranks", "words", "rows_at_once"),
    [(1, 16, None), (2, 16, 4), (1, 13, 4), (2, 13, None), (4, 3, None)],
)
def test_head_loss(ops, name, ranks, words, rows_at_once):
    """The words' logits are near -60, so that the other 16 - words rows would have all of the softmax; some
    ranks have no word at all."""
    dtype, tolerance = DTYPES[name]
    x = random(S, B, H, dtype=dtype)
    table = random(16, H, seed=1, dtype=dtype)
    x[..., 0] = 1.0
    table[:words, 0] = -60.0
    table[words:, 0] = 0.0
    labels = torch.randint(0, words, (S, B), generator=torch.Generator().manual_seed(1))
    exact = [t.double().requires_grad_() for t in (x, table)]
    expected = (
        F.cross_entropy((exact[0] @ exact[1][:words].t()).flatten(0, 1), labels.flatten()) * 0.25
    )
    exact_gradient = torch.autograd.grad(expected, exact)

    results = head_losses(ops, ranks, x, table, labels, rows_at_once, words)
    gradient = torch.cat([grad for *_, grad in results])
    tolerance *= (
        20 if ops.choice["loss"] == "torch" else 4
    )  # torch's logits are in the dtype of x, and 60 has few digits there
    for loss, grad, _ in results:
        close(loss, expected, tolerance)
        close(grad, exact_gradient[0], tolerance)
    close(gradient[:words] - 0.5, exact_gradient[1][:words], tolerance)
    assert (gradient[words:] == 0.5).all(), "nothing is added to the rows of padding"


@each_dtype
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(
    ("ranks", "rows_at_once", "count"), [(1, None, 3), (1, 4, 1000), (2, 4, None), (4, None, 7)]
)
def test_head_loss_of_some_rows(ops, name, ranks, rows_at_once, count, z_loss):
    """Rows with a label of -1 count nothing, even where their logits are infinite; the sum is divided by `count`."""
    dtype, tolerance = DTYPES[name]
    x = random(S, B, H, dtype=dtype)
    table = random(16, H, seed=1, dtype=dtype)
    labels = torch.randint(0, 16, (S, B), generator=torch.Generator().manual_seed(1))
    ignored = torch.zeros(S, B, dtype=torch.bool)
    ignored[1:] = True
    ignored[2, -1] = False
    exact = [t.double().requires_grad_() for t in (x, table)]
    logits = (exact[0] @ exact[1].t())[~ignored]
    rows = (
        F.cross_entropy(logits, labels[~ignored], reduction="none")
        + z_loss * logits.logsumexp(-1) ** 2
    )
    expected = rows.sum() / (count or S * B) * 0.25
    exact_gradient = torch.autograd.grad(expected, exact)
    x[ignored] = torch.finfo(dtype).max

    results = head_losses(
        ops,
        ranks,
        x,
        table,
        labels.masked_fill(ignored, -1),
        rows_at_once,
        z_loss=z_loss,
        divisor=count,
    )
    tolerance *= 10 if ops.choice["loss"] == "torch" else 4  # torch's logits are in the dtype of x
    for loss, grad, _ in results:
        close(loss, expected, tolerance)
        close(grad, exact_gradient[0], tolerance)
        assert not grad[ignored].any()
    close(torch.cat([grad for *_, grad in results]) - 0.5, exact_gradient[1], tolerance)


def test_the_count_of_a_head_loss_is_its_rows_by_default(ops):
    def loss(count):
        x = random(S, B, H).requires_grad_()
        table = parameter(random(16, H, seed=1))
        value = (
            ops.head_loss(
                x,
                table,
                torch.arange(S * B).view(S, B) % 16,
                HeadLoss(SoloComm(), 0, 0.3, divisor=count),
            )
            * 0.3
        )
        value.backward()
        return torch.cat([value.detach().view(1), x.grad.flatten(), table.main_grad.flatten()])

    assert torch.equal(loss(None), loss(S * B))


def test_head_loss_without_gradients(ops):
    x = random(S, B, H)
    table = parameter(random(16, H, seed=1))
    with torch.no_grad():
        loss = ops.head_loss(
            x, table, torch.zeros(S, B, dtype=torch.int64), HeadLoss(SoloComm(), 0, 1.0)
        )
    assert math.isfinite(loss) and torch.equal(table.main_grad, torch.full((16, H), 0.5))


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


@pytest.fixture
def portable():
    """A target that can sum in FP16."""
    with kernels.target("portable"):
        yield


def results(ops: Ops, dtype: torch.dtype) -> list[Tensor]:
    """Everything that linear and mlp compute, forward and backward."""
    f = 4 * H
    weights = [
        parameter(random(*shape, seed=i, dtype=dtype))
        for i, shape in enumerate([(H, H), (H,), (f, H), (f,), (H, f)])
    ]
    x = random(S, B, H, dtype=dtype).requires_grad_()
    y = ops.linear(x, *weights[:2])
    z = ops.mlp(x, MLPWeights(*weights[2:]))
    (y.sum() + z.sum()).backward()
    return [y.detach(), z.detach(), x.grad, *(w.main_grad for w in weights)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_linear_layers_sum_in_fp16_on_request(backend, dtype, portable):
    """Eight terms at a time."""
    tensors, expected = (
        results(Ops.build(backend, fp16_sum_length=chunk), dtype) for chunk in (8, 0)
    )
    for other, exact in zip(tensors, expected):
        close(other, exact.double(), 1e-2)
    in_fp16 = backend == "native" and dtype == torch.float16
    linear_bias = 4  # its gradient is a sum of dy in FP32
    assert [torch.equal(a, b) for a, b in zip(tensors, expected)] == [
        not in_fp16 or i == linear_bias for i in range(8)
    ]


def test_logits_are_summed_in_fp32(portable):
    def loss(ops: Ops) -> Tensor:
        weight = parameter(random(16, H, seed=1, dtype=torch.float16))
        x = random(S, B, H, dtype=torch.float16).requires_grad_()
        value = ops.head_loss(
            x, weight, torch.arange(S * B).view(S, B), HeadLoss(SoloComm(), 0, 1.0)
        )
        value.backward()
        return torch.cat(
            [value.detach().view(1), x.grad.float().flatten(), weight.main_grad.flatten()]
        )

    assert torch.equal(loss(Ops.build(fp16_sum_length=8)), loss(Ops.build()))


def test_packed_weights_follow_the_optimizer_and_the_target():
    ops = Ops.build(keep_packed_weights=True)
    weight = parameter(random(OUT, H))
    x = random(S, B, H)
    for change in range(2):
        with torch.no_grad():
            weight.add_(change)
        ops.weights_changed()
        assert torch.equal(ops.linear(x, weight), Ops.build().linear(x, weight))
    with torch.no_grad():
        weight.add_(1)
    assert not torch.equal(ops.linear(x, weight), Ops.build().linear(x, weight)), (
        "packed before the change, which was not told"
    )
    with kernels.target("portable"):
        close(ops.linear(x, weight), x.double() @ weight.double().t(), 2e-6)


def test_each_family_has_its_backend():
    assert Ops.build().choice == dict.fromkeys(FAMILIES, "native")
    assert Ops.build({"loss": "torch"}).choice == {
        **dict.fromkeys(FAMILIES, "native"),
        "loss": "torch",
    }
    with pytest.raises(ValueError, match="native or torch"):
        Ops.build("cuda")
    with pytest.raises(ValueError, match="gemm"):
        Ops.build({"gem": "native"})


def mask(p: float, *, shape: tuple[int, ...] = (32, 8, 512), **place) -> Tensor:
    """1 where an element is kept."""
    return (
        NATIVE.dropout(torch.ones(shape), Dropout(p, DropoutKey(**{**vars(KEY), **place}))) != 0
    ).double()


@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_keeps_and_scales(ops, p):
    x = random(32, 8, 512) + 10.0
    y = ops.dropout(x, Dropout(p, KEY))
    kept = mask(p)
    torch.testing.assert_close(y, x / (1 - p) * kept.float(), rtol=1e-6, atol=0)
    n = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n), "the share that is kept"
    for dim in range(3):  # every row, sample and column on its own
        share = kept.mean([d for d in range(3) if d != dim])
        assert (share - (1 - p)).abs().max() < 5.5 * math.sqrt(p * (1 - p) * kept.shape[dim] / n)


def test_dropout_backward_has_the_same_mask_and_p_0_is_the_identity(ops):
    x = random(32, 8, 512).requires_grad_()
    ops.dropout(x, Dropout(0.3, KEY)).sum().backward()
    assert torch.equal(x.grad, mask(0.3).float() / torch.tensor(0.7))
    assert ops.dropout(x, Dropout(0.0, KEY)) is x


def correlation(a: Tensor, b: Tensor) -> float:
    a = a - a.mean()
    b = b - b.mean()
    return ((a * b).mean() / (a.std() * b.std())).item()


def test_masks_of_seeds_streams_samples_and_rows_are_independent():
    first = mask(0.5)
    limit = 5 / math.sqrt(32 * 8 * 512)
    for other in ({"seed": 6}, {"stream": 10}, {"stream": 8}, {"first_sample": 48}, {"row0": 32}):
        assert abs(correlation(first, mask(0.5, **other))) < limit, other
    assert abs(correlation(first[:, :-1], first[:, 1:])) < limit, "samples"
    assert (
        abs(correlation(first[:-1], first[1:])) < limit
        and abs(correlation(first[..., :-1], first[..., 1:])) < limit
    )
    assert torch.equal(first, mask(0.5))


def test_a_mask_is_a_function_of_the_place():
    whole = mask(0.5, first_sample=0)
    assert torch.equal(whole[:, 3:5], mask(0.5, first_sample=3, shape=(32, 2, 512))), "samples"
    assert torch.equal(whole[10:20], mask(0.5, first_sample=0, row0=10, shape=(10, 8, 512))), "rows"
    scores = mask(0.5, sample_dim=0, shape=(4, 6, 16, 16))  # (b, heads, s, s)
    part = mask(
        0.5, sample_dim=0, first_sample=KEY.first_sample + 1, row0=2 * 16, shape=(2, 2, 16, 16)
    )
    assert torch.equal(scores[1:3, 2:4], part), "heads"


def test_packed_copies_of_a_gated_weight_are_kept():
    """The matmul takes the two matrices as one, which is the same one at every call."""
    ops = Ops.build(keep_packed_weights=True)
    x = random(S, B, H).requires_grad_()
    w1 = parameter(random(2, 20, H))
    w2 = parameter(random(H, 20))
    for _ in range(3):
        ops.mlp(x, MLPWeights(w1, None, w2, Activation("swiglu"))).sum().backward()
    assert len(ops.weight_cache._entries) == 4  # two weights, forward and backward
