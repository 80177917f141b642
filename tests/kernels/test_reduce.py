"""Reductions over flat tensors against their references and torch.

    python -m pytest tests/kernels/test_reduce.py
"""

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
