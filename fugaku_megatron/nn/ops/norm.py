"""Layer norm and RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), also fused with bias, dropout and residual."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm.autograd import Gradients, Saved, SavedResult, apply_saving
from ...comm.base import Comm
from ..backward import by_autograd
from ..dropout_key import Dropout
from ..parameter import accumulate, as_rows, bias_gradient, vector_gradient
from .backend import Backend
from .dropout import bias_dropout_add, call_rowwise


class NormArguments(NamedTuple):
    """Arguments of a norm.

    weight: parameter (h).
    bias: parameter (h) of a layer norm; None: RMS norm.
    """

    weight: Tensor
    bias: Tensor | None
    epsilon: float

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def kernel(self) -> str:
        return "rms_norm" if self.bias is None else "layer_norm"


def norm(ops: Backend, x: Tensor, call: NormArguments) -> Tensor:
    """Return the layer norm of x (..., h), or x / sqrt(mean(x^2) + epsilon) * weight, computed in FP32."""
    if ops.is_native("rowwise"):
        return _native_norm(ops.kernels, x, call)
    weight, bias, epsilon = call
    if bias is not None:
        return torch_layer_norm(x, weight, bias, epsilon)
    formula = partial(torch_rms_norm, epsilon=epsilon)
    return by_autograd(formula, (x,), (weight,))  # type: ignore[no-any-return]


def _native_norm(kernels: Any, x: Tensor, call: NormArguments) -> Tensor:
    parameters = call.parameters

    def forward() -> SavedResult:
        rows = x.contiguous()
        y = torch.empty_like(rows)
        count = rows.numel() // rows.shape[-1]
        # rstd, after the mean of a layer norm.
        statistics = rows.new_empty(len(parameters), count, dtype=torch.float32).unbind()
        getattr(kernels, call.kernel)(rows, *parameters, y, *statistics, call.epsilon)
        return y, (rows, *statistics)

    def backward(dy: Tensor, x: Tensor, *statistics: Tensor) -> Tensor:
        dx = torch.empty_like(x)
        kernel = getattr(kernels, f"{call.kernel}_backward")
        gradients = map(vector_gradient, parameters)
        kernel(dy.contiguous(), x, *statistics, call.weight, dx, *gradients)
        return dx

    return apply_saving(forward, backward, x, *parameters)


def torch_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Return the layer norm of x (..., h) by torch, without bias if it is None."""

    def forward() -> SavedResult:
        y, mean, rstd = torch.native_layer_norm(x, (x.shape[-1],), weight, bias, epsilon)
        return y, (x, mean, rstd)

    def backward(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
        wanted = [True, True, bias is not None]
        dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
            dy.contiguous(), x, (x.shape[-1],), mean, rstd, weight, bias, wanted
        )
        accumulate(weight, dweight)
        if bias is not None:
            accumulate(bias, dbias)
        gradient: Tensor = dx
        return gradient

    return apply_saving(forward, backward, x, weight, bias)


def torch_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the RMS norm of x (..., h), without a backward of its own."""
    rstd = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return (x * rstd * weight).to(x.dtype)


def sharded_rms_norm(
    rows: Sequence[Tensor], weights: Sequence[Tensor], epsilon: float, tp: Comm
) -> Sequence[Tensor]:
    """Return the RMS norm of each of two tensors (..., elements of this rank) over the elements of all ranks, by torch.

    weights: (elements of this rank,) each
    """

    def forward() -> tuple[tuple[Tensor, ...], Saved]:
        squares = _sums(tp, *(x.float().square() for x in rows))
        statistics = [torch.rsqrt(mean + epsilon) for mean in squares]
        each = zip(rows, statistics, weights, strict=True)
        normed = tuple((x * rstd * weight).to(x.dtype) for x, rstd, weight in each)
        return normed, (*rows, *statistics)

    def backward(*tensors: Tensor) -> list[Tensor]:
        statistics = tensors[4:]
        units = [x.float() * rstd for x, rstd in zip(tensors[2:4], statistics, strict=True)]
        scaled = []
        for dy, unit, weight in zip(tensors[:2], units, weights, strict=True):
            dy = dy.float()
            accumulate(weight, as_rows(dy * unit).sum(0))
            scaled.append(dy * weight)
        means = _sums(tp, *(one * unit for one, unit in zip(scaled, units, strict=True)))
        return [
            (rstd * (one - unit * mean)).to(tensors[2].dtype)
            for rstd, one, unit, mean in zip(statistics, scaled, units, means, strict=True)
        ]

    return apply_saving(forward, backward, *rows)


def _sums(tp: Comm, *products: Tensor) -> tuple[Tensor, ...]:
    """Return the mean of each (..., elements of this rank) over the elements of all ranks, (..., 1) in FP32."""
    sums = torch.stack([product.sum(-1, keepdim=True) for product in products])
    tp.all_reduce(sums)
    return tuple(each / (tp.size * product.shape[-1]) for each, product in zip(sums, products))


def bias_dropout_add_norm(
    ops: Backend,
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    dropped: Dropout,
    call: NormArguments,
) -> tuple[Tensor, Tensor]:
    """Return (`bias_dropout_add`, its `norm`), both (s, b, h)."""
    if not ops.is_native("rowwise"):
        total = bias_dropout_add(ops, x, bias, residual, dropped)
        return total, norm(ops, total, call)
    parameters = call.parameters
    kernel = f"bias_dropout_add_{call.kernel}"

    def forward() -> tuple[tuple[Tensor, Tensor], Saved]:
        rows = x.contiguous()
        total = torch.empty_like(rows)
        y = torch.empty_like(rows)
        statistics = rows.new_empty(len(parameters), *rows.shape[:2], dtype=torch.float32).unbind()
        call_rowwise(
            getattr(ops.kernels, kernel),
            dropped,
            rows,
            bias,
            residual.contiguous(),
            total,
            *parameters,
            y,
            *statistics,
            call.epsilon,
        )
        return (total, y), (total, *statistics)

    def backward(dtotal: Tensor, dy: Tensor, total: Tensor, *statistics: Tensor) -> Gradients:
        dresidual = torch.empty_like(total)
        dx = torch.empty_like(total) if dropped.p else None
        call_rowwise(
            getattr(ops.kernels, f"{kernel}_backward"),
            dropped,
            dy.contiguous(),
            dtotal.contiguous(),
            total,
            *statistics,
            call.weight,
            dresidual,
            dx,
            *map(vector_gradient, parameters),
            bias_gradient(bias),
        )
        return dresidual if dx is None else dx, dresidual

    return apply_saving(forward, backward, x, residual, bias, *parameters)
