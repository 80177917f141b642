"""Layer norm and RMS norm over the last dimensions, FP32 and BF16, and their gradients."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..host import kernels
from . import composed

TYPES = (torch.float32, torch.bfloat16)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> object:
    """Return the layer norm of x (..., *shape), the mean and the reciprocal standard deviation (..., 1)."""
    if not (epsilon >= 0 and _is_supported(x, shape, weight, bias)):
        return NotImplemented
    rows = _rows(x, shape)
    columns = rows.shape[1]
    scale = rows.new_ones(columns) if weight is None else _columns(weight)
    shift = rows.new_zeros(columns) if bias is None else _columns(bias)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    mean, rstd = rows.new_empty(2, len(rows), dtype=torch.float32)
    kernels.layer_norm(rows, scale, shift, y.view(rows.shape), mean, rstd, epsilon)
    leading = x.shape[: x.dim() - len(shape)] + (1,) * len(shape)
    return y, mean.view(leading).to(x.dtype), rstd.view(leading).to(x.dtype)


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
    columns = rows.shape[1]
    scale = rows.new_ones(columns) if weight is None else _columns(weight)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    sums = torch.zeros(2, columns)
    kernels.layer_norm_backward(
        _rows(grad_out, shape),
        rows,
        mean.float().flatten(),
        rstd.float().flatten(),
        scale,
        dx.view(rows.shape),
        *sums,
    )
    dweight, dbias = (each.view(shape).to(x.dtype) for each in sums)
    return (
        dx if wanted[0] else None,
        dweight if wanted[1] else None,
        dbias if wanted[2] else None,
    )


def rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, epsilon: float | None = None
) -> object:
    """Return x / sqrt(mean(x^2) + epsilon) * weight over the last dimensions, for x (..., *shape)."""
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    if not (epsilon >= 0 and _is_supported(x, shape, weight)):
        return NotImplemented
    scale = x.new_ones(tuple(shape)) if weight is None else weight
    return _RmsNorm.apply(x, scale, epsilon)  # type: ignore[no-untyped-call]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        rows = _rows(x, weight.shape)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        rstd = rows.new_empty(len(rows), dtype=torch.float32)
        kernels.rms_norm(rows, _columns(weight), y.view(rows.shape), rstd, epsilon)
        ctx.save_for_backward(x, weight, rstd)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = gradients[0].resolve_neg()
        if not composed.is_plain(dy):
            compose = functools.partial(_compose, x, weight, ctx.epsilon)
            return *composed.gradients(compose, (x, weight), dy), None
        rows = _rows(x, weight.shape)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dweight = torch.zeros(rows.shape[1])
        kernels.rms_norm_backward(
            _rows(dy, weight.shape), rows, rstd, _columns(weight), dx.view(rows.shape), dweight
        )
        return dx, dweight.view(weight.shape).to(x.dtype), None


def _compose(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm by operators of torch."""
    wide = x.float()
    squares = wide.square().mean(tuple(range(-weight.dim(), 0)), keepdim=True)
    return (wide * torch.rsqrt(squares + epsilon) * weight).to(x.dtype)


def _is_supported(x: Tensor, shape: Sequence[int], *parameters: Tensor | None) -> bool:
    """Return True if tensors have elements and one dtype of the kernels, and x is (..., *shape)."""
    given = [each for each in parameters if each is not None]
    sizes = tuple(shape)
    return (
        x.dtype in TYPES
        and x.numel() > 0
        and len(sizes) > 0
        and x.shape[-len(sizes) :] == sizes
        and all(each.dtype == x.dtype and each.shape == sizes for each in given)
    )


def _columns(parameter: Tensor) -> Tensor:
    """Return a parameter as a contiguous vector."""
    return parameter.contiguous().view(-1)


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return x (..., *shape) as contiguous rows, one for each norm."""
    return x.contiguous().view(-1, math.prod(shape))
