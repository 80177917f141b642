"""Layer norm and RMS norm over the last dimensions, FP32 and BF16, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gradients
from ..host import kernels
from .composed import Composed


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> object:
    """Return the layer norm of x (..., *shape), the mean and the reciprocal standard deviation (..., 1)."""
    if not (epsilon >= 0 and _is_supported(x, shape, weight, bias)):
        return NotImplemented
    rows = _rows(x, shape)
    scale = x.new_ones(shape) if weight is None else weight
    shift = x.new_zeros(shape) if bias is None else bias
    y = torch.empty_like(rows)
    mean, rstd = rows.new_empty(2, len(rows), dtype=torch.float32)
    kernels.layer_norm(rows, _vector(scale), _vector(shift), y, mean, rstd, epsilon)
    leading = x.shape[: x.dim() - len(shape)] + (1,) * len(shape)
    return y.view(x.shape), mean.view(leading).to(x.dtype), rstd.view(leading).to(x.dtype)


def layer_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    *rest: Any,
) -> object:
    """Return the gradients of x, weight and bias. rest: weight, bias and the mask of wanted gradients"""
    weight, bias, wanted = rest
    if not _is_supported(x, shape, weight, bias) or grad_out.dtype != x.dtype:
        return NotImplemented
    rows = _rows(x, shape)
    scale = x.new_ones(shape) if weight is None else weight
    dx = torch.empty_like(rows)
    sums = torch.zeros(2, rows.shape[1])
    kernels.layer_norm_backward(
        _rows(grad_out, shape),
        rows,
        mean.float().flatten(),
        rstd.float().flatten(),
        _vector(scale),
        dx,
        *sums,
    )
    gradients = (dx.view(x.shape), *(each.view(shape).to(x.dtype) for each in sums))
    return tuple(each if needed else None for each, needed in zip(gradients, wanted))


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, epsilon: float | None
) -> object:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dimensions, for x (..., *shape)."""
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    if not (epsilon >= 0 and _is_supported(x, shape, weight)):
        return NotImplemented

    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        rows = _rows(x, shape)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)  # autograd takes no view
        rstd = rows.new_empty(len(rows), dtype=torch.float32)
        kernels.rms_norm(rows, _vector(weight), y.view(rows.shape), rstd, epsilon)
        return y, rstd

    def backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Gradients:
        rows = _rows(x, shape)
        dx = torch.empty_like(rows)
        dweight = torch.zeros(rows.shape[1])
        kernels.rms_norm_backward(_rows(dy, shape), rows, rstd, _vector(weight), dx, dweight)
        return dx.view(x.shape), dweight.view(shape).to(x.dtype)

    def compose(x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.rms_norm.default.decompose(x, shape, weight, epsilon)  # type: ignore[no-any-return]

    scale = x.new_ones(shape) if weight is None else weight
    return Composed.apply(forward, backward, compose, x, scale)


def _is_supported(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> bool:
    """Return True if tensors have one dtype, and x is (..., *shape)."""
    sizes = tuple(shape)
    given = (each for each in parameters if each is not None)
    is_suffix = len(sizes) > 0 and x.shape[-len(sizes) :] == sizes
    return is_suffix and all(each.dtype == x.dtype and each.shape == sizes for each in given)


def _vector(parameter: Tensor) -> Tensor:
    return parameter.contiguous().view(-1)


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x (..., *shape) as contiguous rows, one for each norm."""
    return x.contiguous().view(-1, math.prod(shape))
