"""The operations of a training step on the C++ kernels; `ops` says what each computes, `torch_ops` is the readable reference.

One crossing into C++ per fused operation; outputs are allocated here. Weight gradients go straight into `main_grad`.
Left out: communication, but for the loss. Legend: s sequence, b micro-batch, h hidden, n heads of this rank, d head size,
v vocabulary of this rank, rows = s b. Test: pytest tests/test_ops.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.base import Comm
from ..host import kernels
from .packing import packed
from .shared import MaskPlace

MLP_COLUMNS = 512  # of the MLP's inner tensor that backward holds twice

_fp16_chunk = 0


def use_fp16_accumulation(chunk: int) -> None:
    """See `ops.use_fp16_accumulation`."""
    global _fp16_chunk
    _fp16_chunk = chunk


def _chunk(x: Tensor) -> int:
    """fp16_chunk of a linear layer's products with x; the logits are always summed in FP32."""
    return _fp16_chunk if x.dtype == torch.float16 else 0


def _forward(x: Tensor, weight: Tensor, out: Tensor, *epilogue: Any, chunk: int = 0) -> None:
    """linear_forward with the weight packed before, where it is kept (sums in FP16 have another layout)."""
    kernels.linear_forward(x, weight, out, *epilogue, packed=None if chunk else packed(weight, False), fp16_chunk=chunk)


def _data_gradient(dy: Tensor, weight: Tensor, dx: Tensor, *epilogue: Any, chunk: int = 0) -> None:
    """linear_data_gradient, in the same way."""
    kernels.linear_data_gradient(dy, weight, dx, *epilogue, packed=None if chunk else packed(weight, True), fp16_chunk=chunk)


def _rows(x: Tensor) -> Tensor:
    """(..., h) -> (rows, h), contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def _mask(p: float, mask: MaskPlace) -> tuple[float, int, int, int, int]:
    """The dropout arguments of the row-wise kernels, whose samples are the second dimension."""
    assert mask.sample_dim == 1
    return p, mask.seed, mask.stream, mask.first_sample, mask.row0


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = _rows(x)
        ctx.save_for_backward(rows)
        ctx.weight, ctx.bias, ctx.shape = weight, bias, x.shape
        out = x.new_empty(rows.shape[0], weight.shape[0])
        _forward(rows, weight, out, bias, chunk=_chunk(x))
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (rows,), dy, chunk = ctx.saved_tensors, _rows(dy), _chunk(dy)
        dx, bias_gradient = torch.empty_like(rows), None if ctx.bias is None else ctx.bias.main_grad
        kernels.linear_weight_gradient(dy, rows, ctx.weight.main_grad, bias_gradient, chunk)
        _data_gradient(dy, ctx.weight, dx, chunk=chunk)
        return dx.view(ctx.shape), None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _Linear.apply(x, weight, bias)


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, graph_only: bool) -> Tensor:
        rows = _rows(x)
        pre = x.new_empty(rows.shape[0], weight1.shape[0])  # (rows, f): argument of the GELU
        if graph_only:
            out = x.new_empty(1).expand(rows.shape[0], weight2.shape[0])
            _forward(rows, weight1, pre, bias1, chunk=_chunk(x))
        else:
            out, inner = x.new_empty(rows.shape[0], weight2.shape[0]), torch.empty_like(pre)
            _forward(rows, weight1, inner, bias1, True, pre, chunk=_chunk(x))
            _forward(inner, weight2, out, chunk=_chunk(x))
        ctx.save_for_backward(rows, pre)  # gelu(pre) is cheaper to compute again than to keep
        ctx.weights, ctx.shape, ctx.graph_only = (weight1, bias1, weight2), x.shape, graph_only
        return out.view(*x.shape[:-1], weight2.shape[0])

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        (rows, pre), (weight1, bias1, weight2), dy = ctx.saved_tensors, ctx.weights, _rows(dy)
        chunk = _chunk(dy)
        kept = None if chunk else packed(weight2, True)
        width = pre.shape[1] if kept is not None else min(MLP_COLUMNS, pre.shape[1])
        buffer = pre.new_empty(len(pre) * width)
        for first in range(0, pre.shape[1], width):
            columns = slice(first, first + width)
            argument = pre[:, columns]
            part = buffer[: argument.numel()].view(argument.shape).copy_(argument)
            kernels.gelu(part, None, part)
            kernels.linear_weight_gradient(dy, part, weight2.main_grad[:, columns], fp16_chunk=chunk)
            kernels.linear_data_gradient(dy, weight2[:, columns], part, argument, packed=kept, fp16_chunk=chunk)
            argument.copy_(part)
        del buffer, part
        # pre is the gradient of the GELU's argument now
        kernels.linear_weight_gradient(pre, rows, weight1.main_grad, bias1.main_grad, chunk)
        dx = rows if ctx.graph_only else torch.empty_like(rows)
        _data_gradient(pre, weight1, dx, chunk=chunk)
        return dx.view(ctx.shape), None, None, None, None


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, graph_only: bool = False) -> Tensor:
    return _MLP.apply(x, weight1, bias1, weight2, graph_only)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        x = x.contiguous()
        y, mean, rstd = torch.empty_like(x), *x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32)
        kernels.layer_norm(x, weight, bias, y, mean, rstd, epsilon)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight, ctx.bias = weight, bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        x, mean, rstd = ctx.saved_tensors
        dx = torch.empty_like(x)
        kernels.layer_norm_backward(dy.contiguous(), x, mean, rstd, ctx.weight, dx, ctx.weight.main_grad, ctx.bias.main_grad)
        return dx, None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    return _LayerNorm.apply(x, weight, bias, epsilon)


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, graph_only: bool) -> Tensor:
        ctx.bias, ctx.p, ctx.mask = bias, p, mask
        if graph_only:
            return residual.new_empty(1).expand_as(residual)
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.bias_dropout_add(x, bias, residual.contiguous(), out, *_mask(p, mask))
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, Tensor, None, None, None]:
        dout = dout.contiguous()
        dx = torch.empty_like(dout) if ctx.p else None
        kernels.bias_dropout_add_backward(dout, dx, ctx.bias.main_grad, *_mask(ctx.p, ctx.mask))
        return dout if dx is None else dx, None, dout, None, None, None


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, graph_only: bool = False) -> Tensor:
    return _BiasDropoutAdd.apply(x, bias, residual, p, mask, graph_only)


class _BiasDropoutAddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, weight: Tensor, norm_bias: Tensor,
                epsilon: float) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total, y = torch.empty_like(x), torch.empty_like(x)
        mean, rstd = x.new_empty(2, x.numel() // x.shape[-1], dtype=torch.float32)
        kernels.bias_dropout_add_layer_norm(x, bias, residual.contiguous(), total, weight, norm_bias, y, mean, rstd, epsilon,
                                            *_mask(p, mask))
        ctx.save_for_backward(total, mean, rstd)
        ctx.weights, ctx.p, ctx.mask = (bias, weight, norm_bias), p, mask
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
        total, mean, rstd = ctx.saved_tensors
        bias, weight, norm_bias = ctx.weights
        dresidual = torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.p else None
        kernels.bias_dropout_add_layer_norm_backward(
            dy.contiguous(), dtotal.contiguous(), total, mean, rstd, weight, dresidual, dx, weight.main_grad, norm_bias.main_grad,
            bias.main_grad, *_mask(ctx.p, ctx.mask))
        return dresidual if dx is None else dx, None, dresidual, None, None, None, None, None


def bias_dropout_add_layer_norm(x: Tensor, bias: Tensor, residual: Tensor, p: float, mask: MaskPlace, weight: Tensor,
                                norm_bias: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return _BiasDropoutAddLayerNorm.apply(x, bias, residual, p, mask, weight, norm_bias, epsilon)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, head_size: int, p: float, mask: MaskPlace) -> Tensor:
        qkv = qkv.contiguous()
        s, b, width = qkv.shape
        heads = width // (3 * head_size)
        out, lse = qkv.new_empty(s, b, heads * head_size), qkv.new_empty(b, heads, s, dtype=torch.float32)
        ctx.dropout = (p, mask.seed, mask.stream, mask.first_sample, mask.row0 // s)
        kernels.attention_forward(qkv, out, lse, *ctx.dropout)
        ctx.save_for_backward(qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, out, lse = ctx.saved_tensors
        dqkv = torch.empty_like(qkv)
        kernels.attention_backward(qkv, out, lse, dout.contiguous(), dqkv, *ctx.dropout)
        return dqkv, None, None, None


def attention(qkv: Tensor, head_size: int, p: float, mask: MaskPlace) -> Tensor:
    return _Attention.apply(qkv, head_size, p, mask)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, first_row: int) -> Tensor:
        ctx.tokens, ctx.weight, ctx.first_row = tokens, weight, first_row
        out = weight.new_empty(*tokens.shape, weight.shape[1])
        kernels.embedding(tokens, weight, out, first_row)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, None, None]:
        kernels.embedding_backward(ctx.tokens, dout.contiguous(), ctx.weight.main_grad, ctx.first_row)
        return None, None, None


def embedding(tokens: Tensor, weight: Tensor, first_row: int = 0) -> Tensor:
    return _Embedding.apply(tokens.contiguous(), weight, first_row)


class _AddPosition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.add_position(x, weight, out)
        ctx.weight = weight
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        kernels.add_position_backward(dout.contiguous(), ctx.weight.main_grad)
        return dout, None


def add_position(x: Tensor, weight: Tensor) -> Tensor:
    return _AddPosition.apply(x, weight)


class _HeadLoss(torch.autograd.Function):
    """Logits in chunks of rows: each chunk's loss, and its gradients while the logits are there. `factor` is the gradient that
    backward will bring, because weight gradients are accumulated before it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, tp: Comm, first_row: int, factor: float,
                chunk: int) -> Tensor:
        rows, labels = _rows(x), labels.reshape(-1)
        total, ctx.factor, ctx.shape = 0.0, factor, x.shape
        dx = rows if ctx.needs_input_grad[0] else None  # its rows are read no more when their gradient is known
        buffer = x.new_empty(min(chunk, len(rows)), weight.shape[0], dtype=torch.float32)
        for start in range(0, len(rows), chunk):
            part = slice(start, start + chunk)
            logits = buffer[: len(rows[part])]
            _forward(rows[part], weight, logits)
            total += _chunk_loss(logits, labels[part], tp, first_row, factor / len(rows) if dx is not None else None)
            if dx is not None:
                dlogits = logits.to(x.dtype)
                kernels.linear_weight_gradient(dlogits, rows[part], weight.main_grad)
                _data_gradient(dlogits, weight, dx[part])
        if dx is not None:
            ctx.save_for_backward(dx)
        return torch.tensor(total / len(rows), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        assert dloss.item() == torch.tensor(ctx.factor, dtype=torch.float32).item(), (dloss.item(), ctx.factor)
        return ctx.saved_tensors[0].view(ctx.shape), None, None, None, None, None, None


def _chunk_loss(logits: Tensor, labels: Tensor, tp: Comm, first_row: int, gradient: float | None) -> float:
    """Sum of the losses of some rows; `logits` (rows, v) becomes its gradient times `gradient` (unless None)."""
    top, total, target = torch.empty(3, len(labels))
    if tp.size == 1:
        kernels.cross_entropy_forward(logits, labels, top, total, target)
    else:
        kernels.cross_entropy_max(logits, top)
        tp.all_reduce(top, "max")
        kernels.cross_entropy_sum(logits, top, labels, first_row, total, target)
        tp.all_reduce(total)
        tp.all_reduce(target)
    if gradient is not None:
        kernels.cross_entropy_backward(logits, top, total, labels, first_row, torch.full_like(total, gradient), logits)
    return (torch.log(total) - target).sum(dtype=torch.float64).item()


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, tp: Comm, first_row: int, factor: float,
              rows_at_once: int | None = None) -> Tensor:
    return _HeadLoss.apply(x, weight, labels, tp, first_row, factor, rows_at_once or labels.numel())
