"""Causal attention against a double-precision softmax(Q K^T) V and its autograd.

Shapes: qkv (s, b, (heads + 2 groups) d), out (s, b, heads d), lse (b, heads, s). Query heads of a group share its key and value.
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.checks.attention import (
    DROPOUT,
    GROUPED,
    SHAPES,
    TOLERANCE,
    assert_close,
    attention,
    document_starts,
    exact,
    explicit,
    make,
)
from tests.kernels.numbers import assert_slope


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_agrees_with_formula(target, dtype, dropout):
    cases = [*((shape, None, None) for shape in SHAPES), *GROUPED]
    for shape, groups, window in cases if dtype == torch.float32 else cases[::3]:
        qkv, dout = make(*shape, dtype, groups=groups)
        want = exact(shape, dtype, bool(dropout), groups, window)
        assert_close(
            attention(qkv, dout, shape[2], window=window, **dropout), want, TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_documents_agree_with_formula(target, dtype, dropout):
    for seed, (shape, groups, window) in enumerate(
        GROUPED if dtype == torch.float32 else GROUPED[1::3]
    ):
        qkv, dout = make(*shape, dtype, groups=groups)
        got = attention(
            qkv, dout, shape[2], window=window, starts=document_starts(*shape[:2], seed), **dropout
        )
        assert_close(
            got, exact(shape, dtype, bool(dropout), groups, window, seed), TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_document_has_nothing_of_another(target, dtype):
    """Its results have the same bits whatever finite values, or NaN in whole tiles, stand in the other documents."""
    s = 700
    begin = 192
    end = 481
    starts = torch.zeros(1, s, dtype=torch.int32)
    starts[:, begin:] = begin
    starts[:, end:] = end
    qkv, dout = make(s, 1, 4, 16, dtype, groups=2)
    other = qkv.clone()
    other[:begin] = 9 * other[:begin].flip(0)
    other[end:] = -7 * other[end:].flip(0)
    want, got = (attention(x, dout, 4, starts=starts) for x in (qkv, other))
    rows = slice(begin, end)
    assert torch.equal(got[0][rows], want[0][rows])
    assert torch.equal(got[1][:, :, rows], want[1][:, :, rows])
    assert torch.equal(got[2][rows], want[2][rows])
    one = torch.zeros(1, s, dtype=torch.int32)
    for a, b in zip(attention(qkv, dout, 4, starts=one), attention(qkv, dout, 4), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_reference_agrees_with_formula(reference, dtype):
    for (s, b, heads, d), groups, window in [
        ((1, 1, 1, 4), 1, 1),
        ((17, 2, 3, 8), 3, None),
        ((33, 1, 4, 20), 2, 9),
    ]:
        for starts in (None, document_starts(s, b, 3)):
            qkv, dout = make(s, b, heads, d, dtype, groups=groups)
            options = {"window": window, "starts": starts, **DROPOUT}
            got = reference(
                lambda args=(qkv, dout, heads), options=options: attention(*args, **options)
            )
            assert_close(got, explicit(qkv, dout, heads, **options), TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ([0, 0, 2, 1], "starts: expected positions from 2 to 3 at position 3, got 1"),
        ([0, 2, 2, 2], "starts: expected positions from 0 to 1 at position 1, got 2"),
        ([0, 0, 0], "starts"),
    ],
)
def test_starts_that_no_documents_have_are_refused(starts, message):
    qkv, dout = make(4, 1, 2, 4)
    with pytest.raises(ValueError, match=message):
        attention(qkv, dout, 2, starts=torch.tensor([starts], dtype=torch.int32))


@pytest.mark.parametrize(("heads", "groups", "window"), [(2, 2, None), (6, 2, 9)])
def test_gradient_is_the_slope_of_the_forward(target, heads, groups, window):
    options = {**DROPOUT, "window": window}
    qkv, dout = make(19, 2, heads, 8, groups=groups)

    def value():
        out = torch.empty_like(dout)
        lse = torch.empty(2, heads, 19)
        kernels.attention_forward(qkv, out, lse, **options)
        return (out.double() * dout.double()).sum()

    assert_slope(value, [qkv], [attention(qkv, dout, heads, **options)[2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_threads(target, same_for_any_threads, dtype):
    """With 2 to 4 threads 7 heads of a group are worked on in turns, in a different number of them."""
    for (s, b, heads, d), groups, window in [
        ((300, 1, 1, 64), 1, None),
        ((130, 2, 3, 20), 3, None),
        ((200, 2, 7, 8), 1, 90),
    ]:
        qkv, dout = make(s, b, heads, d, dtype, groups=groups)
        same_for_any_threads(
            lambda args=(qkv, dout, heads), window=window: attention(
                *args, window=window, **DROPOUT
            )
        )


def repeated(qkv, heads, groups):
    """qkv (s, b, (heads + 2 groups) d) with the keys and values of each group repeated for all its query heads."""
    s, b, width = qkv.shape
    d = width // (heads + 2 * groups)
    q, k, v = qkv.view(s, b, groups, -1, d).split([heads // groups, 1, 1], dim=3)
    return torch.stack((q, k.expand_as(q), v.expand_as(q)), dim=4).reshape(s, b, -1)


def test_a_long_sequence_has_the_bits_of_its_beginning(target):
    """Fewer heads are worked on at once, so that a group is done in parts. No gradient comes from beyond the beginning."""
    short = 32768
    s = 32880
    heads = 4
    window = 16
    qkv, dout = make(s, 1, heads, 4, groups=1)
    dout[short:] = 0
    whole = attention(qkv, dout, heads, window=window)
    begin = attention(qkv[:short].contiguous(), dout[:short].contiguous(), heads, window=window)
    for one, other in zip(
        (whole[0][:short], whole[1][..., :short], whole[2][:short]), begin, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 30])
def test_groups_do_not_change_the_bits_of_a_head(target, window, dtype):
    """Results that depend on a query head alone have the bits of heads with a key each; dropout's mask included."""
    heads = 6
    groups = 2
    d = 16
    qkv, dout = make(150, 2, heads, d, dtype, groups=groups)
    one = attention(qkv, dout, heads, window=window, **DROPOUT)
    many = attention(repeated(qkv, heads, groups), dout, heads, window=window, **DROPOUT)
    assert torch.equal(one[0], many[0]) and torch.equal(one[1], many[1])
    queries = one[2].view(150, 2, groups, -1, d)[:, :, :, : heads // groups].flatten(2, 3)
    assert torch.equal(queries, many[2].view(150, 2, heads, 3, d)[:, :, :, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [100, 101, 2**40])
def test_a_window_of_the_whole_sequence_is_none(target, window, dtype):
    qkv, dout = make(100, 1, 2, 8, dtype)
    for got, want in zip(
        attention(qkv, dout, 2, window=window), attention(qkv, dout, 2), strict=True
    ):
        assert torch.equal(got, want)


def test_keys_outside_the_window_are_not_read(target):
    """NaN in them reaches a query only within a tile of the window's edge."""
    qkv, dout = make(400, 1, 2, 8, groups=1)
    qkv[:100] = math.nan
    out, _, dqkv = attention(qkv, dout, 2, window=20)
    assert (
        torch.isfinite(out[168:]).all()
        and torch.isfinite(dqkv[192:]).all()
        and out[:100].isnan().all()
    )


def test_dropout_follows_the_global_head_and_sample(target):
    qkv, dout = make(70, 3, 4, 8)
    whole = attention(qkv, dout, 4, p=0.4, seed=1, stream=2)
    part = qkv.view(70, 3, 4, 24)[:, 1:, 2:].contiguous().view(70, 2, 48)
    part_dout = dout.view(70, 3, 4, 8)[:, 1:, 2:].contiguous().view(70, 2, 16)
    got = attention(part, part_dout, 2, p=0.4, seed=1, stream=2, first_sample=1, first_head=2)
    assert torch.equal(got[0].view(70, 2, 2, 8), whole[0].view(70, 3, 4, 8)[:, 1:, 2:])
    assert torch.equal(got[1], whole[1][1:, 2:])
    assert torch.equal(got[2].view(70, 2, 2, 24), whole[2].view(70, 3, 4, 24)[:, 1:, 2:])


@pytest.mark.parametrize("window", [None, 11])
def test_large_scores_do_not_overflow(target, window):
    qkv, dout = make(129, 1, 2, 16)
    qkv.view(129, 1, 2, 3, 16)[:, :, :, :2] *= 60
    assert_close(
        attention(qkv, dout, 2, window=window), explicit(qkv, dout, 2, window=window), 1e-3
    )


@pytest.mark.parametrize("part", [0, 1, 2], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_reach_what_they_reach_in_torch(target, part, bad):
    row = 50
    s = 120
    qkv, dout = make(s, 1, 1, 16)
    qkv.view(s, 3, 16)[row, part, 3] = bad
    q, k, v = qkv.view(s, 3, 16).permute(1, 0, 2)[:, None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]  # (s, d)
    got = attention(qkv, dout, 1)[0][:, 0]
    rows = (
        slice(row, None) if part == 2 else slice(None)
    )  # a bad value reaches some earlier rows of its tile as well
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
    good = {
        "qkv": qkv,
        "out": torch.full_like(dout, 7.0),
        "lse": torch.full((2, 3, 5), 7.0),
        "dout": dout,
    }
    good["dqkv"] = torch.full_like(qkv, 7.0)
    bad = [
        ("qkv", make(5, 2, 3, 6)[0], "54 columns"),
        ("qkv", make(5, 2, 3, 8, groups=2)[0], "groups that divide the heads, got 56 columns"),
        ("qkv", qkv.double(), "dtype"),
        ("qkv", qkv.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
        ("qkv", qkv[0], "dimensions"),
        ("out", good["out"].bfloat16(), "dtype float32 as qkv"),
        ("out", torch.full((5, 2, 30), 7.0), "multiple of 4"),
        ("out", qkv.view(-1)[: dout.numel()].view(5, 2, 24), "apart from qkv"),
        ("lse", torch.full((3, 2, 5), 7.0), "shape"),
        ("lse", torch.full((2, 0, 5), 7.0), "one head or more"),
        ("lse", torch.full((2, 5, 5), 7.0), "5 heads"),
        ("p", 1.0, "probability"),
        ("window", 0, "window: expected 1 or more, or None, got 0"),
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
