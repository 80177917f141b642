"""Accumulation of weight gradients into `main_grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch
from torch import Tensor


def as_rows(x: Tensor) -> Tensor:
    """Return x (..., h) as contiguous rows (rows, h)."""
    return x.contiguous().view(-1, x.shape[-1])


def parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """Yield (number, rows) of each nonempty group."""
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
    """Return the FP32 `main_grad`; None if the parameter is None or frozen."""
    return None if parameter is None else parameter.main_grad  # type: ignore[attr-defined]  # torch's class does not know it


def is_frozen(parameter: Tensor) -> bool:
    return getattr(parameter, "frozen", False)


def vector_gradient(parameter: Tensor) -> Tensor:
    """Return `gradient_of` (h), or scratch memory if the parameter is frozen."""
    return torch.zeros(parameter.shape) if is_frozen(parameter) else gradient_of(parameter)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` (any float dtype) to an unfrozen parameter's gradient."""
    if not is_frozen(parameter):
        gradient_of(parameter).add_(grad)
