"""AdamW against its reference and torch.optim.AdamW."""

import math

import pytest
import torch
from torch.testing import assert_close

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES, for_each, refuses

pytestmark = pytest.mark.kernels

OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
FP32 = torch.float32
BF16 = torch.bfloat16
MOMENTS = [(FP32, FP32), (BF16, BF16), (BF16, FP32), (FP32, BF16)]


def gradients(n, steps):
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(1 + steps, n, generator=generator)
    values[1:, ::7] = 0
    return values[0], values[1:]


def adamw_steps(n, steps, grad_scale=1.0, copy_dtype=None, moments=MOMENTS[0], **place):
    """Return parameters, moments and copy after a few steps on fixed gradients. moments: their dtypes."""
    param, grads = gradients(n, steps)
    state = [torch.zeros(n, dtype=dtype) for dtype in moments]
    copy = torch.zeros(n, dtype=copy_dtype) if copy_dtype else None
    options = {**OPTIONS, "grad_scale": grad_scale, "copy": copy, **place}
    for step, grad in enumerate(grads, 1):
        kernels.adamw(param, grad, *state, **options, step=step)
    return (param, *state) if copy is None else (param, *state, copy)


def test_adamw_is_torchs(every_target):
    param, grads = gradients(1031, 5)
    weight = torch.nn.Parameter(param)
    lr, *betas, eps, weight_decay = OPTIONS.values()
    optimizer = torch.optim.AdamW([weight], lr, betas, eps, weight_decay)
    for grad in grads:
        weight.grad = grad * 0.5
        optimizer.step()
    state = optimizer.state[weight]
    want = weight.detach(), state["exp_avg"], state["exp_avg_sq"]
    assert_close(adamw_steps(1031, 5, 0.5), want, rtol=2e-6, atol=2e-7)


@for_each(n=SIZES[:-1], copy_dtype=[None, *DTYPES])
def test_adamw_agrees_with_reference(target, reference, n, copy_dtype):
    got = adamw_steps(n, 2, 0.1, copy_dtype)
    want = reference(lambda: adamw_steps(n, 2, 0.1, copy_dtype))
    assert_close(got[:3], want[:3], rtol=2e-6, atol=2e-7)
    if copy_dtype:
        assert torch.equal(got[3], got[0].to(copy_dtype))


@for_each(n=SIZES[:-1], moments=[FP32, BF16], dtype=DTYPES)
def test_writes_stay_inside_the_state(target, guarded, n, moments, dtype):
    state = [guarded((n,), kind) for kind in (FP32, moments, moments)]
    options = {**OPTIONS, "step": 1, "copy": guarded((n,), dtype), "columns": 7, "row": 9}
    kernels.adamw(state[0], torch.ones(n), *state[1:], **options)


@for_each(moments=MOMENTS[:2])
def test_adamw_same_for_any_threads(target, same_for_any_threads, moments):
    same_for_any_threads(lambda: adamw_steps(131101, 2, 0.1, BF16, moments, columns=1000, row=1003))


@for_each(n=SIZES[:-1], moments=MOMENTS[1:])
def test_moments_in_bf16_agree_with_reference(target, reference, n, moments):
    """In one step the parameters see no rounding. A moment near an edge may be the next BF16 number."""
    place = {"seed": 5, "stream": 9, "offset": 11, "first": 3, "columns": 37, "row": 90}
    got = adamw_steps(n, 1, 0.1, torch.float16, moments, **place)
    want = reference(lambda: adamw_steps(n, 1, 0.1, torch.float16, moments, **place))
    assert_close(got[0], want[0], rtol=2e-6, atol=2e-7)
    assert torch.equal(got[3], got[0].half())
    for a, b, dtype in zip(got[1:3], want[1:3], moments, strict=True):
        assert_close(a, b, rtol=2e-6 if dtype == FP32 else 2**-7, atol=0)
        assert (a != b).sum() <= (n if dtype == FP32 else 1 + n // 5000)


def test_a_first_moment_in_bf16_is_rounded_to_nearest_even(target):
    whole, rounded = (adamw_steps(4099, 1, moments=moments) for moments in MOMENTS[:2])
    assert torch.equal(rounded[1], whole[1].bfloat16())


def test_a_second_moment_in_bf16_keeps_its_mean_where_rounding_to_nearest_would_not_fall():
    """Normal gradients that fall to a tenth after half of the steps."""
    generator = torch.Generator().manual_seed(1)
    n = 2048
    steps = 2400
    options = {**OPTIONS, "beta2": 0.999}
    states = [
        (torch.zeros(n), torch.zeros(n), torch.zeros(n, dtype=dtype)) for dtype in (FP32, BF16)
    ]
    for step in range(1, steps + 1):
        grad = torch.randn(n, generator=generator) * (1.0 if step <= steps // 2 else 0.1)
        for param, *moments in states:
            kernels.adamw(param, grad, *moments, **options, step=step)
    ratio = states[1][2].float() / states[0][2]
    deviation = ratio.std().item()
    assert ratio.mean().item() == pytest.approx(1.0, abs=4 * deviation / n**0.5)
    assert 0.005 < deviation < 0.2, "rounded at every step, without a drift"


def test_a_word_of_rounding_belongs_to_the_elements_place_in_the_global_tensor(target):
    """Rows, columns and ranges of a matrix have the bits of the whole; another seed, stream or step rounds otherwise."""
    columns = 91
    values = torch.rand(13, columns, generator=torch.Generator().manual_seed(3))

    def rounded(part, **place):
        moments = torch.zeros(2, part.numel(), dtype=BF16)
        options = {**OPTIONS, "seed": 7, "stream": 3, "step": 2, **place}
        kernels.adamw(torch.zeros(part.numel()), part.flatten(), *moments, **options)
        return moments[1].view(part.shape)

    whole = rounded(values)
    assert torch.equal(rounded(values[4:9], offset=4 * columns), whole[4:9])
    middle = rounded(values[:, 20:57], offset=20, columns=37, row=columns)
    assert torch.equal(middle, whole[:, 20:57])
    part = rounded(values[:, 20:57].flatten()[50:333], offset=20, first=50, columns=37, row=columns)
    assert torch.equal(part, middle.flatten()[50:333])
    for other in ({"seed": 8}, {"stream": 4}, {"step": 3}):
        assert 0.2 < (rounded(values, **other) != whole).float().mean() < 0.5


@for_each(moments=MOMENTS[:2])
def test_adamw_carries_nan(target, moments):
    param = torch.ones(40)
    grad = torch.zeros(40)
    state = [torch.zeros(40, dtype=dtype) for dtype in moments]
    grad[33] = math.nan
    kernels.adamw(param, grad, *state, **OPTIONS, step=1)
    for tensor in (param, *state):
        assert tensor.isnan().nonzero().tolist() == [[33]]


def test_adamw_refuses_bad_arguments():
    zeros = torch.zeros(4)
    shared = torch.zeros(7)
    refuses(
        kernels.adamw,
        (*torch.zeros(4, 4), *OPTIONS.values(), 1),
        {
            "step: expected 1 or more, got 0": 0,
            r"beta1: expected a number in \[0, 1\), got 1.0": 1.0,
            "eps: expected more than 0, got 0.0": 0.0,
            r"grad: expected shape \(4,\) as param, got \(5,\)": torch.zeros(5),
            "exp_avg: expected dtype float32 or bfloat16, got float64": zeros.double(),
            "exp_avg_sq: expected dtype float32 or bfloat16, got float16": zeros.half(),
            "copy: expected dtype float32 or bfloat16 or float16, got int32": zeros.int(),
            "exp_avg: expected memory apart from exp_avg_sq, got overlapping": {
                "exp_avg": shared[:4],
                "exp_avg_sq": shared[3:],
            },
        },
    )
