"""What the operations on the C++ kernels share: how much memory a gathered input takes, parts of a wide tensor, the end of an MLP.

Left out: the operations themselves (`native_ops`, `native_blocks`). Legend: h hidden, f MLP width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import gather_sequence, reduce_scatter_sequence
from ..comm.base import Comm
from .shared import DropoutKey, as_rows

MLP_PARTS, MLP_COLUMNS = 4, 512  # backward holds this part of the MLP's inner tensor twice, and at least so many columns


def row_count(x: Tensor, sequence: Comm | None) -> int:
    """Rows of x (..., h) when it is gathered. What is kept gets its memory before what is gathered, which leaves no holes then."""
    return x.numel() // x.shape[-1] * (1 if sequence is None else sequence.size)


def dropout_arguments(p: float, key: DropoutKey) -> tuple[float, int, int, int, int]:
    """The dropout arguments of the row-wise kernels, whose samples are the second dimension."""
    assert key.sample_dim == 1
    return p, key.seed, key.stream, key.first_sample, key.row0


def column_parts(pre: Tensor, width: int, whole: bool) -> Iterator[tuple[slice, Tensor]]:
    """Parts of `width` columns, or all at once: where they are, and memory (rows, columns) for each in turn, with pre's rows."""
    columns = width if whole else min(max(MLP_COLUMNS, -(-width // MLP_PARTS // 64) * 64), width)
    buffer = pre.new_empty(len(pre) * columns)
    for first in range(0, width, columns):
        part = slice(first, min(first + columns, width))
        yield part, buffer[: len(pre) * (part.stop - first)].view(len(pre), -1)


def gradient_of_input(ctx: Any, x: Tensor, dpre: Tensor, chunk: int) -> Tensor:
    """The end of an MLP's backward: from the gradient dpre (rows, out) of its first product, the first weight's, and that of x.

    ctx: of the autograd function, with ops, parameters (the first product's weight and bias before others), shape, sequence and
    keeps_input; without the latter x gives its memory to the result, which has x's shape.
    """
    ops, (weight, bias, *_) = ctx.ops, ctx.parameters
    rows = as_rows(gather_sequence(x, ctx.sequence))
    ops.weight_gradient(dpre, rows, weight, bias, chunk)
    dx = torch.empty_like(rows) if ctx.keeps_input or ops.weight_gradients.waits else rows
    ops.data_gradient(dpre, weight, dx, chunk)
    return reduce_scatter_sequence(dx.view(ctx.shape), ctx.sequence)
