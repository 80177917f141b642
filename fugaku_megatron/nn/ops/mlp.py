"""The MLP f(x W1^T + b1) W2^T as one operation, which saves its input and `pre`, the argument of f.

f MLP width; shapes with a gate as in `activation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import SavedResult, apply_saving, gather_sequence, reduce_scatter_sequence
from ...comm.base import Comm
from ..parameter import GradientMemory, as_rows, columns_of, is_frozen, matrix, take_gradient
from .activation import Activation, activate, activation_gradient, as_gates, fused_kernel, kernel
from .backend import Backend
from .gemm import data_gradient, matmul, row_count, weight_gradient

# Backward has two copies of this fraction of the inner tensor, and at least so many columns.
COLUMN_BLOCKS = 4
MIN_COLUMNS = 512

GELU = Activation("gelu")


class MLPWeights(NamedTuple):
    """Weights of an MLP, and its activation.

    weight1, bias1: (f, h) and (f), or with a gate (2, f, h) and (2, f).
    weight2: (h, f)
    """

    weight1: Tensor
    bias1: Tensor | None
    weight2: Tensor
    activation: Activation = GELU

    def as_matrices(self) -> MLPWeights:
        if not self.activation.gated:
            return self
        bias1 = None if self.bias1 is None else matrix(self.bias1)
        return self._replace(weight1=matrix(self.weight1), bias1=bias1)


def mlp(
    ops: Backend,
    x: Tensor,
    weights: MLPWeights,
    needs_values: bool = True,
    sequence: Comm | None = None,
) -> Tensor:
    """Return f(x W1^T + b1) W2^T, (s, b, h) -> (s, b, h).

    needs_values: False if a backward follows and neither the result nor x is read again; backward may then overwrite x.
    sequence: as in `linear`.
    """
    weights = weights.as_matrices()
    weight1, bias1, weight2, activation = weights
    fused = fused_kernel(ops, activation)
    overwrites_input = ops.is_native("gemm") and (not needs_values or sequence is not None)

    def forward() -> SavedResult:
        pre = x.new_empty(row_count(x, sequence), len(weight1))
        whole = gather_sequence(x, sequence)
        rows = as_rows(whole)
        if needs_values:
            out = x.new_empty(len(rows), len(weight2))
            if fused is not None:
                inner = torch.empty_like(pre)
                matmul(ops, rows, weight1, inner, bias1, fused, pre)
            else:
                matmul(ops, rows, weight1, pre, bias1)
                inner = activate(ops, pre, activation)
            matmul(ops, inner, weight2, out)
        else:
            out = x.new_empty(1).expand(len(rows), len(weight2))
            matmul(ops, rows, weight1, pre, bias1)
        # The inner tensor is cheaper to recompute than to save.
        return out.view(*whole.shape[:-1], -1), (rows if sequence is None else x, pre)

    def backward(dy: Tensor, x: Tensor, pre: Tensor) -> Tensor:
        lead = dy.shape[:-1]
        dy = as_rows(dy)
        if kernel(ops, activation) is not None and not ops.weight_gradients.waits:
            _overwrite_with_gradient(ops, dy, pre, weight2, activation)
            dpre = pre
        else:
            add_second_weight_gradient(ops, dy, pre, weight2, activation)
            dpre = torch.empty_like(pre)
            argument_gradient(ops, dy, weight2, pre, dpre, activation)
        if is_frozen(weight1) and sequence is not None:
            dx = dpre.new_empty(len(dpre), x.shape[-1])
        else:
            rows = as_rows(gather_sequence(x, sequence))
            weight_gradient(ops, dpre, rows, weight1, bias1)
            reusable = overwrites_input and not ops.weight_gradients.waits
            dx = rows if reusable else torch.empty_like(rows)
        data_gradient(ops, dpre, weight1, dx)
        return reduce_scatter_sequence(dx.view(*lead, -1), sequence)

    return apply_saving(forward, backward, x)


def argument_gradient(
    ops: Backend, dy: Tensor, weight2: Tensor, pre: Tensor, dpre: Tensor, activation: Activation
) -> None:
    """Write the gradient of pre to dpre, from dy (rows, h)."""
    fused = fused_kernel(ops, activation)
    if fused is not None:
        data_gradient(ops, dy, weight2, dpre, pre, fused)
        return
    dinner = pre.new_empty(len(pre), weight2.shape[1])
    data_gradient(ops, dy, weight2, dinner)
    activation_gradient(ops, dinner, pre, dpre, activation)


def add_second_weight_gradient(
    ops: Backend, dy: Tensor, pre: Tensor, weight2: Tensor, activation: Activation
) -> None:
    """Add dy^T f(pre) to the gradient of weight2 (h, f), perhaps later: dy and pre must not change until then."""
    if is_frozen(weight2):
        return
    if kernel(ops, activation) is None:
        weight_gradient(ops, dy, activate(ops, pre, activation), weight2, None)
        return

    def work() -> None:
        gradient = take_gradient(weight2)
        for columns, inner in _column_blocks(pre, weight2.shape[1], whole=False):
            argument = _columns(pre, columns, activation)
            _add_columns_gradient(ops, dy, argument, inner, gradient, columns, activation)

    ops.weight_gradients.add(work)


def _overwrite_with_gradient(
    ops: Backend, dy: Tensor, pre: Tensor, weight2: Tensor, activation: Activation
) -> None:
    row = activation.row
    packed = ops.packed(weight2, dy.dtype, transposed=True)
    length = ops.sum_length(dy)
    gradient = None if is_frozen(weight2) else take_gradient(weight2)
    for columns, inner in _column_blocks(pre, weight2.shape[1], whole=packed is not None):
        argument = _columns(pre, columns, activation)
        if gradient is not None:
            _add_columns_gradient(ops, dy, argument, inner, gradient, columns, activation)
        weight, scales = columns_of(weight2, columns)
        results = (inner,) if row.gated else (argument, argument, row.kernel)
        ops.kernels.linear_data_gradient(
            dy, weight, *results, packed=packed, fp16_chunk=length, **scales
        )
        if row.gated:
            ops.kernels.gate_backward(inner, argument, argument, row.kernel)


def _column_blocks(pre: Tensor, width: int, whole: bool) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of columns, or all at once, with the same memory."""
    columns = width
    if not whole:
        columns = min(max(MIN_COLUMNS, -(-width // COLUMN_BLOCKS // 64) * 64), width)
    buffer = pre.new_empty(len(pre) * columns)
    for first in range(0, width, columns):
        block = slice(first, min(first + columns, width))
        yield block, buffer[: len(pre) * (block.stop - first)].view(len(pre), -1)


def _columns(pre: Tensor, columns: slice, activation: Activation) -> Tensor:
    if activation.gated:
        return as_gates(pre)[:, :, columns]
    return pre[:, columns]


def _add_columns_gradient(
    ops: Backend,
    dy: Tensor,
    argument: Tensor,
    inner: Tensor,
    gradient: GradientMemory,
    columns: slice,
    activation: Activation,
) -> None:
    row = activation.row
    if row.gated:
        ops.kernels.gate(argument, inner, row.kernel)
    else:
        ops.kernels.activate(argument, None, inner, row.kernel)
    ops.kernels.linear_weight_gradient(
        dy,
        inner,
        gradient.values[:, columns],
        fp16_chunk=ops.sum_length(dy),
        overwrite=gradient.overwrite,
    )
