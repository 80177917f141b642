"""What the communicators ask of a tensor and how they sum: shared by `mpi` and `local`, so that both mean the same.

Left out: traffic. Test: pytest tests/test_local.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, *HALF)
OPS = ("sum", "max", "min")


def check(tensor: Tensor) -> Tensor:
    """Assert what every verb asks of a tensor; returns it."""
    assert tensor.is_contiguous(), f"a communicated tensor must be contiguous: {tuple(tensor.shape)} {tensor.stride()}"
    assert tensor.dtype in DTYPES, f"no communication of {tensor.dtype}"
    return tensor


def rows(whole: Tensor, part: Tensor, size: int) -> Tensor:
    """View `whole` as (size, part.numel()), one row a rank; asserts that the two tensors fit."""
    assert check(whole).dtype == check(part).dtype, f"{whole.dtype} and {part.dtype}"
    assert whole.numel() == size * part.numel(), f"{whole.numel()} elements are not {size} x {part.numel()}"
    return whole.detach().view(size, part.numel())


def rank_order_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in the order given, BF16 and FP16 in FP32 (returned in FP32); bool is a logical or."""
    first = parts[0].detach()
    total = first.float() if first.dtype in HALF else first.clone()
    for part in parts[1:]:
        total += part.detach()
    return total
