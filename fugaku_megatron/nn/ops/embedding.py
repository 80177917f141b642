"""Word and position embeddings. v rows of the word table on this rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.autograd import Function, Gradients
from .backend import Backend


def embedding(ops: Backend, tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    """Look up rows of the word table. tokens (s, b), weight (v, h) -> (s, b, h).

    first_row: this rank's first row; tokens on other ranks give zeros.
    """
    if ops.is_native("embedding"):
        return _NativeEmbedding.apply(ops.kernels, tokens.contiguous(), weight, first_row)
    return _TorchEmbedding.apply(tokens, weight, first_row)


class _NativeEmbedding(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, kernels: Any, tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
        ctx.kernels = kernels
        ctx.tokens = tokens
        ctx.weight = weight
        ctx.first_row = first_row
        out = weight.new_empty(*tokens.shape, weight.shape[1])
        kernels.embedding(tokens, weight, out, first_row)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        ctx.kernels.embedding_backward(
            ctx.tokens, dout.contiguous(), ctx.weight.main_grad, ctx.first_row
        )
        return None, None, None, None


class _TorchEmbedding(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
        rows = tokens - first_row
        ctx.weight = weight
        ctx.elsewhere = (rows < 0) | (rows >= weight.shape[0])
        rows = rows.masked_fill(ctx.elsewhere, 0)
        ctx.save_for_backward(rows)
        return F.embedding(rows, weight).masked_fill_(ctx.elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        dy = dy.float().masked_fill(ctx.elsewhere.unsqueeze(-1), 0.0)
        ctx.weight.main_grad.index_add_(0, ctx.saved_tensors[0].flatten(), dy.flatten(0, 1))
        return None, None, None


def add_position(ops: Backend, x: Tensor, weight: Tensor, first: int = 0) -> Tensor:
    """Add rows from `first` on of weight (positions, h) to x (s, b, h)."""
    return _AddPosition.apply(ops, x, weight, first)


class _AddPosition(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, ops: Backend, x: Tensor, weight: Tensor, first: int) -> Tensor:
        ctx.ops = ops
        ctx.weight = weight
        ctx.first = first
        if not ops.is_native("embedding"):
            return x + weight[first : first + len(x)].unsqueeze(1)
        x = x.contiguous()
        out = torch.empty_like(x)
        ops.kernels.add_position(x, weight[first:], out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Gradients:
        gradient = ctx.weight.main_grad[ctx.first :]
        if ctx.ops.is_native("embedding"):
            ctx.ops.kernels.add_position_backward(dout.contiguous(), gradient)
        else:
            gradient[: len(dout)].add_(dout.sum(1, dtype=torch.float32))
        return None, dout, None, None
