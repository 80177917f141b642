"""Tensors that the kernels take, and their type."""

from __future__ import annotations

import torch
from torch import Tensor

TYPES = (torch.float32, torch.bfloat16)


def is_served(*tensors: Tensor) -> bool:
    """Return True for tensors with elements and one type, FP32 or BF16, outside a compiled function."""
    dtype = tensors[0].dtype
    if dtype not in TYPES or torch.compiler.is_compiling():
        return False
    return all(each.dtype == dtype and each.numel() for each in tensors)


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the type in which autocast computes with x."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
