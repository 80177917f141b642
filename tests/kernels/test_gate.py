"""SwiGLU and GeGLU and their gradients on every target, against double precision."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_equal,
    assert_near,
    for_each,
    random,
    randoms,
    refuses,
    with_gradients,
)

pytestmark = pytest.mark.kernels

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768)]
GATES = {"silu": F.silu, "gelu": MLP_ACTIVATIONS["gelu"]}


def exact(x, name):
    """Return the gated value of x (rows, 2, cols)."""
    return GATES[name](x[:, 0]) * x[:, 1]


def forward(x, name):
    y = x.new_empty(x.shape[0], x.shape[2])
    kernels.gate(x, y, name)
    return y


def backward(dy, x, name):
    dx = torch.empty_like(x)
    kernels.gate_backward(dy, x, dx, name)
    return dx


def scaled_backward(dy, x, factors, name):
    """Return dx, dfactors and the recomputed result."""
    dx = torch.empty_like(x)
    dfactors = torch.empty(len(x))
    y = torch.empty_like(dy)
    kernels.scaled_gate_backward(dy, x, factors, dx, dfactors, y, name)
    return dx, dfactors, y


@for_each(name=GATES, dtype=DTYPES, shape=SHAPES)
def test_a_gate_and_its_gradient(every_target, shape, dtype, name):
    rows, cols = shape
    x, dy = randoms((rows, 2, cols), shape, dtype=dtype)
    x *= 3
    want, gradient = with_gradients(lambda x: exact(x, name), [x], dy)
    assert_near(forward(x, name), want, dtype)
    dx = backward(dy, x, name)
    assert_near(dx, gradient, dtype)
    kernels.gate_backward(dy, x, x, name)
    assert torch.equal(x, dx)


@for_each(name=GATES, dtype=DTYPES, shape=SHAPES)
def test_a_gate_with_factors_of_its_rows(every_target, shape, dtype, name):
    """The result is rounded once. One pass computes both gradients and the result again."""
    rows, cols = shape
    x, dy = randoms((rows, 2, cols), shape, dtype=dtype)
    factors = random(rows, seed=3)
    want, gradient, by = with_gradients(
        lambda x, factors: exact(x, name) * factors.unsqueeze(1), [x, factors], dy
    )
    y = torch.empty_like(dy)
    kernels.scaled_gate(x, factors, y, name)
    assert_near(y, want, dtype)
    dx, dfactors, again = scaled_backward(dy, x, factors, name)
    assert_near(dx, gradient, dtype)
    assert_close(dfactors.double(), by, rtol=1e-5, atol=1e-5 * max(1, cols) ** 0.5)
    assert torch.equal(again, y)
    kernels.scaled_gate_backward(dy, x, factors, x, dfactors, dy, name)
    assert_equal((x, dy), (dx, y))


@for_each(name=GATES)
def test_parts_and_threads_give_the_bits_of_the_whole(
    every_target, guarded, same_for_any_threads, name
):
    x, dy = randoms((13, 2, 71), (13, 71))
    whole = forward(x, name)
    dx = guarded(x.shape).copy_(x)
    for columns in (slice(0, 32), slice(32, 71)):
        part = dx[:, :, columns]
        assert torch.equal(forward(part, name), whole[:, columns])
        kernels.gate_backward(dy[:, columns].contiguous(), part, part, name)
    assert torch.equal(dx, backward(dy, x, name))
    x, dy, factors = randoms((331, 2, 131), (331, 131), 331)

    def both():
        y = torch.empty_like(dy)
        kernels.scaled_gate(x, factors, y, name)
        gradients = scaled_backward(dy, x, factors, name)
        return forward(x, name), backward(dy, x, name), y, *gradients

    same_for_any_threads(both)


@for_each(name=GATES)
def test_gates_far_from_zero(every_target, name):
    """Also beyond the overflow of exp(-gate); NaN and infinity as in torch."""
    edges = torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30])
    gate = torch.cat([torch.linspace(-200, 200, 4001), edges])
    x = torch.stack([gate, torch.ones_like(gate)]).unsqueeze(0)
    dy = torch.ones(1, len(gate))
    want, gradient = with_gradients(lambda x: exact(x, name), [x], dy)
    value = forward(x, name).double()
    if name == "silu":
        assert_close(value, want, rtol=4e-7, atol=1e-35)
    else:
        assert ((value - want).abs() <= 4e-7 * gate.abs()).all()
    dx = backward(dy, x, name).double()
    assert_close(dx, gradient, rtol=4e-6, atol=2e-6)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9).view(1, 2, 18)
    assert_close(forward(odd, name), exact(odd, name), rtol=1e-6, atol=0, equal_nan=True)


def test_wrong_arguments_leave_everything_untouched():
    x, dx = torch.ones(2, 4, 2, 8)
    y, dy = torch.ones(2, 4, 8)
    factors = torch.ones(4)
    in_x = x[:2].view(4, 8)
    refuses(
        kernels.gate,
        (x, y),
        {
            r"x: expected shape \(\*, 2, \*\), got \(4, 1, 8\)": x[:, :1],
            r"y: expected shape \(4, 8\), got \(2, 8\)": y[:2],
            "x: expected a contiguous last dimension": x.transpose(0, 2),
            "activation: expected one of silu, gelu, got squared_relu": "squared_relu",
        },
    )
    refuses(
        kernels.gate_backward,
        (dy, x, dx),
        {
            "dy: expected a contiguous tensor": dy.t().contiguous().t(),
            "dx: expected memory apart from dy": {"dy": in_x, "dx": x},
        },
    )
    refuses(
        kernels.scaled_gate,
        (x, factors, y),
        {r"factors: expected shape \(4,\), got \(3,\)": factors[:3]},
    )
    refuses(
        kernels.scaled_gate_backward,
        (dy, x, factors, dx, factors.clone(), y),
        {"dfactors: expected memory apart from dy": dy[0, :4]},
    )
