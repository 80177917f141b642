"""Matmuls overlapped with the exchange of sequence shards, in blocks of rows (--tp-comm-overlap).

    column_linear   gathers its input                      backward reduce-scatters the input gradient
    row_linear      reduce-scatters its result             backward gathers the gradient
    overlapped_mlp  both, with the activation in between

Weight gradients run while the last blocks are sent. Results have the same bits as without blocks.
Shapes: t ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...comm.autograd import Gathering, RowBlocks, SavedResult, Summing, apply_saving
from ..parameter import as_rows
from .activation import activate, fused_kernel
from .backend import Backend
from .gemm import data_gradient, matmul, weight_gradient
from .mlp import MLPWeights, add_second_weight_gradient, argument_gradient


def column_linear(
    ops: Backend, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: RowBlocks
) -> Tensor:
    """Return `linear` of the gathered x, (s / t, b, in) -> (s, b, out)."""

    def forward() -> SavedResult:
        out = x.new_empty(x.shape[0] * blocks.comm.size, x.shape[1], weight.shape[0])
        gathering = Gathering(blocks, x)
        out_rows = out.view(-1, out.shape[-1])
        for rows in gathering:
            matmul(ops, gathering.rows[rows], weight, out_rows[rows], bias)
        gathering.wait()
        return out, (x,)

    def backward(dy: Tensor, x: Tensor) -> Tensor:
        dy = as_rows(dy)
        gathering = Gathering(blocks, x)
        total = _data_gradient_sum(ops, dy, weight, blocks)
        weight_gradient(ops, dy, _gathered_rows(gathering), weight, bias)
        return total.wait().view(x.shape)

    return apply_saving(forward, backward, x, weight, bias)


def row_linear(ops: Backend, x: Tensor, weight: Tensor, blocks: RowBlocks) -> Tensor:
    """Return this rank's shard of the sum of `linear` over ranks, (s, b, in) -> (s / t, b, out)."""

    def forward() -> SavedResult:
        x_rows = as_rows(x)
        total = Summing(blocks, len(x_rows), weight.shape[0], x.dtype)
        for rows, block in total:
            matmul(ops, x_rows[rows], weight, block)
        result = total.wait().view(x.shape[0] // blocks.comm.size, *x.shape[1:-1], -1)
        return result, (x_rows,)

    def backward(dy: Tensor, x_rows: Tensor) -> Tensor:
        gathering = Gathering(blocks, dy)
        dx = torch.empty_like(x_rows)
        for rows in gathering:
            data_gradient(ops, gathering.rows[rows], weight, dx[rows])
        weight_gradient(ops, _gathered_rows(gathering), x_rows, weight, None)
        return dx.view(-1, *dy.shape[1:-1], dx.shape[-1])

    return apply_saving(forward, backward, x, weight)


def overlapped_mlp(
    ops: Backend, x: Tensor, weights: MLPWeights, needs_values: bool, blocks: RowBlocks
) -> Tensor:
    """Return this rank's shard of the sum of `mlp` over ranks, (s / t, b, h) -> (s / t, b, h)."""
    weights = weights.as_matrices()
    weight1, bias1, weight2, activation = weights
    fused = fused_kernel(ops, activation)

    def forward() -> SavedResult:
        gathering = Gathering(blocks, x)
        pre = x.new_empty(len(gathering.rows), len(weight1))
        inner = None
        if needs_values and fused is not None:
            inner = torch.empty_like(pre)
        for rows in gathering:
            if inner is None:
                matmul(ops, gathering.rows[rows], weight1, pre[rows], bias1)
            else:
                matmul(ops, gathering.rows[rows], weight1, inner[rows], bias1, fused, pre[rows])
        gathering.wait()
        if not needs_values:
            return x.new_empty(1).expand(x.shape), (x, pre)
        total = Summing(blocks, len(pre), len(weight2), x.dtype)
        for rows, block in total:
            values = activate(ops, pre[rows], activation) if inner is None else inner[rows]
            matmul(ops, values, weight2, block)
        return total.wait().view(x.shape), (x, pre)

    def backward(dy: Tensor, x: Tensor, pre: Tensor) -> Tensor:
        gradient = Gathering(blocks, dy)
        inputs = Gathering(blocks, x)
        dpre = torch.empty_like(pre)
        for rows in gradient:
            argument_gradient(ops, gradient.rows[rows], weight2, pre[rows], dpre[rows], activation)
        total = _data_gradient_sum(ops, dpre, weight1, blocks)
        add_second_weight_gradient(ops, _gathered_rows(gradient), pre, weight2, activation)
        weight_gradient(ops, dpre, _gathered_rows(inputs), weight1, bias1)
        return total.wait().view(x.shape)

    return apply_saving(forward, backward, x)


def _data_gradient_sum(ops: Backend, dy: Tensor, weight: Tensor, blocks: RowBlocks) -> Summing:
    total = Summing(blocks, len(dy), weight.shape[1], dy.dtype)
    for rows, block in total:
        data_gradient(ops, dy[rows], weight, block)
    return total


def _gathered_rows(gathering: Gathering) -> Tensor:
    gathering.wait()
    return gathering.rows
