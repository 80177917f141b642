"""Sums of a tensor's bits as integers modulo 2^64, which any flipped bit changes. They do not depend on the number of threads."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_WORDS = 8192  # words of 8 bytes in a block
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element bytes


def bit_sum(x: Tensor) -> int:
    """Return the sum of x's bits (any shape)."""
    return int(_words(x.detach().reshape(-1)).sum())


def block_sums(x: Tensor) -> Tensor:
    """Return the bit sums of blocks of `block_elements(x)` elements of x (n,), the last block with the rest."""
    whole = len(x) // block_elements(x) * block_elements(x)
    rest = _words(x[whole:]).sum().view(1)
    if not whole:
        return rest
    return torch.cat([_words(x[:whole]).view(-1, BLOCK_WORDS).sum(1), rest])


def block_elements(x: Tensor) -> int:
    return BLOCK_WORDS * 8 // x.element_size()


def _words(flat: Tensor) -> Tensor:
    """Return contiguous elements as integers (m,), as wide as their number permits."""
    size = flat.element_size()
    if flat.storage_offset() * size % 8:
        flat = flat.clone()  # words of 8 bytes begin at a multiple of 8 bytes
    return flat.view(torch.int64 if flat.numel() * size % 8 == 0 else _INTEGERS[size])
