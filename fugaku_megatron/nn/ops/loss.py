"""Cross-entropy of the language-model head, with the vocabulary sharded over tensor-parallel ranks.

The native form computes the logits in blocks.
v vocabulary of this rank.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import SavedResult, apply_saving
from ...comm.base import Comm
from ..backward import WeightGradients
from ..parameter import is_frozen, take_gradient
from .backend import Backend
from .gemm import data_gradient, linear, matmul


class HeadLoss(NamedTuple):
    """Arguments of `head_loss`.

    tp: ranks that shard the vocabulary.
    first_row: this rank's first row of the vocabulary.
    factor: gradient of the loss in backward, because the native backend accumulates weight gradients in forward.
    rows_at_once: rows of a logits block; None: all.
    unpadded_rows: rows of the weight in the softmax; the others get no gradient. None: all.
    z_loss: coefficient of (log sum exp)^2, added to a row's loss as in PaLM (Chowdhery et al. 2022, section 5).
    divisor: of the summed losses; None: the number of all rows.
    z_sum: (), receives the sum of the z-loss.
    softcap: see --final-logit-softcapping.
    """

    tp: Comm
    first_row: int
    factor: float
    rows_at_once: int | None = None
    unpadded_rows: int | None = None
    z_loss: float = 0.0
    divisor: float | None = None
    z_sum: Tensor | None = None
    softcap: float | None = None


def soft_capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap tanh(logits / softcap), in FP32."""
    return logits if softcap is None else torch.tanh(logits.float() / softcap) * softcap


def head_loss(ops: Backend, x: Tensor, weight: Tensor, labels: Tensor, call: HeadLoss) -> Tensor:
    """Return the cross-entropy of logits x W^T, summed over rows with a label >= 0 and divided by `call.divisor`.

    The softmax is in FP32. The gradient of a row with a label of -1 is exactly 0, whatever its logits are.

    x: (s, b, h). The native backend overwrites x with its gradient, if needed.
    weight: (v, h)
    labels: (s, b)
    """
    native = ops.is_native("loss")
    ops = ops.for_head()
    # The head's matmuls are on the backend of the loss, and the logits are summed in FP32.
    ops = replace(
        ops, choice={**ops.choice, "gemm": "native" if native else "torch"}, fp16_sum_length=0
    )
    if native:
        return _native_head_loss(ops, x, weight, labels, call)
    # The weight gradient is not postponed, so that a tied weight gets it before the embedding's, as in the native backend.
    logits = linear(replace(ops, weight_gradients=WeightGradients()), x, weight)
    logits = soft_capped(logits, call.softcap)
    divisor = call.divisor or labels.numel()
    z_part = torch.zeros(())
    losses = _torch_cross_entropy(logits, labels, call, z_part)
    if call.z_sum is not None:
        call.z_sum.add_(z_part / divisor)
    return losses.sum() / divisor


def _native_head_loss(
    ops: Backend, x: Tensor, weight: Tensor, labels: Tensor, call: HeadLoss
) -> Tensor:
    labels = labels.reshape(-1)
    divisor = call.divisor or len(labels)
    needs_gradient = x.requires_grad
    shape = x.shape

    def forward() -> SavedResult:
        rows = x.contiguous().view(-1, x.shape[-1])
        block = call.rows_at_once or len(labels)
        total = 0.0
        z_total = 0.0
        logits_block = x.new_empty(min(block, len(rows)), weight.shape[0], dtype=torch.float32)
        gradient_block = None
        if needs_gradient:
            gradient_block = logits_block
            if x.dtype != torch.float32:
                gradient_block = torch.empty_like(logits_block, dtype=x.dtype)
        for start in range(0, len(rows), block):
            part = slice(start, start + block)
            logits = logits_block[: len(rows[part])]
            dlogits = None if gradient_block is None else gradient_block[: len(logits)]
            matmul(ops, rows[part], weight, logits)
            loss, z_part = _block_loss(
                ops.kernels, logits, labels[part], call, call.factor / divisor, dlogits
            )
            total += loss
            z_total += z_part
            if dlogits is not None:
                if not is_frozen(weight):
                    gradient = take_gradient(weight)
                    ops.kernels.linear_weight_gradient(
                        dlogits, rows[part], gradient.values, overwrite=gradient.overwrite
                    )
                # The rows are not read again, so that their gradient may overwrite them.
                data_gradient(ops, dlogits, weight, rows[part])
        if call.z_sum is not None:
            call.z_sum.add_(z_total / divisor)
        loss_of_rows = torch.tensor(total / divisor, dtype=torch.float32)
        return loss_of_rows, (rows,) if needs_gradient else ()

    def backward(dloss: Tensor, dx: Tensor) -> Tensor:
        expected = torch.tensor(call.factor, dtype=torch.float32).item()
        assert dloss.item() == expected, (dloss.item(), call.factor)
        return dx.view(shape)

    return apply_saving(forward, backward, x, weight)


def _block_loss(
    kernels: Any,
    logits: Tensor,
    labels: Tensor,
    call: HeadLoss,
    factor: float,
    dlogits: Tensor | None,
) -> tuple[float, float]:
    """Return the summed loss and z-loss; write the gradient to dlogits, which may be logits."""
    tp = call.tp
    slope = None
    if call.softcap is not None:
        logits.div_(call.softcap).tanh_()
        slope = None if dlogits is None else 1 - logits.square()
        logits.mul_(call.softcap)
    if call.unpadded_rows is not None:
        logits[:, call.unpadded_rows :] = -math.inf
    row_max, sum_exp, target_logit = torch.empty(3, len(labels))
    if tp.size == 1:
        kernels.cross_entropy_forward(logits, labels, row_max, sum_exp, target_logit)
    else:
        kernels.cross_entropy_max(logits, row_max)
        tp.all_reduce(row_max, "max")
        kernels.cross_entropy_sum(logits, row_max, labels, call.first_row, sum_exp, target_logit)
        tp.all_reduce(sum_exp)
        tp.all_reduce(target_logit)
    if dlogits is not None:
        factors = torch.full_like(sum_exp, factor)
        kernels.cross_entropy_backward(
            logits, row_max, sum_exp, labels, call.first_row, factors, dlogits, call.z_loss
        )
        if slope is not None:
            dlogits.mul_(slope)
    # torch.log in FP32 has other bits on CPUs with other vectors.
    log_sum = sum_exp.double().log().float()
    z = log_sum + row_max
    added = call.z_loss * z * z
    losses = (log_sum - target_logit + added).masked_fill_(labels < 0, 0.0)
    z_part = 0.0
    if call.z_loss:
        z_part = added.masked_fill_(labels < 0, 0.0).sum(dtype=torch.float64).item()
    return losses.sum(dtype=torch.float64).item(), z_part


def _torch_cross_entropy(logits: Tensor, labels: Tensor, call: HeadLoss, z_sum: Tensor) -> Tensor:
    """Return each row's loss; its gradient overwrites the saved probabilities, so that backward runs once."""
    tp = call.tp
    z_loss = call.z_loss
    dtype = logits.dtype
    rows = labels - call.first_row
    elsewhere = (rows < 0) | (rows >= logits.shape[-1])
    rows = rows.masked_fill(elsewhere, 0).unsqueeze(-1)

    def forward() -> SavedResult:
        values = logits.float()  # (s, b, v)
        if call.unpadded_rows is not None:
            values[..., call.unpadded_rows :] = -math.inf
        row_max = tp.all_reduce(values.amax(-1), "max")  # (s, b)
        exponentials = torch.exp(values - row_max.unsqueeze(-1))
        sum_exp = tp.all_reduce(exponentials.sum(-1))
        target_logit = tp.all_reduce(
            (values.gather(-1, rows).squeeze(-1) - row_max).masked_fill(elsewhere, 0.0)
        )
        log_sum = torch.log(sum_exp)
        z = log_sum + row_max
        probabilities = exponentials.div_(sum_exp.unsqueeze(-1))
        ignored = labels < 0
        if z_loss:
            probabilities.mul_(1 + 2 * z_loss * z.unsqueeze(-1))
        probabilities[ignored] = 0.0
        added = z_loss * z * z
        z_sum.add_(added.masked_fill(ignored, 0.0).sum())
        losses = (log_sum - target_logit + added).masked_fill_(ignored, 0.0)
        return losses, (probabilities, rows, elsewhere)

    def backward(dloss: Tensor, dlogits: Tensor, rows: Tensor, elsewhere: Tensor) -> Tensor:
        dlogits.scatter_add_(-1, rows, (elsewhere.float() - 1.0).unsqueeze(-1))
        return dlogits.mul_(dloss.unsqueeze(-1)).to(dtype)

    return apply_saving(forward, backward, logits)
