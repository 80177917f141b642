"""Dropout by global position, and its sum with bias and residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...comm.autograd import Function, Gradients
from ..dropout_key import Dropout
from ..parameter import accumulate, gradient_of
from .backend import Backend


def dropout(ops: Backend, x: Tensor, dropped: Dropout) -> Tensor:
    """Zero elements of x (any shape) with probability p and scale the others by 1 / (1 - p).

    Both backends use the C++ kernel, so a mask depends on the key alone.
    """
    return x if dropped.p == 0.0 else _Dropout.apply(ops.kernels, x, dropped)


def masked(kernels: Any, x: Tensor, dropped: Dropout) -> Tensor:
    p, key = dropped
    x = x.contiguous()
    out = torch.empty_like(x)
    for rows, own in key.row_ranges():
        source = x if rows is None else x[rows]
        target = out if rows is None else out[rows]
        kernels.dropout(
            source, target, p, own.seed, own.stream, own.first_sample, own.sample_dim, own.row0
        )
    return out


class _Dropout(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor, dropped: Dropout) -> Tensor:
        ctx.kernels = kernels
        ctx.dropped = dropped
        return masked(kernels, x, dropped)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        return None, masked(ctx.kernels, dy, ctx.dropped), None


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
    if ops.is_native("rowwise"):
        return _BiasDropoutAdd.apply(ops.kernels, x, bias, residual, dropped, needs_values)
    return residual + dropout(ops, x if bias is None else add_bias(x, bias), dropped)


def call_rowwise(kernel: Callable[..., Any], dropped: Dropout, *args: Any) -> None:
    """Call a fused dropout kernel for each range of consecutive rows.

    args: tensors (s, b, h) and statistics (s, b) are cut by rows, others are passed on.
    """
    assert dropped.key.sample_dim == 1
    for rows, own in dropped.key.row_ranges():
        cut = [_rows_of(x, rows) for x in args]
        kernel(*cut, dropped.p, own.seed, own.stream, own.first_sample, own.row0)


def _rows_of(x: Any, rows: slice | None) -> Any:
    if not isinstance(x, Tensor) or x.dim() == 1:
        return x
    if rows is not None:
        x = x[rows]
    return x if x.dim() == 3 else x.flatten()


class _BiasDropoutAdd(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        dropped: Dropout,
        needs_values: bool,
    ) -> Tensor:
        ctx.kernels = kernels
        ctx.bias = bias
        ctx.dropped = dropped
        if not needs_values:
            return residual.new_empty(1).expand_as(residual)
        x = x.contiguous()
        out = torch.empty_like(x)
        call_rowwise(kernels.bias_dropout_add, dropped, x, bias, residual.contiguous(), out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        dout = dout.contiguous()
        dx = torch.empty_like(dout) if ctx.dropped.p else None
        dbias = gradient_of(ctx.bias)
        if dx is not None or dbias is not None:
            call_rowwise(ctx.kernels.bias_dropout_add_backward, ctx.dropped, dout, dx, dbias)
        return None, dout if dx is None else dx, None, dout, None, None


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    return _AddBias.apply(x, bias)


class _AddBias(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.bias = bias
        return x + bias

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        accumulate(ctx.bias, dy.sum((0, 1), dtype=torch.float32))
        return dy, None
