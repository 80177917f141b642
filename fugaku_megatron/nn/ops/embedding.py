"""Word and position embeddings. v rows of the word table on this rank."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import Gradients, SavedResult, apply_saving
from ..parameter import gradient_of
from .backend import Backend


def embedding(ops: Backend, tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Look up rows of the word table. tokens (s, b), weight (v, h) -> (s, b, h).

    first_row: this rank's first row; tokens on other ranks give zeros.
    """
    if not ops.is_native("embedding"):
        return _torch_embedding(tokens, weight, first_row)
    tokens = tokens.contiguous()

    def forward() -> SavedResult:
        out = weight.new_empty(*tokens.shape, weight.shape[1])
        ops.kernels.embedding(tokens, weight, out, first_row)
        return out, ()

    def backward(dout: Tensor) -> Gradients:
        ops.kernels.embedding_backward(tokens, dout.contiguous(), gradient_of(weight), first_row)
        return ()

    return apply_saving(forward, backward, weight)


def _torch_embedding(tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
    rows = tokens - first_row
    elsewhere = (rows < 0) | (rows >= weight.shape[0])
    rows = rows.masked_fill(elsewhere, 0)
    elsewhere = elsewhere.unsqueeze(-1)

    def backward(dy: Tensor) -> Gradients:
        dy = dy.float().masked_fill(elsewhere, 0.0)
        gradient_of(weight).index_add_(0, rows.flatten(), dy.flatten(0, 1))
        return ()

    return apply_saving(
        lambda: (F.embedding(rows, weight).masked_fill_(elsewhere, 0.0), ()), backward, weight
    )


def add_position(ops: Backend, x: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Add rows from `first` on of weight (positions, h) to x (s, b, h)."""
    native = ops.is_native("embedding")

    def forward() -> SavedResult:
        if not native:
            return x + weight[first : first + len(x)].unsqueeze(1), ()
        out = x.new_empty(x.shape)
        ops.kernels.add_position(x.contiguous(), weight[first:], out)
        return out, ()

    def backward(dout: Tensor) -> Tensor:
        gradient = gradient_of(weight)[first:]
        if native:
            ops.kernels.add_position_backward(dout.contiguous(), gradient)
        else:
            gradient[: len(dout)].add_(dout.sum(1, dtype=torch.float32))
        return dout

    return apply_saving(forward, backward, x, weight)
