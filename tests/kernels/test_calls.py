"""Kernel calls that are kept and made again."""

import gc

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import random

pytestmark = pytest.mark.kernels


def sums(calls, x, scale):
    """Return a tensor that two calls fill with 2 (x + 1) scale. Only `calls` keeps their operands."""
    total = torch.empty_like(x)
    out = torch.empty_like(x)
    calls.bias_dropout_add(x, torch.ones(x.shape[-1]), x, total)
    calls.linear_few_rows(
        total.view(-1, x.shape[-1]), torch.eye(x.shape[-1]) * scale, out.view(-1, x.shape[-1])
    )
    return out


def test_calls_are_made_at_once_and_again_on_what_tensors_hold_then():
    calls = kernels.Calls()
    x = random(3, 1, 8)
    out = sums(calls, x, 2.0)
    assert_close(out, 4 * x + 2)
    gc.collect()
    others = [
        torch.full((64,), float("nan")) for _ in range(100)
    ]  # would take memory that was freed
    x.copy_(random(3, 1, 8, seed=5))
    calls()
    assert_close(out, 4 * x + 2)
    assert len(calls) == 2 and len(others) == 100


def test_a_wrong_call_is_refused_and_not_kept():
    calls = kernels.Calls()
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"x: expected shape \(\*, 7\), got \(2, 8\)"):
        calls.linear_few_rows(x, torch.ones(3, 7), torch.empty(2, 3))
    with pytest.raises(AttributeError, match="squared_norm"):
        calls.squared_norm(x)
    calls()
    assert len(calls) == 0


def test_calls_have_the_arguments_of_the_kernels():
    methods = [name for name in vars(kernels.Calls) if not name.startswith("_")]
    assert "attention_decode" in methods
    for name in methods:
        signature = (
            getattr(kernels, name)
            .__doc__.splitlines()[0]
            .replace("(", "(self: fugaku_megatron._kernels.Calls, ", 1)
        )
        assert getattr(kernels.Calls, name).__doc__.splitlines()[0] == signature
