"""Layer norm and RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), also fused with bias, dropout and residual."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import Function, Gradients
from ...comm.base import Comm
from ..dropout_key import Dropout
from ..parameter import accumulate, as_rows, gradient_of, vector_gradient
from .backend import Backend
from .dropout import bias_dropout_add, call_rowwise

# The native norms differ in the number of their parameters: weight and bias, or the weight alone.
_NAMES = {1: "rms_norm", 2: "layer_norm"}


def layer_norm(ops: Backend, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    if ops.is_native("rowwise"):
        return _NativeNorm.apply(ops.kernels, x, epsilon, weight, bias)
    return _TorchLayerNorm.apply(x, weight, bias, epsilon)


def rms_norm(ops: Backend, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + epsilon) * weight, computed in FP32. x (..., h)"""
    if ops.is_native("rowwise"):
        return _NativeNorm.apply(ops.kernels, x, epsilon, weight)
    return _TorchRMSNorm.apply(x, weight, epsilon)


class _NativeNorm(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor, epsilon: float, *parameters: Tensor) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rows = x.numel() // x.shape[-1]
        # rstd, after the mean of a layer norm.
        statistics = x.new_empty(len(parameters), rows, dtype=torch.float32).unbind()
        kernel = getattr(kernels, _NAMES[len(parameters)])
        kernel(x, *parameters, y, *statistics, epsilon)
        ctx.save_for_backward(x, *statistics)
        ctx.kernels = kernels
        ctx.parameters = parameters
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        parameters = ctx.parameters
        x, *statistics = ctx.saved_tensors
        dx = torch.empty_like(x)
        kernel = getattr(ctx.kernels, f"{_NAMES[len(parameters)]}_backward")
        gradients = map(vector_gradient, parameters)
        kernel(dy.contiguous(), x, *statistics, parameters[0], dx, *gradients)
        return None, dx, None, *(None for _ in parameters)


class _TorchLayerNorm(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
        ctx.save_for_backward(x, mean, rstd)
        ctx.weight = weight
        ctx.bias = bias
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, mean, rstd = ctx.saved_tensors
        bias = ctx.bias
        wanted = [True, True, bias is not None]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, (x.shape[-1],), mean, rstd, ctx.weight, bias, wanted
        )
        accumulate(ctx.weight, dweight)
        if bias is not None:
            accumulate(bias, dbias)
        return dx, None, None, None


def layer_norm_without_bias(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return _TorchLayerNorm.apply(x, weight, None, epsilon)


class _TorchRMSNorm(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y, rstd = normalized(x, weight, epsilon)
        ctx.save_for_backward(x, rstd)
        ctx.weight = weight
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, rstd = ctx.saved_tensors
        dx, dweight = norm_gradients(dy, x, rstd, ctx.weight)
        accumulate(ctx.weight, dweight)
        return dx, None, None


def normalized(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x (..., h), and the reciprocal root mean squares (..., 1) in FP32."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * weight).to(x.dtype), rstd


def norm_gradients(dy: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x (..., h), and of weight (h) in FP32."""
    unit = x.float() * rstd
    dy = dy.float()
    scaled = dy * weight
    dx = rstd * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
    return dx.to(x.dtype), as_rows(dy * unit).sum(0)


def sharded_rms_norm(
    rows: tuple[Tensor, Tensor], weights: tuple[Tensor, ...], epsilon: float, tp: Comm
) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of each of two tensors (..., elements of this rank) over the elements of all ranks, by torch.

    weights: (elements of this rank,) each
    """
    return _ShardedRMSNorm.apply(*rows, weights, epsilon, tp)


def _sums(tp: Comm, *products: Tensor) -> tuple[Tensor, ...]:
    """Return the mean of each (..., elements of this rank) over the elements of all ranks, (..., 1) in FP32."""
    sums = torch.stack([product.sum(-1, keepdim=True) for product in products])
    tp.all_reduce(sums)
    return tuple(each / (tp.size * product.shape[-1]) for each, product in zip(sums, products))


class _ShardedRMSNorm(Function[tuple[Tensor, Tensor]]):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor, weights: tuple[Tensor, ...], epsilon: float, tp: Comm
    ) -> tuple[Tensor, Tensor]:
        squares = _sums(tp, x.float().square(), y.float().square())
        statistics = [torch.rsqrt(mean + epsilon) for mean in squares]
        ctx.save_for_backward(x, y, *statistics)
        ctx.weights = weights
        ctx.tp = tp
        normed_x, normed_y = (
            (each * rstd * weight).to(each.dtype)
            for each, rstd, weight in zip((x, y), statistics, weights, strict=True)
        )
        return normed_x, normed_y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Gradients:
        x, y, *statistics = ctx.saved_tensors
        units = [each.float() * rstd for each, rstd in zip((x, y), statistics, strict=True)]
        scaled = []
        for dy, unit, weight in zip(gradients, units, ctx.weights, strict=True):
            dy = dy.float()
            accumulate(weight, as_rows(dy * unit).sum(0))
            scaled.append(dy * weight)
        means = _sums(ctx.tp, *(one * unit for one, unit in zip(scaled, units, strict=True)))
        dx, dy = (
            (rstd * (one - unit * mean)).to(x.dtype)
            for rstd, one, unit, mean in zip(statistics, scaled, units, means, strict=True)
        )
        return dx, dy, None, None, None


class LayerNormArguments(NamedTuple):
    """Weight and bias (h) of a layer norm."""

    weight: Tensor
    bias: Tensor
    epsilon: float


def bias_dropout_add_layer_norm(
    ops: Backend,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropped: Dropout,
    norm: LayerNormArguments,
) -> tuple[Tensor, Tensor]:
    """Return (`bias_dropout_add`, its `layer_norm`), both (s, b, h)."""
    if ops.is_native("rowwise"):
        return _BiasDropoutAddNorm.apply(
            ops.kernels, x, bias, residual, dropped, norm.epsilon, norm.weight, norm.bias
        )
    total = bias_dropout_add(ops, x, bias, residual, dropped)
    return total, layer_norm(ops, total, *norm)


def bias_dropout_add_rms_norm(
    ops: Backend,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropped: Dropout,
    weight: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor]:
    """Return (`bias_dropout_add`, its `rms_norm`), both (s, b, h)."""
    if ops.is_native("rowwise"):
        return _BiasDropoutAddNorm.apply(ops.kernels, x, bias, residual, dropped, epsilon, weight)
    total = bias_dropout_add(ops, x, bias, residual, dropped)
    return total, rms_norm(ops, total, weight, epsilon)


class _BiasDropoutAddNorm(Function[tuple[Tensor, Tensor]]):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        x: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        dropped: Dropout,
        epsilon: float,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        total = torch.empty_like(x)
        y = torch.empty_like(x)
        statistics = x.new_empty(len(parameters), *x.shape[:2], dtype=torch.float32).unbind()
        call_rowwise(
            getattr(kernels, f"bias_dropout_add_{_NAMES[len(parameters)]}"),
            dropped,
            x,
            bias,
            residual.contiguous(),
            total,
            *parameters,
            y,
            *statistics,
            epsilon,
        )
        ctx.save_for_backward(total, *statistics)
        ctx.kernels = kernels
        ctx.bias = bias
        ctx.parameters = parameters
        ctx.dropped = dropped
        return total, y

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dy: Tensor) -> Gradients:
        total, *statistics = ctx.saved_tensors
        dresidual = torch.empty_like(total)
        dx = torch.empty_like(total) if ctx.dropped.p else None
        name = _NAMES[len(ctx.parameters)]
        call_rowwise(
            getattr(ctx.kernels, f"bias_dropout_add_{name}_backward"),
            ctx.dropped,
            dy.contiguous(),
            dtotal.contiguous(),
            total,
            *statistics,
            ctx.parameters[0],
            dresidual,
            dx,
            *map(vector_gradient, ctx.parameters),
            gradient_of(ctx.bias),
        )
        if dx is None:
            dx = dresidual
        return None, dx, None, dresidual, None, None, *(None for _ in ctx.parameters)
