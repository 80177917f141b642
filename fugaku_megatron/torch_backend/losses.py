"""Cross-entropy of logits (n, v) and class numbers (n,), FP32 and BF16."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..host import kernels
from . import composed

TYPES = (torch.float32, torch.bfloat16)
# Numbers of ATen.
NONE = 0
MEAN = 1


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> object:
    """Return log sum exp(logits) - logits[target] of each row, summed, or divided by the number of counted rows.

    ignore_index: target of a row that is not counted.
    """
    if weight is not None or label_smoothing or not _is_supported(logits, target):
        return NotImplemented
    is_counted = target != ignore_index
    counted = target[is_counted]
    if len(counted) and (counted.min() < 0 or counted.max() >= logits.shape[1]):
        return NotImplemented
    labels = torch.where(is_counted, target, -1)
    losses: Tensor = _CrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    if reduction != NONE:
        losses = losses.sum()
    if reduction == MEAN:
        losses = losses / len(counted)
    return losses.to(logits.dtype)


def _is_supported(logits: Tensor, target: Tensor) -> bool:
    return (
        logits.dtype in TYPES
        and logits.dim() == 2
        and logits.numel() > 0
        and target.dtype == torch.int64
        and target.shape == logits.shape[:1]
    )


class _CrossEntropy(torch.autograd.Function):
    """Losses (n,) in FP32. labels: -1 for rows that are not counted"""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        row_max, sum_exp, target_logit = torch.empty(3, len(labels)).unbind()
        kernels.cross_entropy_forward(logits.contiguous(), labels, row_max, sum_exp, target_logit)
        ctx.save_for_backward(logits, labels, row_max, sum_exp)
        return torch.where(labels < 0, 0.0, sum_exp.log() - target_logit)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, row_max, sum_exp = ctx.saved_tensors
        dloss = gradients[0].resolve_neg()
        if not composed.is_plain(dloss):
            compose = functools.partial(_compose, logits, labels)
            return *composed.gradients(compose, (logits,), dloss), None
        dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        kernels.cross_entropy_backward(
            logits.contiguous(), row_max, sum_exp, labels, 0, dloss.contiguous(), dlogits
        )
        return dlogits, None


def _compose(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the losses by operators of torch."""
    logs = torch.log_softmax(logits.float(), -1)
    return F.nll_loss(logs, labels, ignore_index=-1, reduction="none")
