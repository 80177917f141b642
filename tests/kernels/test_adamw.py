"""AdamW against its reference and torch.optim.AdamW.

    python -m pytest tests/kernels/test_adamw.py
"""

import math

import pytest
import torch

from fugaku_megatron.host import kernels
from tests.kernels.numbers import DTYPES, SIZES

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


def test_writes_stay_inside_the_state(target, guarded):
    for n in SIZES[:-1]:
        for dtype in DTYPES:
            state = [guarded((n,)) for _ in range(3)]
            kernels.adamw(state[0], torch.ones(n), *state[1:], **OPTIONS, step=1, copy=guarded((n,), dtype))


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
