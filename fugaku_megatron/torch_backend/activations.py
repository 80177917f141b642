"""GELU, its exact form and its tanh form, SiLU, and their gradients, FP32 and BF16."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import kernels

TYPES = (torch.float32, torch.bfloat16)
# Names of ATen and of the kernels.
FORMS = {"none": "gelu_exact", "tanh": "gelu"}
# Columns of rows that dense tensors are read as: the kernels read four rows at once, and memory is slower with short ones.
WIDE = 4096


def gelu(x: Tensor, approximate: str = "none", out: Tensor | None = None) -> object:
    """Return the GELU of x of any shape. out: may be x"""
    return _activate(FORMS.get(approximate), x, out)


def gelu_in_place(x: Tensor, approximate: str = "none") -> object:
    return gelu(x, approximate, x)


def gelu_backward(
    dy: Tensor, x: Tensor, approximate: str = "none", out: Tensor | None = None
) -> object:
    return _differentiate(FORMS.get(approximate), dy, x, out)


def silu(x: Tensor, out: Tensor | None = None) -> object:
    """Return x / (1 + exp(-x)) of any shape. out: may be x"""
    return _activate("silu", x, out)


def silu_in_place(x: Tensor) -> object:
    return silu(x, x)


def silu_backward(dy: Tensor, x: Tensor, out: Tensor | None = None) -> object:
    return _differentiate("silu", dy, x, out)


def _activate(form: str | None, x: Tensor, out: Tensor | None) -> object:
    out = _output(out, x)
    rows = None if out is None else _rows(out, x)
    if form is None or rows is None:
        return NotImplemented
    kernels.activate(rows[1], None, rows[0], form)
    return out


def _differentiate(form: str | None, dy: Tensor, x: Tensor, out: Tensor | None) -> object:
    """Return the gradient of x from the gradient dy of its activation."""
    is_expanded = 0 in dy.stride()
    out = _output(out, x, dy) if is_expanded else _output(out, dy, x)
    rows = None if out is None else _rows(out, x, dy)
    if form is None or rows is None:
        return NotImplemented
    kernels.activate_backward(rows[2].contiguous(), rows[1], rows[0], form)
    return out


def _output(out: Tensor | None, *inputs: Tensor) -> Tensor | None:
    """Return the output, by default a new tensor, or None if the kernels cannot compute it from the inputs."""
    x = inputs[0]
    if x.dtype not in TYPES or not x.numel():
        return None
    if out is None:
        out = torch.empty_like(x)
    return out if all(_can_write(out, each) for each in inputs) else None


def _can_write(out: Tensor, x: Tensor) -> bool:
    """Return True for an output of the same shape and type that is x or shares no memory with it."""
    if out.dtype != x.dtype or out.shape != x.shape:
        return False
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return True
    return out.data_ptr() == x.data_ptr() and out.stride() == x.stride()


def _rows(out: Tensor, *inputs: Tensor) -> list[Tensor] | None:
    """Return a dense output and the inputs as rows in the order of memory, or None for other outputs."""
    order = sorted(range(out.dim()), key=out.stride, reverse=True)
    tensors = [each.permute(order) for each in (out, *inputs)]
    if not tensors[0].is_contiguous():
        return None
    columns = tensors[0].shape[-1] if order else 1
    if out.numel() % WIDE == 0 and all(each.is_contiguous() for each in tensors):
        columns = WIDE
    rows = [each.reshape(-1, columns) for each in tensors]
    return [each if each.stride(1) == 1 else each.contiguous() for each in rows]
