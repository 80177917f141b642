"""Matrix products of rows in groups, one for each expert.

The first counts[0] rows multiply the first matrix of a weight (groups, ..., in), and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..parameter import is_frozen, matrix_of, row_groups, scales_keyword, take_gradient
from .backend import Backend
from .gemm import data_gradient, matmul, outer_sum, weight_gradient


def grouped_matmul(
    ops: Backend, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor
) -> None:
    """Write x (n, in) times the transposed matrix of each row's group to out (n, out); groups may be empty."""
    few = len(x) <= ops.few_rows
    if not ops.is_native("gemm") or ops.weight_cache is not None or few:
        for number, rows in row_groups(counts):
            matmul(ops, x[rows], matrix_of(weight, number), out[rows])
        return
    _grouped(ops.kernels.grouped_linear_forward, ops, x, weight, counts, out)


def grouped_data_gradient(
    ops: Backend, dy: Tensor, weight: Tensor, counts: Sequence[int], dx: Tensor
) -> None:
    """Write dy (n, out) times the matrix of each row's group to dx (n, in)."""
    if not ops.is_native("gemm") or ops.weight_cache is not None:
        for number, rows in row_groups(counts):
            data_gradient(ops, dy[rows], matrix_of(weight, number), dx[rows])
        return
    _grouped(ops.kernels.grouped_linear_data_gradient, ops, dy, weight, counts, dx)


def _grouped(
    kernel: Any, ops: Backend, x: Tensor, weight: Tensor, counts: Sequence[int], out: Tensor
) -> None:
    scales = {name: value.flatten(1, -2) for name, value in scales_keyword(weight).items()}
    matrices = weight.detach().flatten(1, -2)
    kernel(x, matrices, torch.tensor(counts), out, ops.sum_length(x), **scales)


def grouped_weight_gradient(
    ops: Backend, dy: Tensor, x: Tensor, weight: Tensor, counts: Sequence[int]
) -> None:
    """Add dy^T x of each group's rows to the gradient of its matrix, perhaps later, as `weight_gradient`."""
    if not ops.is_native("gemm"):
        for number, rows in row_groups(counts):
            weight_gradient(ops, dy[rows], x[rows], matrix_of(weight, number), None)
        return
    if is_frozen(weight):
        return
    ops.weight_gradients.add(
        partial(_native_weight_gradient, ops, dy, x.detach(), weight, torch.tensor(counts))
    )


def _native_weight_gradient(
    ops: Backend, dy: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> None:
    gradient = take_gradient(weight)
    ops.kernels.grouped_linear_weight_gradient(
        dy,
        x,
        counts,
        gradient.values.flatten(1, -2),
        ops.sum_length(dy),
        overwrite=gradient.overwrite,
    )


def grouped_outer_sum(ops: Backend, dy: Tensor, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Return dy^T x of each group's rows in FP32, (groups, out, in)."""
    total = torch.zeros(len(counts), dy.shape[1], x.shape[1])
    if ops.is_native("gemm"):
        ops.kernels.grouped_linear_weight_gradient(dy, x, torch.tensor(counts), total, 0)
    else:
        for number, rows in row_groups(counts):
            total[number] = outer_sum(ops, dy[rows], x[rows])
    return total
