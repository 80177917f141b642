"""Activations with bias on every target, against double precision."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
    with_gradients,
)

pytestmark = pytest.mark.kernels

ACTIVATIONS = {**MLP_ACTIVATIONS, "silu": F.silu}

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768), (50, 1031)]


def activate(x, bias=None, name="gelu"):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    kernels.activate(x, bias, y, name)
    return y


@for_each(name=ACTIVATIONS, dtype=DTYPES, with_bias=[True, False], shape=SHAPES)
def test_activate(every_target, shape, with_bias, dtype, name):
    x, bias = randoms(shape, shape[1], dtype=dtype)
    x *= 3
    got = activate(x, bias if with_bias else None, name)
    argument = x.double() + bias.double() if with_bias else x.double()
    assert_near(got, ACTIVATIONS[name](argument), dtype)


@for_each(shape=SHAPES)
def test_strided_rows(every_target, shape):
    wide = random(shape[0], 3 * shape[1])
    x = wide[:, shape[1] : 2 * shape[1]]
    assert torch.equal(activate(x), activate(x.contiguous()))


@for_each(name=ACTIVATIONS)
def test_the_whole_range(every_target, name):
    """A GELU's error is below 4e-7 |x|, a squared ReLU's relative error as well; NaN and infinity as in torch."""
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e10, -1e10])
    x = torch.cat([torch.linspace(-12, 12, 20001), edges])
    exact = ACTIVATIONS[name](x.double())
    scale = exact if name == "squared_relu" else x.abs()
    assert ((activate(x, name=name) - exact).abs() <= 4e-7 * scale + 1e-38).all()
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9)
    want = ACTIVATIONS[name](odd.double())
    got = activate(odd, name=name).double()
    assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


def epilogue_slope(x, name):
    """Return the derivative that the data gradient's epilogue applies."""
    out = torch.empty_like(x)
    kernels.linear_data_gradient(torch.ones(1, 1), torch.ones(x.shape), out, x, name)
    return out


def slope(x, name):
    out = torch.empty_like(x)
    kernels.activate_backward(torch.ones_like(x), x, out, name)
    return out


SLOPES = [(epilogue_slope, name) for name in MLP_ACTIVATIONS] + [
    (slope, name) for name in ACTIVATIONS
]


@for_each(case=SLOPES)
def test_the_derivative_over_its_whole_range(every_target, case):
    """The error is below 3e-6, because 1 - sigma is rounded, and a GELU has the limits 0 and 1."""
    slope, name = case
    x = torch.linspace(-12, 12, 2001).view(1, -1)
    _, exact = with_gradients(ACTIVATIONS[name], [x], torch.ones(x.shape))
    assert ((slope(x, name) - exact).abs() <= 3e-6 * exact.abs().clamp(min=1)).all()
    far = torch.tensor([[100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")]])
    limits = [1.0, 0.0, 1.0, 0.0, 1.0]
    if name == "squared_relu":
        limits = [200.0, 0.0, float("inf"), 0.0, float("inf")]
    got = slope(far, name)[0]
    assert got[:5].tolist() == pytest.approx(limits, abs=1e-30) and bool(got[5].isnan())


@for_each(name=ACTIVATIONS, dtype=DTYPES, shape=SHAPES)
def test_activate_backward(every_target, shape, dtype, name):
    dy, wide = randoms(shape, (shape[0], 2 * shape[1]), dtype=dtype)
    x = wide.mul_(3)[:, shape[1] :]
    dx = torch.empty_like(dy)
    kernels.activate_backward(dy, x, dx, name)
    _, want = with_gradients(ACTIVATIONS[name], [x], dy)
    assert_near(dx, want, dtype)
    kernels.activate_backward(dy, x, dy, name)
    assert torch.equal(dy, dx)


@for_each(name=ACTIVATIONS)
def test_in_place_and_for_any_number_of_threads(every_target, same_for_any_threads, name):
    x, bias = randoms((331, 131), 131)

    def in_place():
        y = x.clone()
        kernels.activate(y, bias, y, name)
        return y

    assert torch.equal(same_for_any_threads(in_place), activate(x, bias, name))


def test_wrong_arguments_leave_everything_untouched():
    x, y = torch.ones(2, 4, 8)
    bias = torch.ones(8)
    refuses(
        kernels.activate,
        (x, bias, y),
        {
            r"bias: expected shape \(8,\), got \(4,\)": bias[:4],
            r"y: expected shape \(4, 8\) as x": y[:2],
            "y: expected dtype float32 as x": y.half(),
            "x: expected a contiguous last dimension": {"x": x.t(), "bias": None, "y": y.t()},
            "activation: expected one of gelu, gelu_exact, squared_relu, silu, got swish": "swish",
        },
    )
    refuses(
        kernels.activate_backward,
        (x, x, y),
        {
            r"dy: expected shape \(4, 8\) as x": x[:2],
            "dy: expected a contiguous": torch.ones(8, 4).t(),
            "dx: expected dtype float32 as x": y.half(),
        },
    )
    refuses(
        kernels.linear_forward,
        (x, x, y[:, :4]),
        {"activation: expected one of gelu, .* got relu": "relu"},
    )
