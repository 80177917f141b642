"""AdamW against its reference and torch.optim.AdamW."""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES, assert_refused

OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
BF16 = torch.bfloat16
MOMENTS = [
    (torch.float32, torch.float32),
    (BF16, BF16),
    (BF16, torch.float32),
    (torch.float32, BF16),
]


def adamw_steps(n, steps, grad_scale=1.0, copy_dtype=None, moments=MOMENTS[0], **place):
    """Parameters, moments and copy after a few steps on fixed gradients. moments: their dtypes."""
    generator = torch.Generator().manual_seed(n)
    param = torch.randn(n, generator=generator)
    exp_avg, exp_avg_sq = (torch.zeros(n, dtype=dtype) for dtype in moments)
    copy = torch.zeros(n, dtype=copy_dtype) if copy_dtype else None
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator)
        grad[::7] = 0
        kernels.adamw(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            **OPTIONS,
            step=step,
            grad_scale=grad_scale,
            copy=copy,
            **place,
        )
    return (param, exp_avg, exp_avg_sq) if copy is None else (param, exp_avg, exp_avg_sq, copy)


def test_adamw_is_torchs(every_target):
    n = 1031
    steps = 5
    scale = 0.5
    generator = torch.Generator().manual_seed(n)
    weight = torch.nn.Parameter(torch.randn(n, generator=generator))
    betas = (OPTIONS["beta1"], OPTIONS["beta2"])
    optimizer = torch.optim.AdamW(
        [weight], OPTIONS["lr"], betas, OPTIONS["eps"], OPTIONS["weight_decay"]
    )
    for _ in range(steps):
        weight.grad = torch.randn(n, generator=generator)
        weight.grad[::7] = 0
        weight.grad *= scale
        optimizer.step()
    state = optimizer.state[weight]
    for got, want in zip(
        adamw_steps(n, steps, scale),
        (weight.detach(), state["exp_avg"], state["exp_avg_sq"]),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("copy_dtype", [None, *DTYPES])
def test_adamw_agrees_with_reference(target, reference, copy_dtype):
    for n in SIZES[:-1]:
        got = adamw_steps(n, 2, 0.1, copy_dtype)
        want = reference(lambda n=n: adamw_steps(n, 2, 0.1, copy_dtype))
        for a, b in zip(got[:3], want[:3]):
            torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7)
        if copy_dtype:
            assert torch.equal(got[3], got[0].to(copy_dtype))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_writes_stay_inside_the_state(target, guarded, moments):
    for n in SIZES[:-1]:
        for dtype in DTYPES:
            state = [guarded((n,)), guarded((n,), moments), guarded((n,), moments)]
            kernels.adamw(
                state[0],
                torch.ones(n),
                *state[1:],
                **OPTIONS,
                step=1,
                copy=guarded((n,), dtype),
                columns=7,
                row=9,
            )


@pytest.mark.parametrize("moments", MOMENTS[:2])
def test_adamw_same_for_any_threads(target, same_for_any_threads, moments):
    same_for_any_threads(
        lambda: adamw_steps(131101, 2, 0.1, torch.bfloat16, moments, columns=1000, row=1003)
    )


@pytest.mark.parametrize("moments", MOMENTS[1:])
def test_moments_in_bf16_agree_with_reference(target, reference, moments):
    """One step, in which the parameters see no rounding; a moment that lies on the edge may be the next BF16 number."""
    place = {"seed": 5, "stream": 9, "offset": 11, "first": 3, "columns": 37, "row": 90}
    for n in SIZES[:-1]:
        got = adamw_steps(n, 1, 0.1, torch.float16, moments, **place)
        want = reference(lambda n=n: adamw_steps(n, 1, 0.1, torch.float16, moments, **place))
        torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=2e-7)
        assert torch.equal(got[3], got[0].half())
        for a, b, dtype in zip(got[1:3], want[1:3], moments, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=0)
            assert (a != b).sum() <= (n if dtype == torch.float32 else 1 + n // 5000)


def test_a_first_moment_in_bf16_is_rounded_to_nearest_even(target):
    n = 4099
    whole, rounded = (adamw_steps(n, 1, 1.0, None, moments) for moments in MOMENTS[:2])
    assert torch.equal(rounded[1], whole[1].bfloat16())


def test_a_second_moment_in_bf16_keeps_its_mean_where_rounding_to_nearest_would_not_fall():
    """Normal gradients that fall to a tenth after half of the steps."""
    generator = torch.Generator().manual_seed(1)
    n = 2048
    steps = 2400
    state = [
        [torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=dtype)]
        for dtype in (torch.float32, BF16)
    ]
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator) * (1.0 if step <= steps // 2 else 0.1)
        for tensors in state:
            kernels.adamw(tensors[0], grad, *tensors[1:], **{**OPTIONS, "beta2": 0.999}, step=step)
    ratio = state[1][2].float() / state[0][2]
    mean = ratio.mean().item()
    deviation = ratio.std().item()
    assert mean == pytest.approx(1.0, abs=4 * deviation / len(ratio) ** 0.5)
    assert 0.005 < deviation < 0.2, "rounded at every step, without a drift"


def test_a_word_of_rounding_belongs_to_the_elements_place_in_the_global_tensor(target):
    """Rows, columns and ranges of a matrix have the bits of the whole; another seed, stream or step rounds otherwise."""
    rows = 13
    columns = 91
    values = torch.rand(rows, columns, generator=torch.Generator().manual_seed(3))

    def rounded(part, seed=7, stream=3, step=2, **place):
        part = part.contiguous()
        moments = torch.zeros(2, part.numel(), dtype=BF16)
        kernels.adamw(
            torch.zeros(part.numel()),
            part.flatten(),
            *moments,
            **OPTIONS,
            step=step,
            seed=seed,
            stream=stream,
            **place,
        )
        return moments[1].view(part.shape)

    whole = rounded(values)
    assert torch.equal(rounded(values[4:9], offset=4 * columns), whole[4:9])
    middle = rounded(values[:, 20:57], offset=20, columns=37, row=columns)
    assert torch.equal(middle, whole[:, 20:57])
    part = rounded(values[:, 20:57].flatten()[50:333], offset=20, first=50, columns=37, row=columns)
    assert torch.equal(part, middle.flatten()[50:333])
    for other in (rounded(values, seed=8), rounded(values, stream=4), rounded(values, step=3)):
        assert 0.2 < (other != whole).float().mean() < 0.5


@pytest.mark.parametrize("moments", MOMENTS[:2])
def test_adamw_carries_nan(target, moments):
    param = torch.ones(40)
    grad = torch.zeros(40)
    exp_avg, exp_avg_sq = (torch.zeros(40, dtype=dtype) for dtype in moments)
    grad[33] = math.nan
    kernels.adamw(param, grad, exp_avg, exp_avg_sq, **OPTIONS, step=1)
    for tensor in (param, exp_avg, exp_avg_sq):
        assert tensor.isnan().nonzero().tolist() == [[33]]


def test_adamw_refuses_bad_arguments():
    good = {name: torch.zeros(4) for name in ("param", "grad", "exp_avg", "exp_avg_sq")}
    shared = torch.zeros(7)
    good = {**good, **OPTIONS, "step": 1}
    assert_refused(
        (lambda change=change: kernels.adamw(**{**good, **change}), message)
        for change, message in [
            ({"step": 0}, "step: expected 1 or more, got 0"),
            ({"beta1": 1.0}, r"beta1: expected a number in \[0, 1\), got 1.0"),
            ({"eps": 0.0}, "eps: expected more than 0, got 0.0"),
            ({"grad": torch.zeros(5)}, r"grad: expected shape \(4,\) as param, got \(5,\)"),
            (
                {"exp_avg": torch.zeros(4, dtype=torch.float64)},
                "exp_avg: expected dtype float32 or bfloat16, got float64",
            ),
            (
                {"exp_avg_sq": torch.zeros(4).half()},
                "exp_avg_sq: expected dtype float32 or bfloat16, got float16",
            ),
            (
                {"copy": torch.zeros(4, dtype=torch.int32)},
                "copy: expected dtype float32 or bfloat16 or float16, got int32",
            ),
            (
                {"exp_avg": shared[:4], "exp_avg_sq": shared[3:]},
                "exp_avg: expected memory apart from exp_avg_sq, got overlapping",
            ),
        ]
    )
