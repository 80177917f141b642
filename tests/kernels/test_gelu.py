"""GELU with bias on every target this CPU runs, against double precision."""

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.conftest import VECTOR_TARGETS
from tests.kernels.numbers import for_each, random

TARGETS = ["reference", *VECTOR_TARGETS]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768), (50, 1031)]


@pytest.fixture(params=TARGETS)
def target(request):
    with kernels.target(request.param):
        yield request.param


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@for_each(dtype=ROUNDING)
@for_each(with_bias=[True, False])
@for_each(shape=SHAPES)
def test_gelu(target, shape, with_bias, dtype):
    x, bias = random(*shape, dtype=dtype) * 3, random(shape[1], dtype=dtype, seed=2)
    y = torch.empty_like(x)
    kernels.gelu(x, bias if with_bias else None, y)
    exact = gelu(x.double() + (bias.double() if with_bias else 0))
    top = float(exact.abs().max()) if exact.numel() else 0.0
    torch.testing.assert_close(y.double(), exact, rtol=ROUNDING[dtype], atol=ROUNDING[dtype] * max(top, 1e-3))


@for_each(shape=SHAPES)
def test_gelu_of_strided_rows(target, shape):
    wide = random(shape[0], 3 * shape[1])
    x, y = wide[:, shape[1] : 2 * shape[1]], torch.empty(shape)
    kernels.gelu(x, None, y)
    whole = torch.empty(shape)
    kernels.gelu(x.contiguous(), None, whole)
    assert torch.equal(y, whole)


def test_gelu_over_its_whole_range(target):
    """Absolute error below 4e-7 |x|."""
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e10, -1e10])])
    y = torch.empty_like(x)
    kernels.gelu(x, None, y)
    assert ((y - gelu(x.double())).abs() <= 4e-7 * x.abs()).all()


def test_gelu_of_nan_and_inf_as_torch(target):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9)
    y = torch.empty_like(x)
    kernels.gelu(x, None, y)
    torch.testing.assert_close(y, gelu(x), rtol=1e-6, atol=0, equal_nan=True)


def test_gelu_in_place_and_for_any_number_of_threads(target, same_for_any_threads):
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
    for call, message in [
        (lambda: kernels.gelu(x, h[:4], y), r"bias: expected shape \(8,\), got \(4,\)"),
        (lambda: kernels.gelu(x, h, y[:2]), r"y: expected shape \(4, 8\) as x"),
        (lambda: kernels.gelu(x, h, y.half()), "y: expected dtype float32 as x"),
        (lambda: kernels.gelu(x.t(), None, y.t()), "x: expected a contiguous last dimension"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert all((t == 1).all() for t in (x, y, h))
