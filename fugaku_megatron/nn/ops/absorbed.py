"""Projections of queries to latents and of latents to values, for decoding (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).

The score q . (W_UK c) is (W_UK^T q) . c, and the sum of values W_UV c is W_UV times the sum of c, so attention reads latents c.
n heads of this rank, r rows, f elements of a key that are not rotated, v elements of a value. A weight (n (f + v), latents) has the
rows of W_UK and W_UV head by head; a block is some of them, as many as divide f and v.
"""

from __future__ import annotations

import math

from torch import Tensor

from ..parameter import derived, matrix_of, row_groups, scales_of
from .backend import Backend
from .gemm import matmul
from .grouped_gemm import grouped_data_gradient, grouped_matmul


def _blocks(weight: Tensor, heads: int, fixed: int) -> tuple[Tensor, int, int]:
    """Return the blocks (n (f + v) / size, size, latents), and each head's number of blocks in W_UK and in W_UV."""
    rows, latents = weight.shape
    size = math.gcd(fixed, rows // heads)
    blocks = derived(weight, weight.detach().view(-1, size, latents))
    return blocks, fixed // size, (rows // heads - fixed) // size


def absorb_queries(ops: Backend, queries: Tensor, weight: Tensor) -> Tensor:
    """Return W_UK^T q of each head, (r, n, f) -> (r, n, latents)."""
    r, n, f = queries.shape
    blocks, of_keys, of_values = _blocks(weight, n, f)
    counts = [*[r] * of_keys, *[0] * of_values] * n
    rows = queries.view(r, n, of_keys, -1).permute(1, 2, 0, 3).flatten(0, 2).contiguous()
    out = rows.new_empty(len(rows), weight.shape[1])
    grouped_data_gradient(ops, rows, blocks, counts, out)
    return out.view(n, of_keys, r, -1).sum(1).transpose(0, 1)


def latents_to_values(ops: Backend, context: Tensor, weight: Tensor, fixed: int) -> Tensor:
    """Return W_UV c of each head, (r, n, latents) -> (r, n, v). fixed: f"""
    r, n, latents = context.shape
    blocks, of_keys, of_values = _blocks(weight, n, fixed)
    counts = [*[0] * of_keys, *[r] * of_values] * n
    by_block = context.transpose(0, 1).unsqueeze(1).expand(n, of_values, r, latents)
    rows = by_block.reshape(-1, latents)
    out = rows.new_empty(len(rows), blocks.shape[1])
    if scales_of(weight) is None:
        grouped_matmul(ops, rows, blocks, counts, out)
    else:  # a call for each block has few rows, whose numbers are not quantized
        for number, own in row_groups(counts):
            matmul(ops, rows[own], matrix_of(blocks, number), out[own])
    return out.view(n, of_values, r, -1).permute(2, 0, 1, 3).reshape(r, n, -1)
