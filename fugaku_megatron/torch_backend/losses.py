"""Cross-entropy of logits (n, v) and class numbers (n,), FP32 and BF16."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.autograd import Gradients
from ..host import kernels
from .composed import Composed

# Numbers of ATen.
NONE = 0
MEAN = 1


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> object:
    """Return log sum exp(logits) - logits[target] of each row, summed, or divided by the number of counted rows.

    ignore_index: target of a row that is not counted.
    """
    is_numbers = target.dtype == torch.int64 and target.shape == logits.shape[:1]
    if weight is not None or label_smoothing or logits.dim() != 2 or not is_numbers:
        return NotImplemented
    is_counted = target != ignore_index
    counted = target[is_counted]
    if len(counted) and (counted.min() < 0 or counted.max() >= logits.shape[1]):
        return NotImplemented
    labels = torch.where(is_counted, target, -1)

    def forward(logits: Tensor) -> tuple[Tensor, ...]:
        row_max, sum_exp, target_logit = torch.empty(3, len(labels)).unbind()
        kernels.cross_entropy_forward(logits.contiguous(), labels, row_max, sum_exp, target_logit)
        losses = torch.where(labels < 0, 0.0, sum_exp.log() - target_logit)
        return losses, row_max, sum_exp

    def backward(dloss: Tensor, logits: Tensor, row_max: Tensor, sum_exp: Tensor) -> Gradients:
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        kernels.cross_entropy_backward(
            logits.contiguous(), row_max, sum_exp, labels, 0, dloss.contiguous(), dlogits
        )
        return (dlogits,)

    def compose(logits: Tensor) -> Tensor:
        operator = torch.ops.aten.cross_entropy_loss.default
        return operator.decompose(logits, labels, None, NONE, -1)  # type: ignore[no-any-return]

    losses = Composed.apply(forward, backward, compose, logits)
    if reduction != NONE:
        losses = losses.sum()
    if reduction == MEAN:
        losses = losses / len(counted)
    return losses.to(logits.dtype)
