"""What communicators require of a tensor and how they sum: shared by `comm.mpi` and `comm.local`, so that both agree.

Left out: traffic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
SUMMED_DTYPES = (torch.float32, *HALF)  # of activations and gradients, whose sums are large
COMM_DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool, *HALF)
OPS = ("sum", "max", "min")


def check(tensor: Tensor) -> Tensor:
    """Assert that `tensor` (any shape) can be communicated: contiguous, of a known dtype. Returns it."""
    assert tensor.is_contiguous(), f"a communicated tensor must be contiguous: {tuple(tensor.shape)} {tensor.stride()}"
    assert tensor.dtype in COMM_DTYPES, f"no communication of {tensor.dtype}"
    return tensor


def rows(whole: Tensor, part: Tensor, size: int) -> Tensor:
    """`whole` (size * n elements, any shape) as a view (size, n), one row per rank of n elements as in `part`.

    Asserts that both tensors have one dtype and that their sizes fit.
    """
    assert check(whole).dtype == check(part).dtype, f"{whole.dtype} and {part.dtype}"
    assert whole.numel() == size * part.numel(), f"{whole.numel()} elements are not {size} x {part.numel()}"
    return whole.detach().view(size, part.numel())


def rank_order_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum of `parts` (any shape, the same for all), in their order. BF16 and FP16 are summed, and returned, in FP32."""
    first = parts[0].detach()
    total = first.float() if first.dtype in HALF else first.clone()
    for part in parts[1:]:
        total += part.detach()
    return total
