"""Elementwise, convert, reductions and AdamW against their references and torch.

    python -m pytest tests/kernels/test_rows.py
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels

SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 61, 64, 65, 127, 1031, 131101]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
    """Largest distance in units of the last place of the float32 result; want is float64."""
    exponent = torch.frexp(want.abs().clamp_min(2.0**-126)).exponent.double()
    return float(((got.double() - want).abs() / torch.exp2(exponent - 24)).max())


def test_exp_over_its_whole_range(target):
    x = torch.linspace(-87.33, 88.70, 2_000_003)
    assert ulps(elementwise("exp", x), x.double().exp()) <= 2
    near_zero = torch.randn(100_001) * 1e-3
    assert ulps(elementwise("exp", near_zero), near_zero.double().exp()) <= 2


def test_exp_beyond_its_range(target):
    x = torch.tensor([-math.inf, -1e30, -104.0, -87.4, 88.73, 1e30, math.inf, math.nan, 0.0, -0.0])
    want = torch.tensor([0.0, 0.0, 0.0, 0.0, math.inf, math.inf, math.inf, math.nan, 1.0, 1.0])
    torch.testing.assert_close(elementwise("exp", x), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("function", ["log", "sqrt", "rsqrt", "reciprocal"])
def test_functions_of_positive_numbers(target, function):
    x = torch.exp2(torch.linspace(-125, 125, 500_001))
    assert ulps(elementwise(function, x), getattr(x.double(), function)()) <= 2
    near_one = 1 + torch.linspace(-0.29, 0.41, 100_003)
    assert (elementwise(function, near_one) - getattr(near_one, function)()).abs().max() < 3e-7


def test_sqrt_of_zero_and_infinity(target):
    assert elementwise("sqrt", torch.tensor([0.0, math.inf])).tolist() == [0.0, math.inf]


@pytest.mark.parametrize("function", ["exp", "log", "sqrt", "rsqrt", "reciprocal"])
def test_elementwise_agrees_with_reference(target, reference, function):
    for n in SIZES:
        x = torch.rand(n) + 0.01
        torch.testing.assert_close(elementwise(function, x), reference(lambda x=x: elementwise(function, x)))


def test_elementwise_names_its_functions():
    with pytest.raises(ValueError, match="function: expected one of exp, log, sqrt, rsqrt, reciprocal, got sinh"):
        elementwise("sinh", torch.ones(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*kernels.runnable_targets(), "reference"])
def test_convert_from_every_half(dtype, name):
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    with kernels.target(name):
        torch.testing.assert_close(convert(halves, torch.float32), halves.float(), rtol=0, atol=0, equal_nan=True)
        back = convert(halves.float(), dtype)
    finite = ~halves.isnan()
    assert torch.equal(back.view(torch.int16)[finite], halves.view(torch.int16)[finite])
    assert bool(back[~finite].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*kernels.runnable_targets(), "reference"])
def test_convert_rounds_to_nearest_even(dtype, name):
    generator = torch.Generator().manual_seed(3)
    bits = torch.randint(-(2**31), 2**31, (300_000,), generator=generator).to(torch.int32)
    ties = (bits & ~0x1FFF) | 0x1000  # half way between two float16
    x = torch.cat([bits, ties, (bits & ~0xFFFF) | 0x8000]).view(torch.float32)
    # float16's own range, with its denormals and the edge of overflow
    halves = [torch.linspace(-end, end, 100_001) for end in (66000, 1e-4)]
    x = torch.cat([x, *halves, torch.tensor(SPECIAL)])
    with kernels.target(name):
        got = convert(x, dtype)
    want, finite = x.to(dtype), ~x.isnan()
    assert torch.equal(got.view(torch.int16)[finite], want.view(torch.int16)[finite])
    assert bool(got[~finite].isnan().all())


def test_convert_all_pairs_and_sizes(target):
    for n in SIZES[:-1]:
        for source in DTYPES:
            for goal in DTYPES:
                x = torch.randn(n).to(source)
                assert torch.equal(convert(x, goal), x.to(goal))


def test_writes_stay_inside_the_output(target, guarded):
    for n in SIZES[:-1]:
        kernels.elementwise("exp", torch.randn(n), guarded((n,)))
        for dtype in DTYPES:
            kernels.convert(torch.randn(n), guarded((n,), dtype))
            state = [guarded((n,)) for _ in range(3)]
            kernels.adamw(state[0], torch.ones(n), *state[1:], **OPTIONS, step=1, copy=guarded((n,), dtype))


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


OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def adamw_steps(n, steps, grad_scale=1.0, copy_dtype=None):
    """Parameters, moments and copy after a few steps on fixed gradients."""
    generator = torch.Generator().manual_seed(n)
    param = torch.randn(n, generator=generator)
    exp_avg, exp_avg_sq = torch.zeros(n), torch.zeros(n)
    copy = torch.zeros(n, dtype=copy_dtype) if copy_dtype else None
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator)
        grad[::7] = 0
        kernels.adamw(param, grad, exp_avg, exp_avg_sq, **OPTIONS, step=step, grad_scale=grad_scale, copy=copy)
    return (param, exp_avg, exp_avg_sq) if copy is None else (param, exp_avg, exp_avg_sq, copy)


@pytest.mark.parametrize("name", [*kernels.runnable_targets(), "reference"])
def test_adamw_is_torchs(name):
    n, steps, scale = 1031, 5, 0.5
    generator = torch.Generator().manual_seed(n)
    weight = torch.nn.Parameter(torch.randn(n, generator=generator))
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = torch.optim.AdamW([weight], OPTIONS["lr"], betas, OPTIONS["eps"], OPTIONS["weight_decay"])
    for _ in range(steps):
        weight.grad = torch.randn(n, generator=generator)
        weight.grad[::7] = 0
        weight.grad *= scale
        optimizer.step()
    with kernels.target(name):
        param, exp_avg, exp_avg_sq = adamw_steps(n, steps, scale)
    torch.testing.assert_close(param, weight.detach(), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(exp_avg, optimizer.state[weight]["exp_avg"], rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(exp_avg_sq, optimizer.state[weight]["exp_avg_sq"], rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("copy_dtype", [None, *DTYPES])
def test_adamw_agrees_with_reference(target, reference, copy_dtype):
    for n in SIZES[:-1]:
        got = adamw_steps(n, 2, 0.1, copy_dtype)
        want = reference(lambda n=n: adamw_steps(n, 2, 0.1, copy_dtype))
        for a, b in zip(got[:3], want[:3]):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        if copy_dtype:
            assert torch.equal(got[3], got[0].to(copy_dtype))


def test_adamw_same_for_any_threads(target, same_for_any_threads):
    same_for_any_threads(lambda: adamw_steps(131101, 2, 0.1, torch.bfloat16))


def test_adamw_carries_nan(target):
    param, grad, exp_avg, exp_avg_sq = torch.ones(40), torch.zeros(40), torch.zeros(40), torch.zeros(40)
    grad[33] = math.nan
    kernels.adamw(param, grad, exp_avg, exp_avg_sq, **OPTIONS, step=1)
    assert param.isnan().nonzero().tolist() == [[33]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 0}, "step: expected 1 or more, got 0"),
        ({"beta1": 1.0}, r"beta1: expected a number in \[0, 1\), got 1.0"),
        ({"eps": 0.0}, "eps: expected more than 0, got 0.0"),
        ({"grad": torch.zeros(5)}, r"grad: expected shape \(4,\) as param, got \(5,\)"),
        ({"exp_avg": torch.zeros(4, dtype=torch.float64)}, "exp_avg: expected dtype float32, got float64"),
        ({"copy": torch.zeros(4, dtype=torch.int32)}, "copy: expected dtype float32 or bfloat16 or float16, got int32"),
    ],
)
def test_adamw_refuses_bad_arguments(change, message):
    arguments = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    with pytest.raises(ValueError, match=message):
        kernels.adamw(**{**arguments, **OPTIONS, "step": 1, **change})


def test_adamw_refuses_shared_memory():
    buffer = torch.zeros(10)
    with pytest.raises(ValueError, match="exp_avg: expected memory apart from exp_avg_sq, got overlapping"):
        kernels.adamw(torch.zeros(5), torch.zeros(5), buffer[:5], buffer[4:9], **OPTIONS, step=1)
