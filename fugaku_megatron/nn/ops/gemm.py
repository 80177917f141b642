"""Matrix products of linear layers.

Weight gradients are added to `main_grad`, at once or when the schedule asks for them.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...comm.autograd import SavedResult, apply_saving, gather_sequence, reduce_scatter_sequence
from ...comm.base import Comm
from ..parameter import (
    accumulate,
    as_float,
    as_rows,
    bias_gradient,
    gradient_of,
    is_frozen,
    scales_keyword,
    take_gradient,
)
from .backend import Backend


def matmul(
    ops: Backend,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    pre: Tensor | None = None,
) -> None:
    """Write x weight^T + bias to out (rows, out). x (rows, in), weight (out, in), perhaps in eight bits.

    activation: applied to the result, native only; `pre` receives its argument.
    """
    if not ops.is_native("gemm"):
        weight = as_float(weight, x.dtype)
        if bias is None:
            torch.mm(x, weight.mT, out=out)
        else:
            torch.addmm(bias, x, weight.mT, out=out)
        return
    length = ops.sum_length(x)
    if len(x) <= ops.few_rows and not length:
        ops.kernels.linear_few_rows(x, weight, out, bias, activation, **scales_keyword(weight))
        return
    packed = ops.packed(weight, x.dtype, transposed=False)
    ops.kernels.linear_forward(
        x,
        weight,
        out,
        bias,
        activation,
        pre,
        packed=packed,
        fp16_chunk=length,
        **scales_keyword(weight),
    )


def data_gradient(
    ops: Backend,
    dy: Tensor,
    weight: Tensor,
    dx: Tensor,
    pre: Tensor | None = None,
    activation: str | None = None,
) -> None:
    """Write dy weight to dx (rows, in). dy (rows, out)

    activation: its derivative at `pre` multiplies the result, native only.
    """
    if not ops.is_native("gemm"):
        torch.mm(dy, as_float(weight, dy.dtype), out=dx)
        return
    ops.kernels.linear_data_gradient(
        dy,
        weight,
        dx,
        pre,
        activation or "gelu",  # not read without pre
        packed=ops.packed(weight, dy.dtype, transposed=True),
        fp16_chunk=ops.sum_length(dy),
        **scales_keyword(weight),
    )


def weight_gradient(
    ops: Backend, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Add dy^T x to the gradient of weight (out, in), and the sum of dy's rows to the gradient of bias (out).

    The work may be postponed: dy and x must not change until then.
    """
    if is_frozen(weight):
        return
    # Postponed work must not keep the graph below x alive.
    x = x.detach()
    if ops.is_native("gemm"):
        work = partial(_native_weight_gradient, ops, dy, x, weight, bias)
    else:
        work = partial(_torch_weight_gradient, dy, x, weight, bias)
    ops.weight_gradients.add(work)


def _native_weight_gradient(
    ops: Backend, dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    gradient = take_gradient(weight)
    ops.kernels.linear_weight_gradient(
        dy,
        x,
        gradient.values,
        bias_gradient(bias),
        ops.sum_length(dy),
        overwrite=gradient.overwrite,
    )


def _torch_weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if weight.dtype == torch.float32:
        gradient_of(weight).addmm_(dy.mT, x)
    else:
        accumulate(weight, dy.mT @ x)
    if bias is not None:
        accumulate(bias, dy.sum(0, dtype=torch.float32))


def outer_sum(ops: Backend, dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x (out, in) in FP32."""
    if not ops.is_native("gemm"):
        return dy.mT.float() @ x.float()
    total = torch.zeros(dy.shape[1], x.shape[1])
    ops.kernels.linear_weight_gradient(dy, x, total)
    return total


def linear(
    ops: Backend,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    sequence: Comm | None = None,
) -> Tensor:
    """Return x W^T + bias, (..., in) -> (..., out).

    sequence: ranks that shard x (s / t, b, in) by sequence. The shards are gathered, again in backward, which reduce-scatters the
        gradient of x.
    """

    def forward() -> SavedResult:
        out = x.new_empty(row_count(x, sequence), weight.shape[0])
        whole = gather_sequence(x, sequence)
        rows = as_rows(whole)
        matmul(ops, rows, weight, out, bias)
        saved = rows if sequence is None else x
        return out.view(*whole.shape[:-1], -1), () if is_frozen(weight) else (saved,)

    def backward(dy: Tensor, *saved: Tensor) -> Tensor:
        lead = dy.shape[:-1]
        dy = as_rows(dy)
        if not saved:
            dx = dy.new_empty(len(dy), weight.shape[1])
        else:
            rows = as_rows(gather_sequence(saved[0], sequence))
            weight_gradient(ops, dy, rows, weight, bias)
            # The gathered copy is free once the weight gradient is computed.
            reusable = sequence is not None and not ops.weight_gradients.waits
            dx = rows if reusable else torch.empty_like(rows)
        data_gradient(ops, dy, weight, dx)
        return reduce_scatter_sequence(dx.view(*lead, -1), sequence)

    return apply_saving(forward, backward, x, weight, bias)


def row_count(x: Tensor, sequence: Comm | None) -> int:
    """Return the rows of x after its shards are gathered.

    Allocate a saved tensor before gathering, so that freeing the gathered tensor leaves no hole.
    """
    rows = x.numel() // x.shape[-1]
    return rows if sequence is None else rows * sequence.size
