"""Inputs, comparisons, refusals and matrices for the kernel tests."""

import functools
import inspect
import itertools
import math
import re

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


def randoms(*shapes, dtype=torch.float32):
    """Return one random tensor for each shape, an int or a tuple."""
    sizes = (torch.Size([shape] if isinstance(shape, int) else shape) for shape in shapes)
    return [random(*size, dtype=dtype, seed=seed) for seed, size in enumerate(sizes)]


def packed(weight, transposed, **kind):
    """Pack a weight for linear_forward, or transposed for linear_data_gradient. kind: fp16_chunk or bf16x3."""
    buffer = torch.empty(
        kernels.packed_weight_size(*weight.shape, weight.dtype, transposed, **kind),
        dtype=torch.uint8,
    )
    kernels.pack_weight(weight, buffer, transposed, **kind)
    return buffer


def linear_forms(x, weight, grad, with_packed=False, make=torch.empty, dtype=None, **kind):
    """Return (forward, data gradient) in `dtype`, and (weight gradient, bias gradient) added to ones.

    dtype: by default the operands'; kind: as in `packed`
    """
    m, k = x.shape
    n = len(weight)
    out = make((m, n), dtype=dtype or x.dtype)
    data = make((m, k), dtype=dtype or x.dtype)
    gradient = make((n, k))
    bias = make((n,))
    forward, backward = (
        packed(weight, transposed, **kind) if with_packed else None for transposed in (False, True)
    )
    kernels.linear_forward(x, weight, out, packed=forward, **kind)
    kernels.linear_data_gradient(grad, weight, data, packed=backward, **kind)
    kernels.linear_weight_gradient(grad, x, gradient.fill_(1), bias.fill_(1), **kind)
    return out, data, gradient, bias


def assert_overwrites(grad, x, **kind):
    """Assert that a weight gradient has the same bits over NaN with `overwrite` as added to zeros. kind: as in `packed`"""
    written = torch.full((grad.shape[1], x.shape[1]), math.nan)
    added = torch.zeros_like(written)
    kernels.linear_weight_gradient(grad, x, written, overwrite=True, **kind)
    kernels.linear_weight_gradient(grad, x, added, **kind)
    assert_equal((written,), (added,))


def having(arithmetic, emulated=False):
    """Return the targets with "fp16" or "bf16" arithmetic."""
    names = []
    for name in kernels.runnable_targets(emulated):
        with kernels.target(name):
            names += [name] * getattr(kernels, f"has_{arithmetic}_arithmetic")()
    return names


def assert_near(got, want, dtype, scale=1.0, terms=(), float32=2e-6):
    """Allow a few units of `dtype`, relative to each element and to the largest element or cancelling term."""
    tolerance = {torch.float32: float32, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * scale
    top = max((float(t.abs().max()) for t in (want, *terms) if t.numel()), default=0.0)
    torch.testing.assert_close(
        got.double(), want.double(), rtol=tolerance, atol=tolerance * max(top, 1e-3)
    )


def with_gradients(formula, leaves, gradient):
    """Return the formula's value and its leaves' gradients, in double precision."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    value = formula(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves, gradient.double())


def assert_equal(got, want):
    """Compare two sequences of tensors to the last bit; NaN equals NaN."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def argument_names(kernel):
    return re.findall(r"(\w+): ", kernel.__doc__.splitlines()[0])


def refuses(kernel, good, cases):
    """Call a kernel with one wrong argument at a time: a ValueError, before a tensor is written.

    good: arguments in the kernel's order
    cases: message -> wrong value for the argument that the message begins with, or a dict
    """
    arguments = dict(zip(argument_names(kernel), good, strict=False))
    tensors = [value for value in good if isinstance(value, torch.Tensor)]
    before = [tensor.clone() for tensor in tensors]
    for message, wrong in cases.items():
        changes = wrong if isinstance(wrong, dict) else {message.partition(":")[0]: wrong}
        with pytest.raises(ValueError, match=message):
            kernel(**{**arguments, **changes})
    assert_equal(tensors, before)


def assert_refused(cases):
    """Make calls (call, message) that raise a ValueError with the message."""
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def for_each(**axes):
    """Run a test for all combinations in a loop; a failure names its case.

    Thousands of small tests would cost minutes.
    """

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
