"""The language-model head with its loss on the C++ kernels, in chunks of rows so that the full logits never exist.

Legend: s sequence, b micro-batch, h hidden, v vocabulary of this rank, rows = s b.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.base import Comm
from .shared import gradient_of


class Products(Protocol):
    """What the head needs of `NativeOps`: the kernels, and products of weights that may be kept packed."""

    kernels: Any

    def product(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """out (rows, out) = x (rows, in) weight^T, weight (out, in)."""

    def data_gradient(self, dy: Tensor, weight: Tensor, dx: Tensor) -> None:
        """dx (rows, in) = dy (rows, out) weight, weight (out, in)."""


class HeadLoss(torch.autograd.Function):
    """Each chunk's loss, and its gradients while the chunk's logits are there.

    `factor` is the gradient that backward will bring, because weight gradients are accumulated before it comes. words: how many
    of the weight's first rows take part in the softmax, None for all.
    """

    @staticmethod
    def forward(ctx: Any, ops: Products, x: Tensor, weight: Tensor, labels: Tensor, tp: Comm, first_row: int, factor: float,
                chunk: int, words: int | None, z_loss: float) -> Tensor:
        """x (s, b, h), weight (v, h), labels (s, b) -> ()."""
        rows, labels = x.contiguous().view(-1, x.shape[-1]), labels.reshape(-1)
        total, ctx.factor, ctx.shape = 0.0, factor, x.shape
        dx = rows if ctx.needs_input_grad[1] else None  # its rows are read no more when their gradient is known
        buffer = x.new_empty(min(chunk, len(rows)), weight.shape[0], dtype=torch.float32)
        gradients = None if dx is None else buffer if x.dtype == buffer.dtype else torch.empty_like(buffer, dtype=x.dtype)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = buffer[: len(rows[part])]
            dlogits = None if gradients is None else gradients[: len(logits)]
            ops.product(rows[part], weight, logits)
            if words is not None:
                logits[:, words:] = -math.inf  # its exponential, and so its gradient, is exactly 0
            total += _chunk_loss(ops.kernels, logits, labels[part], tp, first_row, factor / len(rows), dlogits, z_loss)
            if dx is not None and dlogits is not None:
                ops.kernels.linear_weight_gradient(dlogits, rows[part], gradient_of(weight))
                ops.data_gradient(dlogits, weight, dx[part])
        if dx is not None:
            ctx.save_for_backward(dx)
        return torch.tensor(total / len(rows), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        """dloss () -> gradient of x (s, b, h)."""
        assert dloss.item() == torch.tensor(ctx.factor, dtype=torch.float32).item(), (dloss.item(), ctx.factor)
        return None, ctx.saved_tensors[0].view(ctx.shape), *(None for _ in range(8))


def _chunk_loss(kernels: Any, logits: Tensor, labels: Tensor, tp: Comm, first_row: int, factor: float,
                dlogits: Tensor | None, z_loss: float = 0.0) -> float:
    """Sum of the losses of some rows of logits (rows, v), and unless None dlogits, their gradient times `factor`; may be logits.

    With z = log sum exp, a row's gradient is (1 + 2 z_loss z) softmax - one hot: the kernel's, times that factor, and what the
    label's column then has too much of taken back.
    """
    row_max, sum_exp, target_logit = torch.empty(3, len(labels))
    if tp.size == 1:
        kernels.cross_entropy_forward(logits, labels, row_max, sum_exp, target_logit)
    else:
        kernels.cross_entropy_max(logits, row_max)
        tp.all_reduce(row_max, "max")
        kernels.cross_entropy_sum(logits, row_max, labels, first_row, sum_exp, target_logit)
        tp.all_reduce(sum_exp)
        tp.all_reduce(target_logit)
    log_sum = torch.log(sum_exp)
    z = log_sum + row_max
    if dlogits is not None:
        factors = torch.full_like(sum_exp, factor) if not z_loss else factor * (1 + 2 * z_loss * z)
        kernels.cross_entropy_backward(logits, row_max, sum_exp, labels, first_row, factors, dlogits)
        if z_loss:
            own = torch.nonzero((labels >= first_row) & (labels < first_row + dlogits.shape[1])).flatten()
            dlogits[own, labels[own] - first_row] += (factors[own] - factor).to(dlogits.dtype)
    return (log_sum - target_logit + z_loss * z * z).sum(dtype=torch.float64).item()
