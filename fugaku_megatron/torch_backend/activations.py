"""GELU, its exact form and its tanh form, SiLU, and their gradients, FP32 and BF16, of tensors of any shape."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import kernels

# Names of ATen and of the kernels.
FORMS = {"none": "gelu_exact", "tanh": "gelu"}
# Columns of rows that dense tensors are read as: the kernels read four rows at once, and memory is slower with short ones.
WIDE = 4096


def gelu(x: Tensor, approximate: str, out: Tensor | None = None) -> object:
    """Return the GELU of x. out: may be x"""
    return _compute(FORMS.get(approximate), out, x)


def gelu_backward(dy: Tensor, x: Tensor, approximate: str, out: Tensor | None = None) -> object:
    return _compute(FORMS.get(approximate), out, x, dy)


def silu(x: Tensor, out: Tensor | None = None) -> object:
    """Return x / (1 + exp(-x)). out: may be x"""
    return _compute("silu", out, x)


def silu_backward(dy: Tensor, x: Tensor, out: Tensor | None = None) -> object:
    return _compute("silu", out, x, dy)


def _compute(form: str | None, out: Tensor | None, x: Tensor, dy: Tensor | None = None) -> object:
    """Return the activation of x, or the gradient of x from the gradient dy of its activation."""
    if out is None:
        out = torch.empty_like(x if dy is None or 0 in dy.stride() else dy)
    inputs = [x] if dy is None else [x, dy]
    if form is None or not all(_can_write(out, each) for each in inputs):
        return NotImplemented
    # The output and the inputs in the order of memory.
    order = sorted(range(out.dim()), key=out.stride, reverse=True)
    tensors = [each.permute(order) for each in (out, *inputs)]
    if not tensors[0].is_contiguous():
        return NotImplemented
    columns = tensors[0].shape[-1] if order else 1
    if out.numel() % WIDE == 0 and all(each.is_contiguous() for each in tensors):
        columns = WIDE
    rows = [each.reshape(-1, columns) for each in tensors]
    rows = [each if each.stride(1) == 1 else each.contiguous() for each in rows]
    if dy is None:
        kernels.activate(rows[1], None, rows[0], form)
    else:
        kernels.activate_backward(rows[2].contiguous(), rows[1], rows[0], form)
    return out


def _can_write(out: Tensor, x: Tensor) -> bool:
    """Return True for an output of the same shape and type that is x or shares no memory with it."""
    if out.dtype != x.dtype or out.shape != x.shape:
        return False
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return True
    return out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
