"""Matrix products: mm, addmm, bmm and grouped products, FP32 and BF16, in all transpositions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import kernels

TYPES = (torch.float32, torch.bfloat16)
FEW_ROWS = 16  # of a product that is faster without packing the second factor (measured on Zen 4)


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> object:
    """Return a (m, k) b (k, n)."""
    if not _can_multiply(a, b, rank=2):
        return NotImplemented
    if out is None:
        out = a.new_empty(a.shape[0], b.shape[1])
    elif not _can_write(out, a, b):
        return NotImplemented
    _write_product(_lines(a), _lines(b), out)
    return out


def addmm(
    added: Tensor,
    a: Tensor,
    b: Tensor,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> object:
    """Return beta added + a (m, k) b (k, n). added: anything that broadcasts to (m, n)."""
    if alpha != 1 or not _can_multiply(a, b, rank=2):
        return NotImplemented
    shape = (a.shape[0], b.shape[1])
    if added.dtype != a.dtype or not _broadcasts(added, shape):
        return NotImplemented
    if beta == 0:
        return mm(a, b, out)
    if out is None:
        out = a.new_empty(shape)
    elif not _can_write(out, a, b, added):
        return NotImplemented
    a = _lines(a)
    b = _lines(b)
    if beta == 1 and a.stride(1) == 1 and b.stride(0) == 1 and out.stride(1) == 1:
        _write_linear(a, b.t(), out, added)
    else:
        _write_sum(a, b, out, added, beta)
    return out


def bmm(a: Tensor, b: Tensor, out: Tensor | None = None) -> object:
    """Return a (groups, m, k) b (groups, k, n)."""
    if not _can_multiply(a, b, rank=3):
        return NotImplemented
    groups, m, k = a.shape
    n = b.shape[2]
    if out is None:
        out = a.new_empty(groups, m, n)
    elif not (out.is_contiguous() and _can_write(out, a, b)):
        return NotImplemented
    if groups == 1:
        _write_product(_lines(a[0]), _lines(b[0]), out[0])
        return out
    columns = a.transpose(1, 2)
    if columns.is_contiguous() and not a.is_contiguous():
        rows = columns.reshape(groups * k, m)
        factor = b.contiguous().view(groups * k, n)
        total = (
            out.zero_()
            if out.dtype == torch.float32
            else torch.zeros(out.shape, dtype=torch.float32)
        )
        kernels.grouped_linear_weight_gradient(rows, factor, torch.full((groups,), k), total)
        return out if total is out else out.copy_(total)
    rows = a.reshape(groups * m, k)
    _write_groups(rows, b, torch.full((groups,), m), out.view(groups * m, n))
    return out


def grouped_mm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> object:
    """Return the products of groups, in which the row or column numbers end that `offsets` lists.

    a: (m, k), groups of rows, with b (groups, k, n): the product is (m, n)
    a: (m, k), groups of columns, with b (k, n): the products are (groups, m, n)
    """
    known = offsets is not None and bias is None and dtype in (None, a.dtype)
    if not known or a.dtype not in TYPES or b.dtype != a.dtype or a.dim() != 2 or b.dim() < 2:
        return NotImplemented
    ends = offsets.tolist()  # type: ignore[union-attr]
    of_rows = b.dim() == 3
    length = a.shape[0] if of_rows else a.shape[1]
    fits = a.shape[1] == b.shape[-2] and (not of_rows or len(b) == len(ends))
    if (
        not fits
        or not a.numel()
        or not b.numel()
        or sorted([0, *ends, length]) != [0, *ends, length]
    ):
        return NotImplemented
    counts = torch.tensor([0, *ends]).diff()
    if of_rows:
        out = a.new_empty(len(a), b.shape[2])
        _write_groups(a[: ends[-1]], b, counts, out[: ends[-1]])
        return out
    out = a.new_empty(len(ends), a.shape[0], b.shape[1])
    for columns, rows, product in zip(
        a[:, : ends[-1]].split(counts.tolist(), 1), b[: ends[-1]].split(counts.tolist()), out
    ):
        if len(rows):
            _write_product(_lines(columns), _lines(rows), product)
        else:
            product.zero_()
    return out


def _can_multiply(a: Tensor, b: Tensor, rank: int) -> bool:
    if a.dtype not in TYPES or a.dtype != b.dtype:
        return False
    if a.dim() != rank or b.dim() != rank or a.shape[-1] != b.shape[-2]:
        return False
    return a.shape[:-2] == b.shape[:-2] and a.numel() > 0 and b.numel() > 0


def _can_write(out: Tensor, a: Tensor, b: Tensor, added: Tensor | None = None) -> bool:
    """Return True for an output whose rows or columns are contiguous and share no memory with the inputs."""
    inputs = (a, b) if added is None else (a, b, added)
    if out.dtype != a.dtype or out.shape != (*a.shape[:-1], b.shape[-1]):
        return False
    storage = out.untyped_storage().data_ptr()
    if any(each.untyped_storage().data_ptr() == storage for each in inputs):
        return False
    return out.is_contiguous() or out.dim() == 2 and _has_lines(out) and _is_distinct(out)


def _is_distinct(out: Tensor) -> bool:
    """Return True if no element of a matrix shares memory with another element."""
    short = min(out.stride())
    return short == 1 and max(out.stride()) >= out.shape[out.stride().index(short)]


def _broadcasts(added: Tensor, shape: tuple[int, int]) -> bool:
    if added.dim() > 2:
        return False
    sizes = zip(reversed(added.shape), reversed(shape))
    return all(size in (1, whole) for size, whole in sizes)


def _has_lines(x: Tensor) -> bool:
    return x.stride(0) == 1 or x.stride(1) == 1


def _lines(x: Tensor) -> Tensor:
    """Return a matrix with contiguous rows or columns."""
    return x if _has_lines(x) else x.clone(memory_format=torch.contiguous_format)


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
    if added.numel() != out.shape[1] or added.shape[-1:] != out.shape[1:]:
        residual = added.expand_as(out)
        if residual.stride(1) != 1:
            residual = residual.contiguous()
        kernels.linear_forward(x, weight, out, residual=residual)
        return
    bias = added.reshape(-1).contiguous()
    if len(x) <= FEW_ROWS and out.is_contiguous():
        kernels.linear_few_rows(x, weight, out, bias)
    else:
        kernels.linear_forward(x, weight, out, bias)


def _write_sum(a: Tensor, b: Tensor, out: Tensor, added: Tensor, beta: float) -> None:
    """Write beta added + a b to out, summed in FP32."""
    if out.stride(1) != 1:
        _write_sum(b.t(), a.t(), out.t(), added.expand_as(out).t(), beta)
        return
    total = out
    if out.dtype != torch.float32:
        total = torch.empty(out.shape, dtype=torch.float32)
    total.copy_(added)
    if beta != 1:
        total.mul_(beta)
    kernels.gemm(a, b, total, accumulate=True)
    if total is not out:
        out.copy_(total)
