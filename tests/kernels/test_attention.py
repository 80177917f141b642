"""Causal attention against a double-precision softmax(Q K^T) V and its autograd.

Shapes: qkv (s, b, heads key_size + groups (key_size + d)), out (s, b, heads d), lse (b, heads, s). Query heads of a group share
its key and value.
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.checks.attention import (
    DROPOUT,
    TOLERANCE,
    Case,
    assert_close,
    attention,
    cases,
    exact,
    explicit,
    make,
)
from tests.kernels.numbers import assert_equal, for_each, refuses

pytestmark = pytest.mark.kernels

FAST_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dropout", [{}, DROPOUT], ids=["plain", "dropout"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_attention_agrees_with_formula(every_target, dtype, dropout):
    for case in cases(every_target, dtype):
        got = attention(*case.inputs(dtype), **case.options(), **dropout)
        assert_close(got, exact(case, dtype, bool(dropout)))


@for_each(dtype=FAST_DTYPES)
def test_a_document_has_nothing_of_another(target, dtype):
    """Its results have the same bits whatever finite values, or NaN in whole tiles, are in the other documents."""
    s = 400
    begin = 96
    end = 289
    starts = torch.zeros(1, s, dtype=torch.int32)
    starts[:, begin:] = begin
    starts[:, end:] = end
    qkv, dout = make(s, 1, 4, 16, dtype, groups=2)
    other = qkv.clone()
    other[:begin] = 9 * other[:begin].flip(0)
    other[end:] = -7 * other[end:].flip(0)
    rows = slice(begin, end)
    want, got = (
        (out[rows], lse[:, :, rows], dqkv[rows])
        for out, lse, dqkv in (attention(x, dout, 4, starts=starts) for x in (qkv, other))
    )
    assert_equal(got, want)
    one = torch.zeros(1, s, dtype=torch.int32)
    assert_equal(attention(qkv, dout, 4, starts=one), attention(qkv, dout, 4))


@for_each(
    dtype=FAST_DTYPES,
    case=[
        Case(300, 1, 1, 64),
        Case(130, 2, 3, 20),
        Case(200, 2, 7, 8, groups=1, window=90),
        Case(150, 2, 7, 12, groups=1, key_size=40),
    ],
)
def test_same_bits_for_any_threads(target, same_for_any_threads, dtype, case):
    """With 2 to 4 threads a group's 7 heads take a different number of turns."""
    inputs = case.inputs(dtype)
    same_for_any_threads(lambda: attention(*inputs, **case.options(), **DROPOUT))


@for_each(dtype=FAST_DTYPES)
def test_values_have_the_bits_of_values_padded_to_the_keys(target, dtype):
    qkv, dout = make(150, 2, 4, 12, dtype, groups=2, key_size=28)
    padded = qkv.new_zeros(150, 2, 2, 4 * 28)
    rows = qkv.view(150, 2, 2, -1)
    padded[..., : rows.shape[3]] = rows
    wide_dout = torch.nn.functional.pad(dout.view(150, 2, 4, 12), (0, 16)).flatten(2)
    out, lse, dqkv = attention(qkv, dout, 4, key_size=28, **DROPOUT)
    want, want_lse, want_dqkv = attention(padded.flatten(2), wide_dout, 4, **DROPOUT)
    assert_equal((out, lse), (want.view(150, 2, 4, 28)[..., :12].flatten(2), want_lse))
    assert_equal([dqkv], [want_dqkv.view(150, 2, 2, -1)[..., : rows.shape[3]].flatten(2)])


@for_each(dtype=FAST_DTYPES)
def test_the_scale_of_the_width_is_the_default(target, dtype):
    qkv, dout = make(100, 1, 2, 16, dtype)
    assert_equal(attention(qkv, dout, 2, scale=0.25), attention(qkv, dout, 2))


def test_a_long_sequence_has_the_bits_of_its_beginning(target):
    """Fewer heads are worked on at once, so that a group is done in parts. No gradient comes from beyond the beginning."""
    short = 32768
    qkv, dout = make(32880, 1, 4, 4, groups=1)
    dout[short:] = 0
    out, lse, dqkv = attention(qkv, dout, 4, window=16)
    begin = attention(qkv[:short].contiguous(), dout[:short].contiguous(), 4, window=16)
    assert_equal((out[:short], lse[..., :short], dqkv[:short]), begin)


@for_each(dtype=FAST_DTYPES, window=[100, 101, 2**40])
def test_a_window_of_the_whole_sequence_is_none(target, window, dtype):
    qkv, dout = make(100, 1, 2, 8, dtype)
    assert_equal(attention(qkv, dout, 2, window=window), attention(qkv, dout, 2))


def test_keys_outside_the_window_are_not_read(target):
    """NaN reaches a query only within one tile from the window's edge."""
    qkv, dout = make(400, 1, 2, 8, groups=1)
    qkv[:100] = math.nan
    out, _, dqkv = attention(qkv, dout, 2, window=20)
    assert torch.isfinite(out[168:]).all() and torch.isfinite(dqkv[192:]).all()
    assert out[:100].isnan().all()


def test_dropout_follows_the_global_head_and_sample(target):
    qkv, dout = make(70, 3, 4, 8)
    options = {"p": 0.4, "seed": 1, "stream": 2}

    def of_two_heads(tensor):
        return tensor.view(70, 3, 4, -1)[:, 1:, 2:].flatten(2).contiguous()

    out, lse, dqkv = attention(qkv, dout, 4, **options)
    part = of_two_heads(qkv), of_two_heads(dout), 2
    got = attention(*part, **options, first_sample=1, first_head=2)
    assert_equal(got, (of_two_heads(out), lse[1:, 2:], of_two_heads(dqkv)))


@for_each(window=[None, 11])
def test_large_scores_do_not_overflow(target, window):
    qkv, dout = make(129, 1, 2, 16)
    qkv.view(129, 1, 2, 3, 16)[:, :, :, :2] *= 60
    got, want = (f(qkv, dout, 2, window=window) for f in (attention, explicit))
    assert_close(got, want, 1e-3)


@for_each(part=[0, 1, 2], bad=[math.nan, math.inf, -math.inf])
def test_nan_and_inf_reach_what_they_reach_in_torch(target, part, bad):
    """A bad query or key also reaches earlier rows in its tile. part: query, key, value"""
    row = 50
    s = 120
    qkv, dout = make(s, 1, 1, 16)
    qkv.view(s, 3, 16)[row, part, 3] = bad
    q, k, v = qkv.view(s, 3, 16).permute(1, 0, 2)[:, None, None]
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[0, 0]  # (s, d)
    got = attention(qkv, dout, 1)[0][:, 0]
    rows = slice(row, None) if part == 2 else slice(None)
    assert torch.equal(got[rows].isnan(), want[rows].isnan())
    assert torch.equal(got[rows].isinf(), want[rows].isinf())
    assert not got[: row // 96].isnan().any()


@for_each(shape=[(0, 2, 24), (3, 0, 24)])
def test_empty(target, shape):
    s, b, width = shape
    results = attention(torch.zeros(shape), torch.zeros(s, b, width // 3), 2)
    assert sum(result.numel() for result in results) == 0


def test_bad_arguments_are_value_errors_before_a_byte_is_written():
    qkv, dout = make(5, 2, 3, 8)
    out = torch.full_like(dout, 7.0)
    lse = torch.full((2, 3, 5), 7.0)
    transposed = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    both = {
        "qkv: .*54 columns": make(5, 2, 3, 6)[0],
        "qkv: .*groups that divide the heads, got 56 columns": make(5, 2, 3, 8, groups=2)[0],
        "qkv: .*key_size 12, value_size 8 .*got 72 columns": {"key_size": 12},
        "key_size: expected a multiple of 4, or None, got 6": 6,
        "key_size: .*got 0": 0,
        "scale: expected a number above 0, or None, got 0": 0.0,
        "scale: .*got nan": math.nan,
        "qkv: .*dtype": qkv.double(),
        "qkv: .*contiguous": transposed,
        "qkv: .*dimensions": qkv[0],
        "lse: .*shape": torch.full((3, 2, 5), 7.0),
        "lse: .*one head or more": torch.full((2, 0, 5), 7.0),
        "out: .*5 heads": {"lse": torch.full((2, 5, 5), 7.0)},
        "p: .*probability": 1.0,
        "window: expected 1 or more, or None, got 0": 0,
        "first_head: .*0 or more": -1,
        "first_sample: .*0 or more": -1,
        r"first_head: .*2\*\*32": 2**31,
        r"starts: expected .* position 4 begins, 3 or 4 \(.* window\), got 1": int32(
            [0, 0, 0, 3, 1]
        ),
        "starts: .*position 1 begins, 0 or 1 .*got 2": int32([0, 2, 2, 2, 2]),
        "starts: .*position 3 begins, 0 or 3 .*got 1": int32([0, 0, 0, 1, 2]),
        "starts: .*position 0 begins, 0 or 0 .*got 1": int32([1, 1, 1, 1, 1]),
        "starts: .*shape": int32([0, 0, 0]),
    }
    memory = {"out: .*apart from qkv": qkv.view(-1)[: dout.numel()].view(5, 2, 24)}
    backward = {
        "out: .*dtype float32 as qkv": out.bfloat16(),
        "out: .*multiple of 4": torch.full((5, 2, 30), 7.0),
        "dout: .*shape": dout[:4],
        "dqkv: .*apart from qkv": qkv,
    }
    refuses(kernels.attention_forward, (qkv, out, lse), {**both, **memory})
    arguments = qkv, out, lse, dout, torch.full_like(qkv, 7.0)
    refuses(kernels.attention_backward, arguments, {**both, **backward})


def int32(row):
    """Return a row of `starts` for two samples."""
    return torch.tensor([row, row], dtype=torch.int32)
