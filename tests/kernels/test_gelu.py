"""GELU with bias on every target this CPU runs, against double precision."""

import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, assert_near, assert_refused, for_each, random

SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768), (50, 1031)]


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@for_each(dtype=DTYPES, with_bias=[True, False], shape=SHAPES)
def test_gelu(every_target, shape, with_bias, dtype):
    x, bias = random(*shape, dtype=dtype) * 3, random(shape[1], dtype=dtype, seed=2)
    y = torch.empty_like(x)
    kernels.gelu(x, bias if with_bias else None, y)
    exact = gelu(x.double() + (bias.double() if with_bias else 0))
    assert_near(y, exact, dtype)


@for_each(shape=SHAPES)
def test_gelu_of_strided_rows(every_target, shape):
    wide = random(shape[0], 3 * shape[1])
    x, y = wide[:, shape[1] : 2 * shape[1]], torch.empty(shape)
    kernels.gelu(x, None, y)
    whole = torch.empty(shape)
    kernels.gelu(x.contiguous(), None, whole)
    assert torch.equal(y, whole)


def test_gelu_over_its_whole_range(every_target):
    """Absolute error below 4e-7 |x|; NaN and infinity as torch has them."""
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e10, -1e10])])
    y = torch.empty_like(x)
    kernels.gelu(x, None, y)
    assert ((y - gelu(x.double())).abs() <= 4e-7 * x.abs()).all()
    odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9)
    kernels.gelu(odd, None, y := torch.empty_like(odd))
    torch.testing.assert_close(y, gelu(odd), rtol=1e-6, atol=0, equal_nan=True)


def test_gelu_in_place_and_for_any_number_of_threads(every_target, same_for_any_threads):
    x, bias = random(331, 131), random(131, seed=2)

    def in_place():
        y = x.clone()
        kernels.gelu(y, bias, y)
        return y

    apart = torch.empty_like(x)
    kernels.gelu(x, bias, apart)
    assert torch.equal(same_for_any_threads(in_place), apart)


def test_wrong_arguments_leave_everything_untouched():
    x, y, h = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    assert_refused([
        (lambda: kernels.gelu(x, h[:4], y), r"bias: expected shape \(8,\), got \(4,\)"),
        (lambda: kernels.gelu(x, h, y[:2]), r"y: expected shape \(4, 8\) as x"),
        (lambda: kernels.gelu(x, h, y.half()), "y: expected dtype float32 as x"),
        (lambda: kernels.gelu(x.t(), None, y.t()), "x: expected a contiguous last dimension"),
    ], untouched=(x, y, h))
