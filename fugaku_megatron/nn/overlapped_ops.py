"""Matmuls between parts of the sequence, each running while the rows that it reads or computes are sent (--tp-comm-overlap).

    column_linear   gathers its input block by block            backward sums its input's gradient block by block
    row_linear      sums its result block by block              backward gathers its gradient block by block
    mlp, gated_mlp  both, with the activation in between

A weight's gradient needs whole tensors: it is computed while the last blocks are sent. The matmuls are the backend's
(`native_ops`, `torch_ops`); each row has the same bits as without blocks. Left out: how rows are exchanged (`comm.autograd`).
Legend: s sequence, b micro-batch, h hidden, f MLP width, t ranks, rows = s b.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Gathering, RowBlocks, Summing
from .gradients import as_rows
from .native_ops import NativeOps, add_second_weight_gradient
from .torch_blocks import matrix
from .torch_ops import TorchOps, gelu

Backend = NativeOps | TorchOps


def column_linear(
    ops: Backend, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: RowBlocks
) -> Tensor:
    """x (s / t, b, in), weight (out, in), bias (out) or None -> (s, b, out)."""
    return _ColumnLinear.apply(ops, x, weight, bias, blocks)


def row_linear(ops: Backend, x: Tensor, weight: Tensor, blocks: RowBlocks) -> Tensor:
    """x (s, b, in), weight (out, in) -> (s / t, b, out)."""
    return _RowLinear.apply(ops, x, weight, blocks)


def mlp(
    ops: Backend,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    needs_values: bool,
    blocks: RowBlocks,
    activation: str,
) -> Tensor:
    """x (s / t, b, h), weight1 (f, h), bias1 (f), weight2 (h, f) -> (s / t, b, h). needs_values, activation: as `Ops.mlp`."""
    if isinstance(ops, NativeOps):
        return _NativeMLP.apply(ops, activation, x, weight1, bias1, weight2, needs_values, blocks)
    if activation != "gelu":
        return _GatedMLP.apply(ops, activation, x, weight1, bias1, weight2, needs_values, blocks)
    return row_linear(ops, gelu(column_linear(ops, x, weight1, bias1, blocks)), weight2, blocks)


def gated_mlp(
    ops: Backend,
    x: Tensor,
    weight1: Tensor,
    bias1: Tensor | None,
    weight2: Tensor,
    needs_values: bool,
    blocks: RowBlocks,
    activation: str,
) -> Tensor:
    """x (s / t, b, h), weight1 (2, f, h), bias1 (2, f), weight2 (h, f) -> (s / t, b, h). The rest: as `Ops.gated_mlp`."""
    return _GatedMLP.apply(
        ops, activation, x, matrix(weight1), matrix(bias1), weight2, needs_values, blocks
    )


def _data_gradient_sum(ops: Backend, dy: Tensor, weight: Tensor, blocks: RowBlocks) -> Summing:
    """The sum over ranks of dy (rows, out) weight, weight (out, in), its own blocks made and those of others on their way."""
    total = blocks.sum(len(dy), weight.shape[1], dy.dtype)
    for rows, block in total:
        ops.data_gradient(dy[rows], weight, block, chunk=ops.chunk(dy))
    return total


def _gathered_rows(gathering: Gathering) -> Tensor:
    """(rows, h), when all blocks are there."""
    gathering.wait()
    return gathering.rows


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ops: Backend, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: RowBlocks
    ) -> Tensor:
        out = x.new_empty(x.shape[0] * blocks.comm.size, x.shape[1], weight.shape[0])
        gathering, out_rows = blocks.gather(x), out.view(-1, out.shape[-1])
        for rows in gathering:
            ops.matmul(gathering.rows[rows], weight, out_rows[rows], bias, chunk=ops.chunk(x))
        gathering.wait()
        ctx.save_for_backward(x)
        ctx.ops, ctx.weight, ctx.bias, ctx.blocks = ops, weight, bias, blocks
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), dy, ops = ctx.saved_tensors, as_rows(dy), ctx.ops
        gathering = ctx.blocks.gather(x)
        total = _data_gradient_sum(ops, dy, ctx.weight, ctx.blocks)
        ops.weight_gradient(dy, _gathered_rows(gathering), ctx.weight, ctx.bias, ops.chunk(dy))
        return None, total.wait().view(x.shape), None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor, blocks: RowBlocks) -> Tensor:
        x_rows = as_rows(x)
        total = blocks.sum(len(x_rows), weight.shape[0], x.dtype)
        for rows, block in total:
            ops.matmul(x_rows[rows], weight, block, chunk=ops.chunk(x))
        ctx.save_for_backward(x_rows)
        ctx.ops, ctx.weight, ctx.blocks, ctx.shape = ops, weight, blocks, x.shape
        return total.wait().view(x.shape[0] // blocks.comm.size, *x.shape[1:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,), ops, gathering = ctx.saved_tensors, ctx.ops, ctx.blocks.gather(dy)
        dx = torch.empty_like(x)
        for rows in gathering:
            ops.data_gradient(gathering.rows[rows], ctx.weight, dx[rows], chunk=ops.chunk(dy))
        ops.weight_gradient(_gathered_rows(gathering), x, ctx.weight, None, ops.chunk(dy))
        return None, dx.view(ctx.shape), None, None


class _NativeMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ops: NativeOps,
        activation: str,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        blocks: RowBlocks,
    ) -> Tensor:
        chunk, gathering = ops.chunk(x), blocks.gather(x)
        pre = x.new_empty(
            len(gathering.rows), weight1.shape[0]
        )  # (rows, f): argument of the activation
        inner = torch.empty_like(pre) if needs_values else None
        for rows in gathering:
            if inner is not None:
                ops.matmul(
                    gathering.rows[rows],
                    weight1,
                    inner[rows],
                    bias1,
                    activation,
                    pre[rows],
                    chunk=chunk,
                )
            else:
                ops.matmul(gathering.rows[rows], weight1, pre[rows], bias1, chunk=chunk)
        gathering.wait()
        ctx.save_for_backward(x, pre)
        ctx.ops, ctx.activation, ctx.parameters, ctx.blocks = (
            ops,
            activation,
            (weight1, bias1, weight2),
            blocks,
        )
        if inner is None:
            return x.new_empty(1).expand(x.shape)
        total = blocks.sum(len(pre), weight2.shape[0], x.dtype)
        for rows, block in total:
            ops.matmul(inner[rows], weight2, block, chunk=chunk)
        return total.wait().view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre), (weight1, bias1, weight2), ops, blocks = (
            ctx.saved_tensors,
            ctx.parameters,
            ctx.ops,
            ctx.blocks,
        )
        chunk, packed = ops.chunk(dy), ops.packed(weight2, True, ops.chunk(dy))
        gradient, inputs = blocks.gather(dy), blocks.gather(x)
        dpre = torch.empty_like(pre)
        for rows in gradient:
            ops.kernels.linear_data_gradient(
                gradient.rows[rows],
                weight2,
                dpre[rows],
                pre[rows],
                ctx.activation,
                packed=packed,
                fp16_chunk=chunk,
            )
        total = _data_gradient_sum(ops, dpre, weight1, blocks)
        add_second_weight_gradient(
            ops, _gathered_rows(gradient), pre, weight2, ctx.activation, chunk
        )
        ops.weight_gradient(dpre, _gathered_rows(inputs), weight1, bias1, chunk)
        return None, None, total.wait().view(x.shape), None, None, None, None, None


class _GatedMLP(torch.autograd.Function):
    """With a gate, and in torch with another activation than the GELU's tanh form."""

    @staticmethod
    def forward(
        ctx: Any,
        ops: Backend,
        activation: str,
        x: Tensor,
        weight1: Tensor,
        bias1: Tensor | None,
        weight2: Tensor,
        needs_values: bool,
        blocks: RowBlocks,
    ) -> Tensor:
        chunk, gathering = ops.chunk(x), blocks.gather(x)
        pre = x.new_empty(len(gathering.rows), len(weight1))  # (rows, 2 f): gates and values
        for rows in gathering:
            ops.matmul(gathering.rows[rows], weight1, pre[rows], bias1, chunk=chunk)
        gathering.wait()
        ctx.save_for_backward(x, pre)
        ctx.ops, ctx.activation, ctx.parameters, ctx.blocks = (
            ops,
            activation,
            (weight1, bias1, weight2),
            blocks,
        )
        if not needs_values:
            return x.new_empty(1).expand(x.shape)
        total = blocks.sum(len(pre), len(weight2), x.dtype)
        for rows, block in total:
            ops.matmul(ops.gate(pre[rows], activation), weight2, block, chunk=chunk)
        return total.wait().view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, pre), (weight1, bias1, weight2), ops, blocks = (
            ctx.saved_tensors,
            ctx.parameters,
            ctx.ops,
            ctx.blocks,
        )
        chunk, gradient, inputs = ops.chunk(dy), blocks.gather(dy), blocks.gather(x)
        dpre = torch.empty_like(pre)
        for rows in gradient:
            dinner = pre.new_empty(len(pre[rows]), weight2.shape[1])
            ops.data_gradient(gradient.rows[rows], weight2, dinner, chunk=chunk)
            ops.gate_gradient(dinner, pre[rows], dpre[rows], ctx.activation)
        total = _data_gradient_sum(ops, dpre, weight1, blocks)
        ops.gated_weight_gradient(_gathered_rows(gradient), pre, weight2, ctx.activation, chunk)
        ops.weight_gradient(dpre, _gathered_rows(inputs), weight1, bias1, chunk)
        return None, None, total.wait().view(x.shape), None, None, None, None, None
