"""Operators of torch with the kernels of `torch_backend` and without, compared with double precision."""

import contextlib

import torch

from fugaku_megatron.torch_backend import build, enabled, operators
from tests.kernels.numbers import assert_near


@contextlib.contextmanager
def serving():
    """Serve calls of any size inside the block."""
    with enabled(kernels="native"), operators.every_size(build.load()):
        yield


@contextlib.contextmanager
def counting(served):
    """Add the served calls of each operator to a dictionary."""

    def counts():
        return {name: number for name, _, number, *_ in build.load().counts()}

    build.load().count(True)
    before = counts()
    try:
        yield
    finally:
        build.load().count(False)
        for name, number in counts().items():
            served[name] = served.get(name, 0) + number - before.get(name, 0)


def assert_as_torch(call, **options):
    """Assert that call() returns with the kernels what it returns without them. options: of torch.testing.assert_close"""
    with serving():
        got = call()
    with enabled(False):
        want = call()
    torch.testing.assert_close(got, want, **options)


def with_gradients(function, tensors):
    """Return function(*tensors) and the gradients of the tensors that are not None."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    y = function(*leaves)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y.dtype)
    given = [x for x in leaves if x is not None]
    return [y.detach(), *torch.autograd.grad(y, given, dy)]


def assert_served(function, *tensors, operator, scale=1.0):
    """Assert that the kernels serve an operator with torch's layouts, near double precision, forward and backward."""
    with enabled(False):
        layouts = with_gradients(function, tensors)
        exact = with_gradients(function, [None if x is None else x.double() for x in tensors])
    served = {}
    with serving(), counting(served):
        got = with_gradients(function, tensors)
    assert served.get(operator), f"{operator} was left to torch"
    for ours, layout, want in zip(got, layouts, exact, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype) == (
            layout.shape,
            layout.stride(),
            layout.dtype,
        )
        assert_near(ours, want, ours.dtype, scale, terms=exact[1:])
