"""GELU with bias, sums over rows and the small sums, on every target this CPU runs, against double precision.

    python -m pytest tests/kernels/test_pointwise.py
"""

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import random

TARGETS = ["reference", *kernels.runnable_targets()]
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
SHAPES = [(0, 5), (1, 1), (3, 15), (4, 16), (5, 17), (7, 67), (211, 131), (9, 768), (50, 1031)]


@pytest.fixture(params=TARGETS)
def target(request):
    with kernels.target(request.param):
        yield request.param


def assert_close(got, want, dtype=torch.float32, scale=1.0):
    tolerance = ROUNDING[dtype] * scale
    top = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance * max(top, 1e-3))


def gelu(x):
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gelu_forward_and_backward(target, shape, with_bias, dtype):
    x, dy, bias = random(*shape, dtype=dtype) * 3, random(*shape, dtype=dtype, seed=1), random(shape[1], dtype=dtype, seed=2)
    bias = bias if with_bias else None
    y, dx = torch.empty_like(x), torch.empty_like(x)
    dbias = torch.ones(shape[1]) if with_bias else None
    kernels.gelu(x, bias, y)
    kernels.gelu_backward(dy, x, bias, dx, dbias)
    total = (x.double() + (bias.double() if with_bias else 0)).requires_grad_()
    want = gelu(total)
    want.backward(dy.double())
    assert_close(y, want.detach(), dtype)
    assert_close(dx, total.grad, dtype, 2)
    if with_bias:
        assert_close(dbias, total.grad.sum(0) + 1, torch.float32, 2)


def test_gelu_over_its_whole_range(target):
    """Absolute error below 4e-7 |x| for the value and 2e-6 for the slope; never worse than torch's by more than that."""
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e-30, -1e-30, 1e10, -1e10])])
    y, slope = torch.empty_like(x), torch.empty_like(x)
    kernels.gelu(x, None, y)
    kernels.gelu_backward(torch.ones_like(x), x, None, slope, None)
    leaf = x.double().requires_grad_()
    want = gelu(leaf)
    want.sum().backward()
    assert ((y - want).abs() <= 4e-7 * x.abs()).all()
    torch.testing.assert_close(slope.double(), leaf.grad, rtol=0, atol=2e-6)


def test_gelu_of_nan_and_inf_as_torch(target):
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0] * 9)
    y = torch.empty_like(x)
    kernels.gelu(x, None, y)
    torch.testing.assert_close(y, gelu(x), rtol=1e-6, atol=0, equal_nan=True)
    kernels.gelu_backward(torch.ones_like(x), x, None, y, None)
    leaf = x.clone().requires_grad_()
    gelu(leaf).sum().backward()
    assert torch.equal(y.isfinite(), leaf.grad.isfinite()) and torch.equal(y.isnan(), leaf.grad.isnan())


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 50257 // 16), (193, 3), (4, 0)])
def test_column_sum(target, shape, dtype):
    x, total = random(*shape, dtype=dtype), random(shape[1], seed=1)
    want = total.double() + x.double().sum(0)
    kernels.column_sum(x, total)
    assert_close(total, want)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("n", [0, 1, 15, 16, 17, 4999])
def test_add_and_axpy(target, n, dtype):
    x, y = random(n, dtype=dtype), random(n, dtype=dtype, seed=1)
    out = torch.empty_like(x)
    kernels.add(x, y, out)
    assert torch.equal(out, x + y)
    for into in ROUNDING:
        total = random(n, seed=2).to(into)
        want = total.double() - 0.75 * x.double()
        kernels.axpy(-0.75, x, total)
        assert_close(total, want, into)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_sum_rows_is_the_float_sum_in_order(target, count, dtype):
    ranks = random(count, 1031, dtype=dtype)
    for into in ROUNDING:
        out, want = torch.empty(1000, dtype=into), torch.zeros(1000)
        kernels.sum_rows(ranks[:, 31:], out, 0.5)
        for rank in ranks[:, 31:]:
            want = want + rank.float()
        assert torch.equal(out, (want * 0.5).to(into))


def test_same_bits_for_any_number_of_threads(target):
    x, dy, bias, before, results = random(331, 131), random(331, 131, seed=1), random(131, seed=2), kernels.num_threads(), []
    try:
        for threads in (1, 2, 3, 4):
            kernels.set_num_threads(threads)
            dx, dbias, total = torch.empty_like(x), torch.zeros(131), torch.zeros(131)
            kernels.gelu_backward(dy, x, bias, dx, dbias)
            kernels.column_sum(x, total)
            results.append(torch.cat([dx.flatten(), dbias, total]))
    finally:
        kernels.set_num_threads(before)
    assert all(torch.equal(results[0], other) for other in results)


def test_wrong_arguments_leave_everything_untouched():
    x, y, h = torch.ones(4, 8), torch.ones(4, 8), torch.ones(8)
    for call, message in [
        (lambda: kernels.gelu(x, h[:4], y), r"bias: expected shape \(8,\), got \(4,\)"),
        (lambda: kernels.gelu(x, h, y[:2]), r"y: expected shape \(4, 8\) as x"),
        (lambda: kernels.gelu_backward(y, x, h, y, None), "dbias: expected a tensor with bias, None without, got None"),
        (lambda: kernels.column_sum(x, h.bfloat16()), "sum: expected dtype float32, got bfloat16"),
        (lambda: kernels.column_sum(x, x[0]), "sum: expected memory apart from x"),
        (lambda: kernels.add(x, y.half(), y), "y: expected dtype float32 as x"),
        (lambda: kernels.axpy(1.0, x.t(), y.t()), "x: expected a contiguous tensor"),
        (lambda: kernels.sum_rows(x, h[:7]), r"out: expected shape \(8,\)"),
        (lambda: kernels.sum_rows(x, x[0]), "out: expected memory apart from x"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert all((t == 1).all() for t in (x, y, h))
