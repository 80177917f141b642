"""Elementary functions and conversion against their references and torch."""

import math

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES, assert_equal, for_each, refuses

pytestmark = pytest.mark.kernels

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan]


def elementwise(function, x):
    out = torch.full_like(x, math.nan)
    kernels.elementwise(function, x, out)
    return out


def convert(x, dtype):
    out = torch.full_like(x, math.nan, dtype=dtype)
    kernels.convert(x, out)
    return out


def ulps(got, want):
    """Return the largest distance in float32 units in the last place; want is float64."""
    exponent = torch.frexp(want.abs().clamp_min(2.0**-126)).exponent.double()
    return float(((got.double() - want).abs() / torch.exp2(exponent - 24)).max())


def test_exp_over_its_whole_range_and_special_values(target):
    for x in (torch.linspace(-87.33, 88.70, 2_000_003), torch.randn(100_001) * 1e-3):
        assert ulps(elementwise("exp", x), x.double().exp()) <= 2
    x = torch.tensor([-math.inf, -1e30, -104.0, -87.4, 88.73, 1e30, math.inf, math.nan, 0.0, -0.0])
    want = torch.tensor([0.0, 0.0, 0.0, 0.0, math.inf, math.inf, math.inf, math.nan, 1.0, 1.0])
    assert_close(elementwise("exp", x), want, rtol=0, atol=0, equal_nan=True)
    assert elementwise("sqrt", torch.tensor([0.0, math.inf])).tolist() == [0.0, math.inf]
    message = "function: expected one of exp, log, sqrt, rsqrt, reciprocal, got sinh"
    refuses(kernels.elementwise, ("exp", torch.ones(3), torch.ones(3)), {message: "sinh"})


@for_each(function=["log", "sqrt", "rsqrt", "reciprocal"])
def test_functions_of_positive_numbers(target, function):
    x = torch.exp2(torch.linspace(-125, 125, 500_001))
    assert ulps(elementwise(function, x), getattr(x.double(), function)()) <= 2
    near_one = 1 + torch.linspace(-0.29, 0.41, 100_003)
    assert (elementwise(function, near_one) - getattr(near_one, function)()).abs().max() < 3e-7


@for_each(function=["exp", "log", "sqrt", "rsqrt", "reciprocal"], n=SIZES)
def test_elementwise_agrees_with_reference(target, reference, function, n):
    x = torch.rand(n) + 0.01
    want = reference(lambda: elementwise(function, x))
    assert_close(elementwise(function, x), want)


def assert_converted(got, want):
    """Compare bits, except in NaN."""
    finite = ~want.isnan()
    assert torch.equal(got.view(torch.int16)[finite], want.view(torch.int16)[finite])
    assert bool(got[~finite].isnan().all())


@for_each(dtype=DTYPES[1:])
def test_convert_from_every_half(every_target, dtype):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert_equal([convert(halves, torch.float32)], [halves.float()])
    assert_converted(convert(halves.float(), dtype), halves)


@for_each(dtype=DTYPES[1:])
def test_convert_rounds_to_nearest_even(every_target, dtype):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (40_000,), generator=generator).to(torch.int32)
    ties = (bits & ~0x1FFF) | 0x1000  # half way between two float16
    x = torch.cat([bits, ties, (bits & ~0xFFFF) | 0x8000]).view(torch.float32)
    # float16's own range, with its denormals and the edge of overflow
    halves = [torch.linspace(-end, end, 20_001) for end in (66000, 1e-4)]
    x = torch.cat([x, *halves, torch.tensor(SPECIAL)])
    assert_converted(convert(x, dtype), x.to(dtype))


@for_each(n=SIZES[:-1], source=DTYPES, goal=DTYPES)
def test_convert_all_pairs_and_sizes(target, n, source, goal):
    x = torch.randn(n).to(source)
    assert torch.equal(convert(x, goal), x.to(goal))


@for_each(n=SIZES[:-1], dtype=DTYPES)
def test_writes_stay_inside_the_output(target, guarded, n, dtype):
    kernels.elementwise("exp", torch.randn(n), guarded((n,)))
    kernels.convert(torch.randn(n), guarded((n,), dtype))
