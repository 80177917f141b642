"""Shared parts of the kernel tests: numbers, the same for the same shape and seed, comparisons, and tests of many cases."""

import functools
import inspect
import itertools

import pytest
import torch
from torch.nn import functional as F

from fugaku_megatron.host import kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MLP_ACTIVATIONS = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_exact": F.gelu,
    "squared_relu": lambda x: F.relu(x).square(),
}
SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 61, 64, 65, 127, 1031, 131101]  # of flat tensors


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)


def packed(weight, transposed, **kind):
    """The weight packed for linear_forward, or transposed for linear_data_gradient. kind: fp16_chunk or bf16x3."""
    buffer = torch.empty(
        kernels.packed_weight_size(*weight.shape, weight.dtype, transposed, **kind),
        dtype=torch.uint8,
    )
    kernels.pack_weight(weight, buffer, transposed, **kind)
    return buffer


def linear_forms(x, weight, grad, with_packed=False, make=torch.empty, dtype=torch.float32, **kind):
    """(forward, data gradient), made with this dtype, and (weight gradient, bias gradient) added to ones. kind: as of `packed`."""
    m, k = x.shape
    n = len(weight)
    out = make((m, n), dtype=dtype)
    data = make((m, k), dtype=dtype)
    gradient = make((n, k))
    bias = make((n,))
    forward, backward = (
        packed(weight, transposed, **kind) if with_packed else None for transposed in (False, True)
    )
    kernels.linear_forward(x, weight, out, packed=forward, **kind)
    kernels.linear_data_gradient(grad, weight, data, packed=backward, **kind)
    kernels.linear_weight_gradient(grad, x, gradient.fill_(1), bias.fill_(1), **kind)
    return out, data, gradient, bias


def having(arithmetic, emulated=False):
    """Names of the targets with "fp16" or "bf16" arithmetic."""
    names = []
    for name in kernels.runnable_targets(emulated):
        with kernels.target(name):
            names += [name] * getattr(kernels, f"has_{arithmetic}_arithmetic")()
    return names


def assert_near(got, want, dtype, scale=1.0, terms=(), float32=2e-6):
    """Within a few units of `dtype`, relative to each element and to the largest element or cancelling term."""
    tolerance = {torch.float32: float32, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * scale
    top = max((float(t.abs().max()) for t in (want, *terms) if t.numel()), default=0.0)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance * max(top, 1e-3)
    )


def assert_slope(value, leaves, grads):
    """The gradients are the central differences of value() through each leaf, which is changed in place."""
    for leaf, grad in zip(leaves, grads, strict=True):
        direction = random(*leaf.shape, seed=9)
        values = []
        for step in (1e-2, -1e-2):
            leaf.add_(direction, alpha=step)
            values.append(value())
            leaf.add_(direction, alpha=-step)
        slope = (values[0] - values[1]) / 2e-2
        torch.testing.assert_close(
            (grad.double() * direction.double()).sum(), slope, rtol=3e-3, atol=1e-2
        )


def assert_refused(cases, untouched=()):
    """Each call, of (call, message), raises a ValueError with this message; these tensors of ones stay as they are."""
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    assert all(bool((t == 1).all()) for t in untouched)


def for_each(**axes):
    """Makes one test of all combinations of the values; a failure names its case. Thousands of small tests would cost minutes."""

    def decorate(test):
        @functools.wraps(test)
        def every_case(**fixtures):
            for values in itertools.product(*axes.values()):
                case = dict(zip(axes, values, strict=True))
                try:
                    test(**fixtures, **case)
                except AssertionError as error:
                    raise AssertionError(f"{case}: {error}") from error

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in axes]
        every_case.__signature__ = signature.replace(parameters=kept)
        return every_case

    return decorate
