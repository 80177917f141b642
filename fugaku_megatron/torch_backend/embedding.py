"""Gradient of an embedding's table, FP32 and BF16."""

from __future__ import annotations

import torch
from torch import Tensor

from ..host import kernels


def embedding_dense_backward(
    grad_output: Tensor,
    indices: Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> object:
    """Return the gradient (num_weights, h), summed in FP32.

    padding_idx: row without a gradient, -1 for none
    """
    if scale_grad_by_freq or indices.dtype not in (torch.int64, torch.int32) or not num_weights:
        return NotImplemented
    # Rounding a table of FP32 sums takes longer than PyTorch's sums in BF16 if most rows have no token.
    table = num_weights * grad_output.shape[-1]
    if grad_output.dtype == torch.bfloat16 and table > grad_output.numel():
        return NotImplemented
    rows, places = indices.long().unique(return_inverse=True)
    # A table of FP32 sums of all rows would be twice as large as a BF16 gradient.
    sums = torch.zeros(len(rows), grad_output.shape[-1])
    kernels.embedding_backward(places, grad_output.contiguous(), sums)
    gradient = grad_output.new_zeros(num_weights, grad_output.shape[-1])
    used = rows != padding_idx
    gradient[rows[used]] = sums[used].to(grad_output.dtype)
    return gradient
