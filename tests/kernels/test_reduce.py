"""Reductions over flat tensors against their references and torch."""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES, for_each, refuses

pytestmark = pytest.mark.kernels


@for_each(dtype=DTYPES, n=SIZES)
def test_squared_norm(every_target, same_for_any_threads, dtype, n):
    x = torch.randn(n).to(dtype)
    got = same_for_any_threads(lambda: kernels.squared_norm(x))
    assert got == pytest.approx(float((x.double() ** 2).sum()), rel=1e-6)


@pytest.mark.parametrize("where", [0, 7, 16, 1000, 131100])
def test_squared_norm_carries_inf_and_nan(target, where):
    x = torch.ones(131101)
    x[where] = -math.inf
    assert kernels.squared_norm(x) == math.inf
    x[where] = math.nan
    assert math.isnan(kernels.squared_norm(x))


@for_each(dtype=DTYPES, n=SIZES)
def test_count_zeros(every_target, same_for_any_threads, dtype, n):
    x = torch.randint(-2, 3, (n,)).to(dtype)
    x[5:6] = -0.0
    x[6:7] = math.nan
    assert same_for_any_threads(lambda: kernels.count_zeros(x)) == int((x == 0).sum())


@for_each(dtype=DTYPES, n=SIZES, float32=[False, True])
def test_sum_rows(every_target, same_for_any_threads, dtype, n, float32):
    x = torch.randn(3, n + 5).to(dtype)[:, :n]  # rows with a gap between them
    out_dtype = torch.float32 if float32 else dtype

    def total():
        out = torch.empty(n, dtype=out_dtype)
        kernels.sum_rows(x, out)
        return out

    want = (x[0].float() + x[1].float() + x[2].float()).to(out_dtype)
    assert torch.equal(same_for_any_threads(total), want)


def test_sum_rows_into_one_of_them_and_what_does_not_fit(target):
    x = torch.randn(4, 1003)
    want = x[0] + x[1] + x[2] + x[3]
    kernels.sum_rows(x, x[2])
    assert torch.equal(x[2], want)
    refuses(
        kernels.sum_rows,
        (torch.zeros(2, 7), torch.zeros(7)),
        {
            "out: expected .*7": torch.zeros(6),
            "x: expected at least one row": torch.zeros(0, 7),
        },
    )
