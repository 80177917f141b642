"""SwiGLU and GeGLU and their gradients on every target this CPU runs, against double precision."""

import torch
from torch.nn import functional as F

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_near,
    assert_refused,
    assert_slope,
    for_each,
    random,
)

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768)]
GATES = {"silu": F.silu, "gelu": MLP_ACTIVATIONS["gelu"]}


def exact(x, name):
    """In double, of x (rows, 2, cols)."""
    return GATES[name](x[:, 0]) * x[:, 1]


def forward(x, name):
    y = x.new_empty(x.shape[0], x.shape[2])
    kernels.gate(x, y, name)
    return y


@for_each(name=GATES, dtype=DTYPES, shape=SHAPES)
def test_a_gate_and_its_gradient(every_target, shape, dtype, name):
    rows, cols = shape
    x = random(rows, 2, cols, dtype=dtype) * 3
    dy = random(rows, cols, dtype=dtype, seed=2)
    leaf = x.double().requires_grad_()
    want = exact(leaf, name)
    want.backward(dy.double())
    assert_near(forward(x, name), want.detach(), dtype)
    dx = torch.empty_like(x)
    kernels.gate_backward(dy, x, dx, name)
    assert_near(dx, leaf.grad, dtype)
    kernels.gate_backward(dy, x, x, name)
    assert torch.equal(x, dx)


@for_each(name=GATES, dtype=DTYPES, shape=SHAPES)
def test_a_gate_with_factors_of_its_rows(every_target, shape, dtype, name):
    """The result is rounded once; the gradients of x and of the factors and the result again come from one pass."""
    rows, cols = shape
    x = random(rows, 2, cols, dtype=dtype)
    dy = random(rows, cols, dtype=dtype, seed=2)
    factors = random(rows, seed=3)
    leaf = x.double().requires_grad_()
    by = factors.double().requires_grad_()
    want = exact(leaf, name) * by.unsqueeze(1)
    want.backward(dy.double())
    y = torch.empty_like(dy)
    dx = torch.empty_like(x)
    dfactors = torch.empty(rows)
    kernels.scaled_gate(x, factors, y, name)
    assert_near(y, want.detach(), dtype)
    again = torch.empty_like(y)
    kernels.scaled_gate_backward(dy, x, factors, dx, dfactors, again, name)
    assert_near(dx, leaf.grad, dtype)
    torch.testing.assert_close(
        dfactors.double(), by.grad, rtol=1e-5, atol=1e-5 * max(1, cols) ** 0.5
    )
    assert torch.equal(again, y)
    kernels.scaled_gate_backward(dy, x, factors, x, dfactors, dy, name)
    assert torch.equal(x, dx) and torch.equal(dy, y)


@for_each(name=GATES)
def test_parts_and_threads_give_the_bits_of_the_whole(
    every_target, guarded, same_for_any_threads, name
):
    x = random(13, 2, 71)
    dy = random(13, 71, seed=2)
    whole = forward(x, name)
    whole_dx = torch.empty_like(x)
    kernels.gate_backward(dy, x, whole_dx, name)
    dx = guarded((13, 2, 71)).copy_(x)
    for columns in (slice(0, 32), slice(32, 71)):
        part = dx[:, :, columns]
        assert torch.equal(forward(part, name), whole[:, columns])
        kernels.gate_backward(dy[:, columns].contiguous(), part, part, name)
    assert torch.equal(dx, whole_dx)
    x = random(331, 2, 131)
    dy = random(331, 131, seed=2)

    def both():
        dx = torch.empty_like(x)
        kernels.gate_backward(dy, x, dx, name)
        y = torch.empty(331, 131)
        again = torch.empty(331, 131)
        dfactors = torch.empty(331)
        kernels.scaled_gate(x, dy[:, 0].contiguous(), y, name)
        scaled = torch.empty_like(x)
        kernels.scaled_gate_backward(dy, x, dy[:, 0].contiguous(), scaled, dfactors, again, name)
        return forward(x, name), dx, y, scaled, dfactors, again

    same_for_any_threads(both)


@for_each(name=GATES)
def test_gate_backward_is_the_slope(every_target, name):
    x = random(5, 2, 19)
    dy = random(5, 19, seed=1)
    dx = torch.empty_like(x)
    kernels.gate_backward(dy, x, dx, name)
    assert_slope(lambda: (forward(x, name).double() * dy.double()).sum(), [x], [dx])


@for_each(name=GATES)
def test_gates_far_from_zero(every_target, name):
    """Also where exp(-gate) overflows; NaN and infinity as torch has them."""
    gate = torch.cat(
        [torch.linspace(-200, 200, 4001), torch.tensor([0.0, -0.0, 1e30, -1e30, 1e-30])]
    )
    x = torch.stack([gate, torch.ones_like(gate)]).unsqueeze(0)
    dy = torch.ones(1, len(gate))
    leaf = x.double().requires_grad_()
    exact(leaf, name).sum().backward()
    dx = torch.empty_like(x)
    kernels.gate_backward(dy, x, dx, name)
    value = forward(x, name).double()
    want = exact(leaf, name).detach()
    if name == "silu":
        torch.testing.assert_close(value, want, rtol=4e-7, atol=1e-35)
    else:
        assert ((value - want).abs() <= 4e-7 * gate.abs()).all()
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=4e-6, atol=2e-6)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9).view(1, 2, 18)
    torch.testing.assert_close(
        forward(odd, name), exact(odd, name), rtol=1e-6, atol=0, equal_nan=True
    )


def test_wrong_arguments_leave_everything_untouched():
    x = torch.ones(4, 2, 8)
    y = torch.ones(4, 8)
    assert_refused(
        [
            (
                lambda: kernels.gate(x[:, :1], y),
                r"x: expected shape \(\*, 2, \*\), got \(4, 1, 8\)",
            ),
            (lambda: kernels.gate(x, y[:2]), r"y: expected shape \(4, 8\), got \(2, 8\)"),
            (
                lambda: kernels.gate(x[:, :, ::2], y[:, :4]),
                "x: expected a contiguous last dimension",
            ),
            (
                lambda: kernels.gate(x, y, "squared_relu"),
                "activation: expected one of silu, gelu, got squared_relu",
            ),
            (
                lambda: kernels.gate_backward(y[:, :4], x[:, :, :4], torch.ones(4, 2, 4)),
                "dy: expected a contiguous tensor",
            ),
            (
                lambda: kernels.gate_backward(x[:2].view(4, 8), x, x),
                "dx: expected memory apart from dy",
            ),
            (
                lambda: kernels.scaled_gate(x, y[0, :3], y),
                r"factors: expected shape \(4,\), got \(3,\)",
            ),
            (
                lambda: kernels.scaled_gate_backward(
                    y, x, y[:, 0].contiguous(), x.clone(), y[0, :4], x[:2].view(4, 8)
                ),
                "dfactors: expected memory apart from dy",
            ),
        ],
        untouched=(x, y),
    )
