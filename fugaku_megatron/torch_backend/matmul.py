"""Matrix products: mm, addmm, bmm and grouped products, FP32 and BF16, in all transpositions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import kernels

FEW_ROWS = 16  # of a product that is faster without packing the second factor (measured on Zen 4)


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> object:
    """Return a (m, k) b (k, n)."""
    out = _output(2, out, a, b)
    if out is None:
        return NotImplemented
    _write_product(_lines(a), _lines(b), out)
    return out


def addmm(
    added: Tensor,
    a: Tensor,
    b: Tensor,
    beta: float,
    alpha: float,
    out: Tensor | None = None,
) -> object:
    """Return beta added + a (m, k) b (k, n). added: anything that broadcasts to (m, n)."""
    if alpha != 1 or added.dtype != a.dtype:
        return NotImplemented
    inputs = (a, b) if beta == 0 else (a, b, added)
    out = _output(2, out, *inputs)
    if out is None:
        return NotImplemented
    try:
        added = added.expand_as(out)
    except RuntimeError:
        return NotImplemented
    a = _lines(a)
    b = _lines(b)
    if beta == 0:
        _write_product(a, b, out)
    elif beta == 1 and a.stride(1) == 1 and b.stride(0) == 1 and out.stride(1) == 1:
        _write_linear(a, b.t(), out, added)
    elif out.stride(1) == 1:
        _write_sum(a, b, out, added, beta)
    else:
        _write_sum(b.t(), a.t(), out.t(), added.t(), beta)
    return out


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> object:
    """Return a (groups, m, k) b (groups, k, n)."""
    out = _output(3, out, a, b)
    if out is None:
        return NotImplemented
    groups, m, k = a.shape
    n = b.shape[2]
    if groups == 1:
        _write_product(_lines(a[0]), _lines(b[0]), out[0])
        return out
    columns = a.transpose(1, 2)
    if columns.is_contiguous() and not a.is_contiguous():
        total = _fp32(out).zero_()
        rows = columns.reshape(groups * k, m)
        factor = b.contiguous().view(groups * k, n)
        kernels.grouped_linear_weight_gradient(rows, factor, torch.full((groups,), k), total)
        return out.copy_(total)
    rows = a.reshape(groups * m, k)
    _write_groups(rows, b, torch.full((groups,), m), out.view(groups * m, n))
    return out


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype | None,
) -> object:
    """Return the products of groups, in which the row or column numbers end that `offsets` lists.

    a: (m, k), groups of rows, with b (groups, k, n): the product is (m, n)
    a: (m, k), groups of columns, with b (k, n): the products are (groups, m, n)
    """
    if offsets is None or bias is not None or dtype not in (None, a.dtype):
        return NotImplemented
    if b.dtype != a.dtype or a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
        return NotImplemented
    bounds = [0, *offsets.tolist()]
    end = bounds[-1]
    counts = torch.tensor(bounds).diff()
    of_rows = b.dim() == 3
    bounds.append(a.shape[0] if of_rows else a.shape[1])
    if sorted(bounds) != bounds or not len(counts) or (of_rows and len(b) != len(counts)):
        return NotImplemented
    if of_rows:
        out = a.new_empty(len(a), b.shape[2])
        _write_groups(a[:end], b, counts, out[:end])
        return out
    out = a.new_empty(len(counts), a.shape[0], b.shape[1])
    sizes = counts.tolist()
    for columns, rows, product in zip(a[:, :end].split(sizes, 1), b[:end].split(sizes), out):
        if len(rows):
            _write_product(_lines(columns), _lines(rows), product)
        else:
            product.zero_()
    return out


def _output(rank: int, out: Tensor | None, a: Tensor, b: Tensor, *others: Tensor) -> Tensor | None:
    """Return the output of a product of tensors of `rank` dimensions, by default a new one, or None for a call that is not served.

    An output of the caller has contiguous rows or columns, and shares no memory with the inputs.
    """
    if a.dtype != b.dtype or a.dim() != rank or b.dim() != rank:
        return None
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return None
    shape = (*a.shape[:-1], b.shape[-1])
    if out is None:
        return a.new_empty(shape)
    storages = {each.untyped_storage().data_ptr() for each in (a, b, *others)}
    if out.dtype != a.dtype or out.shape != shape or out.untyped_storage().data_ptr() in storages:
        return None
    return out if out.is_contiguous() or rank == 2 and _has_distinct_lines(out) else None


def _has_distinct_lines(out: Tensor) -> bool:
    """Return True if rows or columns are contiguous and no element shares memory with another one."""
    short, long = sorted(out.stride())
    return short == 1 and long >= out.shape[out.stride().index(short)]


def _lines(x: Tensor) -> Tensor:
    """Return a matrix with contiguous rows or columns."""
    return x if 1 in x.stride() else x.clone(memory_format=torch.contiguous_format)


def _fp32(out: Tensor) -> Tensor:
    """Return memory for sums of an output."""
    return out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)


def _write_groups(rows: Tensor, b: Tensor, counts: Tensor, out: Tensor) -> None:
    """Write the products of groups of consecutive rows, of which there are `counts`, with b (groups, k, n)."""
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    weight = b.transpose(1, 2)
    if weight.is_contiguous():
        kernels.grouped_linear_forward(rows, weight, counts, out)
    else:
        kernels.grouped_linear_data_gradient(rows, b.contiguous(), counts, out)


def _write_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write a b to out. One stride of each is 1."""
    if out.stride(1) != 1:
        kernels.gemm(b.t(), a.t(), out.t())
    elif len(a) <= FEW_ROWS and a.stride(1) == 1 and b.stride(0) == 1 and out.is_contiguous():
        kernels.linear_few_rows(a, b.t(), out)
    else:
        kernels.gemm(a, b, out)


def _write_linear(x: Tensor, weight: Tensor, out: Tensor, added: Tensor) -> None:
    """Write x weight^T + added to out. Rows of x, weight and out are contiguous."""
    if len(out) > 1 and added.stride(0) != 0 or added.stride(1) == 0:
        residual = added if added.stride(1) == 1 else added.contiguous()
        kernels.linear_forward(x, weight, out, residual=residual)
        return
    bias = added[0].contiguous()
    if len(x) <= FEW_ROWS and out.is_contiguous():
        kernels.linear_few_rows(x, weight, out, bias)
    else:
        kernels.linear_forward(x, weight, out, bias)


def _write_sum(a: Tensor, b: Tensor, out: Tensor, added: Tensor, beta: float) -> None:
    """Write beta added + a b to out, whose rows are contiguous, summed in FP32."""
    total = _fp32(out).copy_(added)
    if beta != 1:
        total.mul_(beta)
    kernels.gemm(a, b, total, accumulate=True)
    out.copy_(total)
