"""The kernels of a gated delta net against the scalar reference, on every target. Formulas: tests/nn/test_delta_net.py."""

import pytest
import torch

from fugaku_megatron.costs import delta_net
from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, assert_near, random, refuses

pytestmark = pytest.mark.kernels

GROUPS = 2
HEADS = 4
B = 2


def starts_of(s):
    """Documents of the first sample that begin inside a chunk, at its border, and at neighbouring tokens."""
    starts = torch.zeros(B, s, dtype=torch.int32)
    for begin in (5, 64, 65, s - 1):
        if 0 < begin < s:
            starts[0, begin:] = begin
    return starts


def rule_inputs(s, d, dv, dtype):
    qkv = random(s, B, 2 * GROUPS * d + HEADS * dv, dtype=dtype)
    decay = -4 * torch.rand(s, B, HEADS) ** 4
    beta = torch.rand(s, B, HEADS)
    segments = -(-s // kernels.DELTA_SEGMENT)
    states = torch.zeros(segments + 1, B, HEADS, d, dv)
    states[0] = random(B, HEADS, d, dv, seed=1)
    return qkv, decay, beta, states


def rule(inputs, starts):
    """(result, states, gradients) of one call in both directions."""
    qkv, decay, beta, states = (x.clone() for x in inputs)
    _, b, heads, d, dv = states.shape
    out = qkv.new_full((len(qkv), b, heads * dv), 7.0)
    kernels.delta_rule_forward(qkv, decay, beta, states, out, starts=starts)
    dout = random(*out.shape, dtype=qkv.dtype, seed=2)
    dstate = random(b, heads, d, dv, seed=3)
    dqkv = torch.full_like(qkv, 7.0)
    ddecay = torch.full_like(decay, 7.0)
    dbeta = torch.full_like(beta, 7.0)
    kernels.delta_rule_backward(
        qkv, decay, beta, states, dout, dstate, dqkv, ddecay, dbeta, starts=starts
    )
    return out, states, dqkv, ddecay, dbeta, dstate


@pytest.mark.parametrize(
    ("sizes", "documents", "dtype"),
    [
        ((1, 8, 8), False, torch.float32),
        ((65, 20, 36), True, torch.float32),
        ((300, 5, 17), True, torch.float32),
        ((300, 16, 8), False, torch.float32),
        ((70, 16, 24), True, torch.bfloat16),
        ((70, 16, 24), True, torch.float16),
    ],
)
def test_the_rule(target, reference, same_for_any_threads, sizes, documents, dtype):
    s, d, dv = sizes
    inputs = rule_inputs(s, d, dv, dtype)
    starts = starts_of(s) if documents else None
    got = same_for_any_threads(lambda: rule(inputs, starts))
    for actual, wanted in zip(got, reference(lambda: rule(inputs, starts)), strict=True):
        assert_near(actual, wanted, actual.dtype, float32=1e-5)


def decoded(inputs, samples):
    qkv, decay, beta, states = (x.clone() for x in inputs)
    out = qkv.new_full((len(qkv), HEADS * states.shape[-1]), 7.0)
    kernels.delta_rule_decode(qkv, decay, beta, states, samples, out)
    return out, states


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token_of_each_sample(target, reference, same_for_any_threads, dtype):
    for d, dv in ((8, 8), (5, 37)):
        qkv, decay, beta, _ = rule_inputs(1, d, dv, dtype)
        inputs = (qkv[0], decay[0], beta[0], random(3, HEADS, d, dv, seed=4))
        samples = torch.tensor([2, 0])
        got = same_for_any_threads(lambda i=inputs, n=samples: decoded(i, n))
        wanted = reference(lambda i=inputs, n=samples: decoded(i, n))
        for actual, exact in zip(got, wanted, strict=True):
            assert_near(actual, exact, actual.dtype)
        assert torch.equal(got[1][1], inputs[3][1])


def convolution(x, weight, starts, earlier):
    y = torch.full_like(x, 7.0, memory_format=torch.contiguous_format)
    kernels.convolution_forward(x, weight, y, starts=starts, earlier=earlier)
    dy = random(*x.shape, dtype=x.dtype, seed=5)
    dx = torch.full_like(y, 7.0)
    dweight = torch.ones(weight.shape)
    dearlier = None if earlier is None else torch.full_like(earlier, 7.0)
    kernels.convolution_backward(
        dy, x, weight, dx, dweight, starts=starts, earlier=earlier, dearlier=dearlier
    )
    return (y, dx, dweight) if dearlier is None else (y, dx, dweight, dearlier)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convolution(target, reference, same_for_any_threads, dtype):
    for s, cols, taps, edges in ((1, 7, 4, False), (9, 150, 4, True), (70, 33, 3, True)):
        wide = random(s, B, cols + 9, dtype=dtype)
        arguments = (
            wide[..., 4 : cols + 4],
            random(cols, taps, dtype=dtype, seed=6),
            starts_of(s) if edges else None,
            random(taps - 1, B, cols, dtype=dtype, seed=7) if edges else None,
        )
        got = same_for_any_threads(lambda a=arguments: convolution(*a))
        wanted = reference(lambda a=arguments: convolution(*a))
        for actual, exact in zip(got, wanted, strict=True):
            assert_near(actual, exact, dtype)


def test_the_stride_of_a_single_sequence_counts_for_nothing(target):
    x = random(9, 20)[:, :10].unsqueeze(1)
    assert x.stride() == (20, 10, 1)
    weight = random(10, 4)
    y, *_ = convolution(x.contiguous(), weight, None, None)
    assert torch.equal(convolution(x, weight, None, None)[0], y)


def convolved(x, weight, inputs, samples):
    inputs = inputs.clone()
    y = torch.full_like(x, 7.0, memory_format=torch.contiguous_format)
    kernels.convolution_decode(x, weight, inputs, samples, y)
    return y, inputs


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_convolution_of_one_token(target, reference, same_for_any_threads, dtype):
    x = random(2, 80, dtype=dtype)[:, 3:40]
    arguments = (
        x,
        random(37, 4, dtype=dtype, seed=1),
        random(3, 3, 37, dtype=dtype, seed=2),
        torch.tensor([2, 0]),
    )
    got = same_for_any_threads(lambda: convolved(*arguments))
    for actual, exact in zip(got, reference(lambda: convolved(*arguments)), strict=True):
        assert_near(actual, exact, dtype)
    assert torch.equal(got[1][[2, 0], -1], x) and torch.equal(got[1][1], arguments[2][1])


def norm(x, gate, weight):
    y = torch.full_like(x, 7.0)
    kernels.gated_norm(x, gate, weight, y, 1e-5)
    dx = torch.full_like(x, 7.0)
    dgate = torch.full_like(x, 7.0)
    dweight = torch.ones(weight.shape)
    dy = random(*x.shape, dtype=x.dtype, seed=8)
    kernels.gated_norm_backward(dy, x, gate, weight, dx, dgate, dweight, 1e-5)
    return y, dx, dgate, dweight


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gated_norm(target, reference, same_for_any_threads, dtype):
    for tokens, heads, cols in ((1, 1, 3), (5, 3, 20), (65, 2, 128)):
        gates = random(tokens, heads * cols + 5, dtype=dtype, seed=1)
        arguments = (
            random(tokens, heads, cols, dtype=dtype),
            gates[:, 2:-3].unflatten(1, (heads, cols)),
            random(cols, dtype=dtype, seed=2),
        )
        got = same_for_any_threads(lambda a=arguments: norm(*a))
        for actual, exact in zip(got, reference(lambda a=arguments: norm(*a)), strict=True):
            assert_near(actual, exact, dtype, scale=2)


def test_costs_count_the_states_that_the_kernels_save():
    assert delta_net.SEGMENT == kernels.DELTA_SEGMENT


def test_wrong_arguments_are_refused():
    qkv, decay, beta, states = rule_inputs(70, 8, 12, torch.float32)
    out = torch.empty(70, B, HEADS * 12)
    late = torch.ones(B, 70, dtype=torch.int32)
    refuses(
        kernels.delta_rule_forward,
        (qkv, decay, beta, states, out, None),
        {
            "qkv: expected 2 groups d . heads dv columns": torch.empty(70, B, 83),
            "decay: .*float32": decay.bfloat16(),
            "beta: .*shape": beta[:, :, :3].contiguous(),
            "states: .*shape": states[:1].contiguous(),
            "out: .*dtype": out.bfloat16(),
            "starts: .*position 0 begins, 0 or 0 .*got 1": late,
        },
    )
    refuses(
        kernels.delta_rule_decode,
        (qkv[0], decay[0], beta[0], states[0], torch.tensor([0, 1]), out[0]),
        {"samples: .*below 2, got 2": torch.tensor([0, 2]), "out: .*shape": out},
    )
    x = random(6, B, 10)
    refuses(
        kernels.convolution_forward,
        (x, random(10, 4), torch.empty_like(x), None, None),
        {
            "weight: .*1 to 8 taps, got 9": random(10, 9),
            "weight: .*shape": random(9, 4),
            "earlier: .*shape": random(4, B, 10),
            "x: expected rows of all tokens equally far apart": random(12, B, 10)[::2],
        },
    )
    refuses(
        kernels.gated_norm,
        (x, x.clone(), random(10), torch.empty_like(x), 1e-5),
        {"gate: .*side by side": random(6, B, 20)[..., :10], "weight: .*shape": random(9)},
    )
