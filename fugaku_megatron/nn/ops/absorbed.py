"""Projections of queries to latents and of latents to values, for decoding (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).

The score q . (W_UK c) is (W_UK^T q) . c, and the sum of values W_UV c is W_UV times the sum of c, so attention reads latents c.
n heads of this rank, r rows, f elements of a key that are not rotated, v elements of a value. A weight (n (f + v), latents) has the
rows of W_UK and W_UV head by head; a block is some of them, as many as divide f and v.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..parameter import derived, matrix_of, row_groups, scales_of
from .backend import Backend
from .gemm import matmul
from .grouped_gemm import grouped_data_gradient, grouped_matmul


class _Blocks(NamedTuple):
    """Blocks (n (f + v) / size, size, latents) of a weight, and each head's number of blocks in W_UK and in W_UV."""

    matrices: Tensor
    of_keys: int
    of_values: int

    @staticmethod
    def of(weight: Tensor, heads: int, fixed: int) -> _Blocks:
        rows, latents = weight.shape
        values = rows // heads - fixed
        size = math.gcd(fixed, values)
        matrices = derived(weight, weight.detach().view(-1, size, latents))
        return _Blocks(matrices, fixed // size, values // size)

    def counts(self, keys: int, values: int) -> list[int]:
        """Return the rows that multiply each block: `keys` for blocks in W_UK, `values` for blocks in W_UV."""
        each = self.of_keys + self.of_values
        numbers = range(len(self.matrices))
        return [keys if number % each < self.of_keys else values for number in numbers]


def absorb_queries(ops: Backend, queries: Tensor, weight: Tensor) -> Tensor:
    """Return W_UK^T q of each head, (r, n, f) -> (r, n, latents)."""
    r, n, f = queries.shape
    blocks = _Blocks.of(weight, n, f)
    by_block = queries.view(r, n, blocks.of_keys, -1).permute(1, 2, 0, 3)
    rows = by_block.flatten(0, 2).contiguous()
    out = rows.new_empty(len(rows), weight.shape[1])
    grouped_data_gradient(ops, rows, blocks.matrices, blocks.counts(r, 0), out)
    return out.view(n, blocks.of_keys, r, -1).sum(1).transpose(0, 1)


def latents_to_values(ops: Backend, context: Tensor, weight: Tensor, fixed: int) -> Tensor:
    """Return W_UV c of each head, (r, n, latents) -> (r, n, v). fixed: f"""
    r, n, latents = context.shape
    blocks = _Blocks.of(weight, n, fixed)
    by_block = context.transpose(0, 1).unsqueeze(1).expand(n, blocks.of_values, r, latents)
    rows = by_block.reshape(-1, latents)
    out = rows.new_empty(len(rows), blocks.matrices.shape[1])
    counts = blocks.counts(0, r)
    if scales_of(weight) is None:
        grouped_matmul(ops, rows, blocks.matrices, counts, out)
    else:  # a call for each block has few rows, whose numbers are not quantized
        for number, own in row_groups(counts):
            matmul(ops, rows[own], matrix_of(blocks.matrices, number), out[own])
    return out.view(n, blocks.of_values, r, -1).permute(2, 0, 1, 3).flatten(2)
