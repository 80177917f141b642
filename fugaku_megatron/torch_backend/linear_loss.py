"""Cross-entropy and log-probabilities of logits x W^T + bias, computed in blocks of rows so that no logits are kept.

n rows, h hidden size, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..comm.autograd import Function, Gradients
from ..host import kernels

BLOCK_BYTES = 1 << 27  # of logits at a time
FEW_ROWS = 16  # of logits whose entropy is computed together, in the caches


class Head(NamedTuple):
    """Output layer: weight (v, h) and bias (v,)."""

    weight: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Head:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Head(self.weight.to(dtype), bias)


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

    def gradient(self, dlogs: Tensor, dentropy: Tensor | None = None) -> Tensor:
        """Return the gradient of the logits (n, v), which overwrites them."""
        of_entropy = None
        if dentropy is not None:
            logs = self.logits - (self.row_max + self.sum_exp.log()).unsqueeze(1)
            of_entropy = logs.exp() * (logs + self.entropy().unsqueeze(1)) * dentropy.unsqueeze(1)
        kernels.cross_entropy_backward(
            self.logits, self.row_max, self.sum_exp, self.labels, 0, -dlogs, self.logits
        )
        return self.logits if of_entropy is None else self.logits.sub_(of_entropy)

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


class _Product:
    """Logits of x (n, h), and the gradients of x, weight (v, h) and bias (v,), each None if not needed."""

    def __init__(self, x: Tensor, head: Head, call: Call, needs: Sequence[bool]) -> None:
        self.x = (x * call.scale).to(call.dtype).contiguous()
        weight, self.bias = head.to(call.dtype)
        self.weight = weight.contiguous()
        dweight = torch.zeros(self.weight.shape) if needs[1] or needs[2] else None
        dbias = torch.zeros(len(self.weight)) if needs[2] else None
        self.gradients = [torch.empty_like(self.x) if needs[0] else None, dweight, dbias]

    def blocks(self, labels: Tensor) -> Iterator[_Block]:
        """Compute the logits, block after block in the same memory."""
        n = len(self.x)
        v = len(self.weight)
        count = max(1, min(n, BLOCK_BYTES // (self.x.element_size() * v)))
        memory = self.x.new_empty(count, v)
        for first in range(0, n, count):
            rows = slice(first, min(first + count, n))
            logits = memory[: rows.stop - first]
            kernels.linear_forward(self.x[rows], self.weight, logits, self.bias)
            statistics = torch.empty(3, len(logits)).unbind()
            kernels.cross_entropy_forward(logits, labels[rows], *statistics)
            yield _Block(rows, logits, labels[rows], *statistics)

    def add(self, dlogits: Tensor, rows: slice) -> None:
        """Add the gradients of some rows of x, from the gradient of their logits (n, v)."""
        dx, dweight, dbias = self.gradients
        if dweight is not None:
            kernels.linear_weight_gradient(dlogits, self.x[rows], dweight, dbias)
        if dx is not None:
            kernels.linear_data_gradient(dlogits, self.weight, dx[rows])


class _RowLosses(Function[tuple[Tensor | None, ...]]):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: Call
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        logs = torch.empty(len(x))
        entropy = torch.empty(len(x)) if "entropy" in call.names else None
        is_top1 = torch.empty(len(x), dtype=torch.bool) if "is_top1" in call.names else None
        needs = ctx.needs_input_grad[:3]
        # Gradients of x are linear in the rows' factors, and all gradients if the factors are equal: backward recomputes nothing.
        at_once = call.is_uniform or not (needs[1] or needs[2])
        product = _Product(x, Head(weight, bias), call, needs if at_once else (False,) * 3)
        for block in product.blocks(labels):
            logs[block.rows] = block.target - block.sum_exp.log()
            if is_top1 is not None:
                is_top1[block.rows] = block.is_top1()
            if entropy is not None:
                entropy[block.rows] = block.entropy()
            if at_once and any(needs):
                product.add(block.gradient(torch.ones_like(block.target)), block.rows)
        ctx.call = call
        ctx.at_once = at_once
        ctx.save_for_backward(x, weight, bias, labels, *product.gradients)
        return logs, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dlogs: Tensor | None, dentropy: Tensor | None, _: Tensor | None
    ) -> Gradients:
        x, weight, bias, labels, *made = ctx.saved_tensors
        call = ctx.call
        dlogs = torch.zeros(len(x)) if dlogs is None else dlogs
        factors = dlogs.unsqueeze(1)
        if dentropy is not None or not ctx.at_once:
            product = _Product(x, Head(weight, bias), call, ctx.needs_input_grad)
            for block in product.blocks(labels):
                of_entropy = None if dentropy is None else dentropy[block.rows]
                product.add(block.gradient(dlogs[block.rows], of_entropy), block.rows)
            made = product.gradients
            factors = torch.ones(1, 1)
        # A weight has the gradient of all rows, whose factors are equal. There may be no row.
        shared = factors[:1].sum()
        all_factors = (factors * call.scale, shared, shared)
        results = [
            None if each is None else (each * factor).to(like.dtype)
            for each, factor, like in zip(made, all_factors, (x, weight, bias))
        ]
        return *results, None, None


def row_losses(x: Tensor, head: Head, labels: Tensor, call: Call) -> tuple[Tensor | None, ...]:
    """Return the labels' log-probabilities, entropies or None, and if the labels are the first largest logits or None, (n,) each.

    x: (n, h); labels: int64 (n,)
    """
    return _RowLosses.apply(x, *head, labels, call)


def cross_entropy(x: Tensor, head: Head, labels: Tensor, ignore_index: int, mean: bool) -> Tensor:
    """Return the cross-entropy of rows x (n, h) in FP32, summed or divided by the number of labels.

    labels: int64 (n,); rows with ignore_index are left out
    """
    kept = labels != ignore_index
    logs = row_losses(x[kept], head, labels[kept], Call(1.0, x.dtype, is_uniform=True))[0]
    assert logs is not None
    return -logs.mean() if mean else -logs.sum()
