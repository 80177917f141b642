"""The replaced ATen operators: a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from . import matmul
from .build import Dispatch


class Operator(NamedTuple):
    """A replaced operator.

    name: ATen's, with the overload
    serve: gets the operator's arguments; returns its value, or NotImplemented before anything is written
    smallest: smaller calls stay with PyTorch: multiply-adds of a product, else elements of the first tensor
    why: reason for `smallest`
    """

    name: str
    serve: Callable[..., object]
    smallest: int
    why: str


_PRODUCT = 1 << 20
_PRODUCT_WHY = "PyTorch's own takes about as long as the call of Python, 10 us"

OPERATORS = (
    Operator("mm", matmul.mm, _PRODUCT, _PRODUCT_WHY),
    Operator("mm.out", matmul.mm, _PRODUCT, _PRODUCT_WHY),
    Operator("addmm", matmul.addmm, _PRODUCT, _PRODUCT_WHY),
    Operator("addmm.out", matmul.addmm, _PRODUCT, _PRODUCT_WHY),
    Operator("bmm", matmul.bmm, _PRODUCT, _PRODUCT_WHY),
    Operator("bmm.out", matmul.bmm, _PRODUCT, _PRODUCT_WHY),
)


def install(dispatch: Dispatch) -> bool:
    """Register every operator; return False if a process imports the package for the second time."""
    if not dispatch.install():
        return False
    for row in OPERATORS:
        dispatch.set(row.name, row.serve, row.smallest)
    return True


@contextmanager
def smallest(dispatch: Dispatch, size: int) -> Iterator[None]:
    """Serve calls from `size` on inside the block, for tests."""
    before = {row.name: dispatch.exchange_smallest(row.name, size) for row in OPERATORS}
    try:
        yield
    finally:
        for name, value in before.items():
            dispatch.exchange_smallest(name, value)
