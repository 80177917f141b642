"""Accumulation of weight gradients into `main_grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """(..., h) -> (rows, h), contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(number, rows) of each group that has rows, of groups whose rows follow one another."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, slice(start, start + count)
        start += count


@overload
def gradient_of(parameter: Tensor) -> Tensor: ...


@overload
def gradient_of(parameter: None) -> None: ...


def gradient_of(parameter: Tensor | None) -> Tensor | None:
    """The FP32 gradient `main_grad` of a parameter, of its shape; None where there is no parameter, and where it is frozen."""
    return None if parameter is None else parameter.main_grad  # type: ignore[attr-defined]  # torch's class does not know it


def is_frozen(parameter: Tensor) -> bool:
    """Whether a parameter is not trained, so that nothing needs to be kept for its gradient. Also of what is made of one."""
    return getattr(parameter, "frozen", False)


def vector_gradient(parameter: Tensor) -> Tensor:
    """`gradient_of` (h) for kernels that compute it in any case; memory that nobody reads where the parameter is frozen."""
    return torch.zeros(parameter.shape) if is_frozen(parameter) else gradient_of(parameter)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` (the parameter's shape, any shape and float dtype) to the parameter's FP32 gradient, unless it is frozen."""
    if not is_frozen(parameter):
        gradient_of(parameter).add_(grad)
