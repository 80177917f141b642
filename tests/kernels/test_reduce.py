"""Reductions over flat tensors against their references and torch."""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES


@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm(target, reference, same_for_any_threads, dtype):
    for n in SIZES:
        x = torch.randn(n).to(dtype)
        got = same_for_any_threads(lambda x=x: kernels.squared_norm(x))
        assert got == pytest.approx(reference(lambda x=x: kernels.squared_norm(x)), rel=1e-6)
        assert got == pytest.approx(float((x.double() ** 2).sum()), rel=1e-6)


@pytest.mark.parametrize("where", [0, 7, 16, 1000, 131100])
def test_squared_norm_carries_inf_and_nan(target, where):
    x = torch.ones(131101)
    x[where] = -math.inf
    assert kernels.squared_norm(x) == math.inf
    x[where] = math.nan
    assert math.isnan(kernels.squared_norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_count_zeros(target, reference, same_for_any_threads, dtype):
    for n in SIZES:
        x = torch.randint(-2, 3, (n,)).to(dtype)
        x[5:6] = -0.0
        x[6:7] = math.nan
        got = same_for_any_threads(lambda x=x: kernels.count_zeros(x))
        assert got == reference(lambda x=x: kernels.count_zeros(x)) == int((x == 0).sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_rows(target, reference, same_for_any_threads, dtype):
    for n in SIZES:
        whole = torch.randn(3, n + 5).to(dtype)
        x = whole[:, :n]  # rows that lie apart
        for out_dtype in (torch.float32, dtype):

            def total(x=x, out_dtype=out_dtype):
                out = torch.empty(x.shape[1], dtype=out_dtype)
                kernels.sum_rows(x, out)
                return out

            got = same_for_any_threads(total)
            want = (x[0].float() + x[1].float() + x[2].float()).to(out_dtype)
            assert torch.equal(got, want) and torch.equal(reference(total), want)


def test_sum_rows_into_one_of_them_and_what_does_not_fit(target):
    x = torch.randn(4, 1003)
    want = x[0] + x[1] + x[2] + x[3]
    kernels.sum_rows(x, x[2])
    assert torch.equal(x[2], want)
    for x, out, message in (
        (torch.zeros(2, 7), torch.zeros(6), "out: expected .*7"),
        (torch.zeros(0, 7), torch.zeros(7), "x: expected at least one row"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.sum_rows(x, out)
