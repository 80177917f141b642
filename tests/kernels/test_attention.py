"""Causal attention against a double-precision softmax(Q K^T) V and its autograd. python -m pytest tests/kernels/test_attention.py

Shapes: qkv (s, b, heads * 3 * d), out (s, b, heads * d), lse (b, heads, s).
"""

import functools
import math

import pytest
import torch

from fugaku_megatron.host import kernels

DROPOUT = {"p": 0.3, "seed": 3, "stream": 4, "first_sample": 5, "first_head": 2}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# s around the vector lengths 4, 8 and 16 and the tiles of 12, 24, 48 and 96; heads of every usual size
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 47, 48, 49, 61, 97, 101, 129]
HEAD_SIZES = [4, 8, 64, 80, 92, 96, 128, 12, 20, 64, 4, 36, 64, 8, 128, 80, 92, 64, 96]
SHAPES = [(s, 1 + s % 3, 1 + s % 5, d) for s, d in zip(LENGTHS, HEAD_SIZES, strict=True)]
SHAPES += [(257, 1, 2, 64), (193, 2, 1, 128), (13, 6, 3, 8)]


def make(s, b, heads, d, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(s, b, heads * 3 * d, generator=generator).to(dtype)
    return qkv, torch.randn(s, b, heads * d, generator=generator).to(dtype)


def attention(qkv, dout, heads, **dropout):
    """(out, lse, dqkv) of the kernels, every output full of NaN before."""
    s, b, width = qkv.shape
    out = torch.full((s, b, width // 3), math.nan, dtype=qkv.dtype)
    lse, dqkv = torch.full((b, heads, s), math.nan), torch.full_like(qkv, math.nan)
    kernels.attention_forward(qkv, out, lse, **dropout)
    kernels.attention_backward(qkv, out, lse, dout, dqkv, **dropout)
    return out, lse, dqkv


def explicit(qkv, dout, heads, p=0.0, seed=0, stream=0, first_sample=0, first_head=0):
    """The same from the formula in double, with the mask of kernels.dropout on (b, heads, s, s)."""
    s, b, _ = qkv.shape
    x = qkv.double().requires_grad_()
    q, k, v = x.view(s, b, heads, 3, -1).permute(3, 1, 2, 0, 4)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    mask = torch.ones(b, heads, s, s)
    if p:
        kernels.dropout(mask, mask, p, seed, stream, first_sample, sample_dim=0, row0=first_head * s)
    out = ((scores.softmax(-1) * mask) @ v).permute(2, 0, 1, 3).reshape(s, b, -1)
    out.backward(dout.double())
    return out.detach(), scores.detach().logsumexp(-1), x.grad


@functools.cache
def exact(shape, dtype, dropout):
    """explicit() of make(), the same for every target."""
    qkv, dout = make(*shape, dtype)
    return explicit(qkv, dout, shape[2], **(DROPOUT if dropout else {}))


def assert_close(got, want, tolerance):
    """Largest error relative to the largest value of the whole tensor."""
    for name, a, e in zip(("out", "lse", "dqkv"), got, want, strict=True):
        assert torch.isfinite(a).all(), name
        error = (a.double() - e).abs().max().item()
        assert error <= tolerance * max(1.0, e.abs().max().item()), f"{name}: {error}"


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
def test_float32_agrees_with_formula(target, dropout):
    for s, b, heads, d in SHAPES:
        qkv, dout = make(s, b, heads, d)
        assert_close(attention(qkv, dout, heads, **dropout), exact((s, b, heads, d), torch.float32, bool(dropout)), 2e-6)


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_agree_with_formula(target, dtype, dropout):
    for s, b, heads, d in SHAPES[::3]:
        qkv, dout = make(s, b, heads, d, dtype)
        want = exact((s, b, heads, d), dtype, bool(dropout))
        assert_close(attention(qkv, dout, heads, **dropout), want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_reference_agrees_with_formula(reference, dtype):
    for s, b, heads, d in [(1, 1, 1, 4), (17, 2, 3, 8), (33, 1, 2, 20)]:
        qkv, dout = make(s, b, heads, d, dtype)
        got = reference(lambda args=(qkv, dout, heads): attention(*args, **DROPOUT))
        assert_close(got, explicit(qkv, dout, heads, **DROPOUT), TOLERANCE[dtype])


def test_gradient_is_the_slope_of_the_forward(target):
    heads, d, step = 2, 8, 1e-2
    qkv, dout = make(19, 2, heads, d)
    direction = make(19, 2, heads, d, seed=1)[0]

    def value(x):
        out, lse = torch.empty_like(dout), torch.empty(2, heads, 19)
        kernels.attention_forward(x.contiguous(), out, lse, **DROPOUT)
        return (out.double() * dout.double()).sum().item()

    slope = (value(qkv + step * direction) - value(qkv - step * direction)) / (2 * step)
    gradient = attention(qkv, dout, heads, **DROPOUT)[2]
    assert slope == pytest.approx((gradient.double() * direction.double()).sum().item(), rel=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_threads(target, same_for_any_threads, dtype):
    for s, b, heads, d in [(300, 1, 1, 64), (130, 2, 3, 20)]:
        qkv, dout = make(s, b, heads, d, dtype)
        same_for_any_threads(lambda qkv=qkv, dout=dout, heads=heads: attention(qkv, dout, heads, **DROPOUT))


def test_dropout_follows_the_global_head_and_sample(target):
    qkv, dout = make(70, 3, 4, 8)
    whole = attention(qkv, dout, 4, p=0.4, seed=1, stream=2)
    part = qkv.view(70, 3, 4, 24)[:, 1:, 2:].contiguous().view(70, 2, 48)
    part_dout = dout.view(70, 3, 4, 8)[:, 1:, 2:].contiguous().view(70, 2, 16)
    got = attention(part, part_dout, 2, p=0.4, seed=1, stream=2, first_sample=1, first_head=2)
    assert torch.equal(got[0].view(70, 2, 2, 8), whole[0].view(70, 3, 4, 8)[:, 1:, 2:])
    assert torch.equal(got[1], whole[1][1:, 2:])
    assert torch.equal(got[2].view(70, 2, 2, 24), whole[2].view(70, 3, 4, 24)[:, 1:, 2:])


def test_large_scores_do_not_overflow(target):
    qkv, dout = make(129, 1, 2, 16)
    qkv.view(129, 1, 2, 3, 16)[:, :, :, :2] *= 60
    assert_close(attention(qkv, dout, 2), explicit(qkv, dout, 2), 1e-3)


@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_reach_what_they_reach_in_torch(target, part, bad):
    row, s = 50, 120
    qkv, dout = make(s, 1, 1, 16)
    qkv.view(s, 3, 16)[row, part, 3] = bad
    q, k, v = qkv.view(s, 3, 16).permute(1, 0, 2)[:, None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]  # (s, d)
    got = attention(qkv, dout, 1)[0][:, 0]
    rows = slice(row, None) if part == 2 else slice(None)  # a bad value reaches some earlier rows of its tile as well
    assert torch.equal(got[rows].isnan(), want[rows].isnan())
    assert torch.equal(got[rows].isinf(), want[rows].isinf())
    assert not got[: row // 96].isnan().any()


@pytest.mark.parametrize("shape", [(0, 2, 24), (3, 0, 24)])
def test_empty(target, shape):
    s, b, width = shape
    out, lse, dqkv = attention(torch.zeros(shape), torch.zeros(s, b, width // 3), 2)
    assert out.numel() == 0 and lse.numel() == 0 and dqkv.numel() == 0


def test_bad_arguments_are_value_errors_before_a_byte_is_written():
    qkv, dout = make(5, 2, 3, 8)
    good = {"qkv": qkv, "out": torch.full_like(dout, 7.0), "lse": torch.full((2, 3, 5), 7.0), "dout": dout}
    good["dqkv"] = torch.full_like(qkv, 7.0)
    bad = [
        ("qkv", make(5, 2, 3, 6)[0], "multiple of 4"),
        ("qkv", qkv.double(), "dtype"),
        ("qkv", qkv.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
        ("qkv", qkv[0], "dimensions"),
        ("out", good["out"].bfloat16(), "dtype float32 as qkv"),
        ("out", torch.full((5, 2, 20), 7.0), "shape"),
        ("out", qkv.view(-1)[: dout.numel()].view(5, 2, 24), "apart from qkv"),
        ("lse", torch.full((3, 2, 5), 7.0), "shape"),
        ("lse", torch.full((2, 0, 5), 7.0), "one head or more"),
        ("lse", torch.full((2, 5, 5), 7.0), "5 heads"),
        ("p", 1.0, "probability"),
        ("first_head", -1, "0 or more"),
        ("first_sample", -1, "0 or more"),
        ("first_head", 2**31, "2\\*\\*32"),
        ("dout", dout[:4], "shape"),
        ("dqkv", qkv, "apart from qkv"),
    ]
    for name, value, message in bad:
        arguments = {**good, name: value}
        if name not in ("dout", "dqkv", "out") or name == "out" and "apart" in message:
            forward = {k: v for k, v in arguments.items() if k not in ("dout", "dqkv")}
            with pytest.raises(ValueError, match=message):
                kernels.attention_forward(**forward)
        if "apart from qkv" not in message or name == "dqkv":
            with pytest.raises(ValueError, match=message):
                kernels.attention_backward(**arguments)
    assert all((good[name] == 7.0).all() for name in ("out", "lse", "dqkv"))
