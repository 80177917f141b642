"""Cross-entropy and log-probabilities of logits x W^T + bias, computed in blocks of rows so that no logits are kept.

n rows, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..host import kernels

BLOCK_BYTES = 1 << 27  # of logits at a time
FEW_ROWS = 16  # of logits whose entropy is computed together, in the caches


class Head(NamedTuple):
    """Output layer: weight (v, h) and bias (v,)."""

    weight: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Head:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype).contiguous(), bias)


class Call(NamedTuple):
    """A call of `row_losses`.

    scale: of logits.
    dtype: of matmuls and logits.
    names: "entropy" and "is_top1" if these are wanted.
    is_uniform: all rows' log-probabilities have the same gradient.
    """

    scale: float
    dtype: torch.dtype
    names: tuple[str, ...] = ()
    is_uniform: bool = False


class _Block(NamedTuple):
    """Some rows: their logits (n, v), labels, largest logits, sums of exp(logit - largest), and label's logits - largest."""

    rows: slice
    logits: Tensor
    labels: Tensor
    row_max: Tensor
    sum_exp: Tensor
    target: Tensor

    def gradient(self, factors: Tensor) -> Tensor:
        """Return the gradient of log-probabilities times factors, (n, v), which overwrites the logits."""
        arguments = (self.logits, self.row_max, self.sum_exp, self.labels, 0, -factors, self.logits)
        kernels.cross_entropy_backward(*arguments)
        return self.logits

    def entropy(self) -> Tensor:
        weighted = torch.empty_like(self.sum_exp)
        parts = (self.logits, self.row_max, weighted)
        for logits, row_max, out in zip(*(part.split(FEW_ROWS) for part in parts)):
            shifted = logits.float() - row_max.unsqueeze(1)
            torch.linalg.vecdot(shifted.exp(), shifted, out=out)
        return self.sum_exp.log() - weighted / self.sum_exp

    def is_top1(self) -> Tensor:
        """Return whether the label is the first of the largest logits."""
        largest = self.target >= 0
        (chosen,) = largest.nonzero(as_tuple=True)
        if len(chosen):
            largest[chosen] = self.logits[chosen].argmax(-1) == self.labels[chosen]
        return largest


def _blocks(x: Tensor, head: Head, labels: Tensor) -> Iterator[_Block]:
    """Compute the logits of x (n, h), block after block in the same memory."""
    v = len(head.weight)
    count = max(1, min(len(x), BLOCK_BYTES // (x.element_size() * v)))
    memory = x.new_empty(count, v)
    for first in range(0, len(x), count):
        rows = slice(first, min(first + count, len(x)))
        logits = memory[: rows.stop - first]
        kernels.linear_forward(x[rows], head.weight, logits, head.bias)
        statistics = torch.empty(3, len(logits)).unbind()
        kernels.cross_entropy_forward(logits, labels[rows], *statistics)
        yield _Block(rows, logits, labels[rows], *statistics)


class _Sums:
    """Gradients of x (n, h), weight (v, h) and bias (v,), each None if not needed."""

    def __init__(self, x: Tensor, head: Head, needs: tuple[bool, ...]) -> None:
        trains = needs[1] or needs[2]
        self.x = torch.empty_like(x) if needs[0] else None
        self.weight = torch.zeros_like(head.weight, dtype=torch.float32) if trains else None
        self.bias = torch.zeros(len(head.weight)) if needs[2] else None

    def add(self, dlogits: Tensor, x: Tensor, rows: slice, head: Head) -> None:
        if self.weight is not None:
            kernels.linear_weight_gradient(dlogits, x[rows], self.weight, self.bias)
        if self.x is not None:
            kernels.linear_data_gradient(dlogits, head.weight, self.x[rows])


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: Call
    ) -> tuple[Tensor | None, ...]:
        context.set_materialize_grads(False)
        head = Head(weight, bias).to(call.dtype)
        rows = (x * call.scale).to(call.dtype).contiguous()
        logs = torch.empty(len(x))
        entropy = torch.empty(len(x)) if "entropy" in call.names else None
        is_top1 = torch.empty(len(x), dtype=torch.bool) if "is_top1" in call.names else None
        needs = context.needs_input_grad[:3]
        # Gradients of x are linear in the rows' factors, and those of all if the factors are equal: backward recomputes nothing.
        is_linear = needs[0] and not (needs[1] or needs[2])
        at_once = _Sums(rows, head, needs if call.is_uniform or is_linear else (False,) * 3)
        for block in _blocks(rows, head, labels):
            logs[block.rows] = block.target - block.sum_exp.log()
            if is_top1 is not None:
                is_top1[block.rows] = block.is_top1()
            if entropy is not None:
                entropy[block.rows] = block.entropy()
            if at_once.x is not None or at_once.weight is not None:
                at_once.add(block.gradient(torch.ones_like(block.target)), rows, block.rows, head)
        context.call = call
        sums = (at_once.x, at_once.weight, at_once.bias)
        context.save_for_backward(x, weight, bias, labels, *sums)
        return logs, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(
        context: Any, dlogs: Tensor | None, dentropy: Tensor | None, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dentropy is not None:
            raise NotImplementedError(
                "the entropy of an accelerated model has no gradient: call accelerate.restore(model)"
            )
        if dlogs is None:
            return (None,) * 5
        x, weight, bias, labels, *sums = context.saved_tensors
        scale, dtype, *_ = context.call
        by_row = dlogs.unsqueeze(1)
        if sums[0] is None and sums[1] is None:
            head = Head(weight, bias).to(dtype)
            rows = (x * scale).to(dtype).contiguous()
            made = _Sums(rows, head, context.needs_input_grad)
            for block in _blocks(rows, head, labels):
                made.add(block.gradient(dlogs[block.rows]), rows, block.rows, head)
            sums = [made.x, made.weight, made.bias]
            by_row = torch.ones(1, 1)
        factors = (by_row * scale, by_row[0], by_row[0])
        # A weight has the gradient of all rows, which are then equal.
        results = [
            None if each is None else (each * factor).to(like.dtype)
            for each, factor, like in zip(sums, factors, (x, weight, bias))
        ]
        return (
            *(each if needed else None for each, needed in zip(results, context.needs_input_grad)),
            None,
            None,
        )


def row_losses(x: Tensor, head: Head, labels: Tensor, call: Call) -> tuple[Tensor | None, ...]:
    """Return the labels' log-probabilities, entropies or None, and if the labels are the first largest logits or None, (n,) each.

    x: (n, h); labels: int64 (n,)
    """
    values: tuple[Tensor | None, ...] = _RowLosses.apply(x, *head, labels, call)  # type: ignore[no-untyped-call]
    return values


def cross_entropy(x: Tensor, head: Head, labels: Tensor, ignore_index: int, mean: bool) -> Tensor:
    """Return the cross-entropy of rows x (n, h) in FP32, summed or divided by the number of labels.

    labels: int64 (n,); rows with ignore_index are left out
    """
    kept = labels != ignore_index
    if not kept.all():
        x = x[kept]
        labels = labels[kept]
    logs = row_losses(x, head, labels, Call(1.0, x.dtype, is_uniform=True))[0]
    assert logs is not None
    total = -logs.sum()
    return total / len(labels) if mean else total
