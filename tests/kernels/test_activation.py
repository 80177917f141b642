"""Activations with bias on every target this CPU runs, against double precision."""

import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import (
    DTYPES,
    MLP_ACTIVATIONS,
    assert_near,
    assert_refused,
    for_each,
    random,
)

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768), (50, 1031)]


@for_each(name=MLP_ACTIVATIONS, dtype=DTYPES, with_bias=[True, False], shape=SHAPES)
def test_activate(every_target, shape, with_bias, dtype, name):
    x = random(*shape, dtype=dtype) * 3
    bias = random(shape[1], dtype=dtype, seed=2)
    y = torch.empty_like(x)
    kernels.activate(x, bias if with_bias else None, y, name)
    exact = MLP_ACTIVATIONS[name](x.double() + (bias.double() if with_bias else 0))
    assert_near(y, exact, dtype)


@for_each(shape=SHAPES)
def test_strided_rows(every_target, shape):
    wide = random(shape[0], 3 * shape[1])
    x = wide[:, shape[1] : 2 * shape[1]]
    y = torch.empty(shape)
    kernels.activate(x, None, y)
    whole = torch.empty(shape)
    kernels.activate(x.contiguous(), None, whole)
    assert torch.equal(y, whole)


@for_each(name=MLP_ACTIVATIONS)
def test_the_whole_range(every_target, name):
    """Absolute error below 4e-7 |x| of a GELU, relative of a squared ReLU; NaN and infinity as torch in double."""
    x = torch.cat(
        [torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e10, -1e10])]
    )
    y = torch.empty_like(x)
    kernels.activate(x, None, y, name)
    exact = MLP_ACTIVATIONS[name](x.double())
    assert (
        (y - exact).abs() <= 4e-7 * (exact if name == "squared_relu" else x.abs()) + 1e-38
    ).all()
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9)
    kernels.activate(odd, None, y := torch.empty_like(odd), name)
    torch.testing.assert_close(
        y.double(), MLP_ACTIVATIONS[name](odd.double()), rtol=1e-6, atol=0, equal_nan=True
    )


@for_each(name=MLP_ACTIVATIONS)
def test_the_derivative_over_its_whole_range(every_target, name):
    """As the matmul of backward applies it: an error below 3e-6, because 1 - sigma is rounded, and a GELU's limits 0 and 1."""
    x = torch.linspace(-12, 12, 2001).view(1, -1)
    leaf = x.double().requires_grad_()
    MLP_ACTIVATIONS[name](leaf).sum().backward()
    slope = torch.empty_like(x)
    kernels.linear_data_gradient(
        torch.ones(1, 1), torch.ones(1, 2001), slope, activation_input=x, activation=name
    )
    assert ((slope - leaf.grad).abs() <= 3e-6 * (leaf.grad.abs().clamp(min=1))).all()
    far = torch.tensor([[100.0, -100.0, 3e38, -3e38, float("inf"), float("nan")]])
    kernels.linear_data_gradient(
        torch.ones(1, 1), torch.ones(1, 6), slope := torch.empty(1, 6), far, name
    )
    limits = (
        [200.0, 0.0, float("inf"), 0.0, float("inf")]
        if name == "squared_relu"
        else [1.0, 0.0, 1.0, 0.0, 1.0]
    )
    assert slope[0, :5].tolist() == limits and bool(slope[0, 5].isnan())


@for_each(name=MLP_ACTIVATIONS)
def test_in_place_and_for_any_number_of_threads(every_target, same_for_any_threads, name):
    x = random(331, 131)
    bias = random(131, seed=2)

    def in_place():
        y = x.clone()
        kernels.activate(y, bias, y, name)
        return y

    apart = torch.empty_like(x)
    kernels.activate(x, bias, apart, name)
    assert torch.equal(same_for_any_threads(in_place), apart)


def test_wrong_arguments_leave_everything_untouched():
    x = torch.ones(4, 8)
    y = torch.ones(4, 8)
    h = torch.ones(8)
    assert_refused(
        [
            (lambda: kernels.activate(x, h[:4], y), r"bias: expected shape \(8,\), got \(4,\)"),
            (lambda: kernels.activate(x, h, y[:2]), r"y: expected shape \(4, 8\) as x"),
            (lambda: kernels.activate(x, h, y.half()), "y: expected dtype float32 as x"),
            (
                lambda: kernels.activate(x.t(), None, y.t()),
                "x: expected a contiguous last dimension",
            ),
            (
                lambda: kernels.activate(x, h, y, "silu"),
                "activation: expected one of gelu, gelu_exact, squared_relu, got silu",
            ),
            (
                lambda: kernels.linear_forward(x, x, y[:, :4], activation="relu"),
                "activation: expected one of gelu, .* got relu",
            ),
        ],
        untouched=(x, y, h),
    )
