"""Numbers for the kernel tests, the same for the same shape and seed, and tests of many cases."""

import functools
import inspect
import itertools

import torch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 61, 64, 65, 127, 1031, 131101]  # of flat tensors


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1)).to(dtype)


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
