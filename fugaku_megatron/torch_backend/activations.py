"""GELU, its exact form and its tanh form, FP32 and BF16."""

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
    if x.dtype not in TYPES or not x.numel() or approximate not in FORMS:
        return NotImplemented
    if out is None:
        out = torch.empty_like(x)
    elif not _can_write(out, x):
        return NotImplemented
    pair = _rows(x, out)
    if pair is None:
        return NotImplemented
    kernels.activate(pair[0], None, pair[1], FORMS[approximate])
    return out


def gelu_in_place(x: Tensor, approximate: str = "none") -> object:
    return gelu(x, approximate, x)


def _can_write(out: Tensor, x: Tensor) -> bool:
    """Return True for an output of the same shape and type that is x or shares no memory with it."""
    if out.dtype != x.dtype or out.shape != x.shape:
        return False
    if out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return True
    return out.data_ptr() == x.data_ptr() and out.stride() == x.stride()


def _rows(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return x and a dense output as rows in the order of memory, or None for other outputs."""
    order = sorted(range(out.dim()), key=out.stride, reverse=True)
    x, out = (each.permute(order) for each in (x, out))
    if not out.is_contiguous():
        return None
    columns = out.shape[-1] if order else 1
    if out.numel() % WIDE == 0 and x.is_contiguous():
        columns = WIDE
    rows = x.reshape(-1, columns)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, out.view(-1, columns)
