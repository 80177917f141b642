"""Dropout by global position, and its sum with bias and residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...comm.autograd import Gradients, SavedResult, apply_conjugates, apply_saving
from ..dropout_key import Dropout
from ..parameter import accumulate, bias_gradient
from .backend import Backend


def dropout(ops: Backend, x: Tensor, dropped: Dropout) -> Tensor:
    """Zero elements of x (any shape) with probability p and scale the others by 1 / (1 - p).

    Both backends use the C++ kernel, so a mask depends on the key alone.
    """
    if dropped.p == 0.0:
        return x
    mask = partial(masked, ops.kernels, dropped=dropped)
    return apply_conjugates(mask, mask, x)


def masked(kernels: Any, x: Tensor, dropped: Dropout) -> Tensor:
    p, key = dropped
    x = x.contiguous()
    out = torch.empty_like(x)
    for rows, own in key.row_ranges():
        kernels.dropout(
            x[rows], out[rows], p, own.seed, own.stream, own.first_sample, own.sample_dim, own.row0
        )
    return out


def bias_dropout_add(
    ops: Backend,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropped: Dropout,
    needs_values: bool = True,
) -> Tensor:
    """Return residual + dropout(x + bias). x (s, b, h), bias (h) -> (s, b, h).

    needs_values: False if a backward follows and the result is not read; the native backend then leaves it unset.
    """
    if not ops.is_native("rowwise"):
        return residual + dropout(ops, x if bias is None else add_bias(x, bias), dropped)
    kernels = ops.kernels

    def forward() -> SavedResult:
        if not needs_values:
            return residual.new_empty(1).expand_as(residual), ()
        out = x.new_empty(x.shape)
        call_rowwise(
            kernels.bias_dropout_add, dropped, x.contiguous(), bias, residual.contiguous(), out
        )
        return out, ()

    def backward(dout: Tensor) -> Gradients:
        dout = dout.contiguous()
        dx = torch.empty_like(dout) if dropped.p else None
        dbias = bias_gradient(bias)
        if dx is not None or dbias is not None:
            call_rowwise(kernels.bias_dropout_add_backward, dropped, dout, dx, dbias)
        return dout if dx is None else dx, dout

    return apply_saving(forward, backward, x, residual, bias)


def call_rowwise(kernel: Callable[..., Any], dropped: Dropout, *args: Any) -> None:
    """Call a fused dropout kernel for each range of consecutive rows.

    args: tensors (s, b, h) and statistics (s, b) are cut by rows, others are passed on.
    """
    assert dropped.key.sample_dim == 1
    for rows, own in dropped.key.row_ranges():
        cut = [_rows_of(x, rows) for x in args]
        kernel(*cut, dropped.p, own.seed, own.stream, own.first_sample, own.row0)


def _rows_of(x: Any, rows: slice) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 1:
        return x
    return x[rows] if x.dim() == 3 else x[rows].flatten()


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    def backward(dy: Tensor) -> Tensor:
        accumulate(bias, dy.sum((0, 1), dtype=torch.float32))
        return dy

    return apply_saving(lambda: (x + bias, ()), backward, x, bias)
