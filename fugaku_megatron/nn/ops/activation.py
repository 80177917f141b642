"""Activations between an MLP's two matmuls, with or without a gate (Shazeer 2020, arXiv:2002.05202).

pre, their argument, is (rows, f), or with a gate (rows, 2 f): first the gates, then the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config.model import ACTIVATIONS
from .backend import Backend


class Functions(NamedTuple):
    """An activation in torch.

    value: pre-activation -> value (rows, f).
    gradient: value gradient, pre-activation -> pre-activation gradient.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(*(tensor.float() for tensor in tensors)).to(tensors[-1].dtype)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _squared_relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return 2.0 * dy * F.relu(x)


def _gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gradient: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate="tanh")
    return gradient


def _exact_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    cumulative = 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))
    return dy * (cumulative + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


def _swiglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    return F.silu(gates) * values


def _swiglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    sigmoid = torch.sigmoid(gates)
    slope = sigmoid * (1.0 + gates * (1.0 - sigmoid))
    return torch.cat((dy * values * slope, dy * gates * sigmoid), -1)


def _geglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    return F.gelu(gates, approximate="tanh") * values


def _geglu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    tanh = torch.tanh(math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3))
    slope = 0.5 * (1.0 + tanh) + 0.5 * gates * (1.0 - tanh * tanh) * math.sqrt(2 / math.pi) * (
        1.0 + 3 * 0.044715 * gates * gates
    )
    return torch.cat((dy * values * slope, 0.5 * dy * gates * (1.0 + tanh)), -1)


# Squared ReLU: So et al. 2021 (arXiv:2109.08668). GELU: Hendrycks and Gimpel 2016 (arXiv:1606.08415), "gelu" in its tanh form.
GELU = Functions(partial(F.gelu, approximate="tanh"), _gelu_gradient)
GELU_EXACT = Functions(_in_fp32(F.gelu), _in_fp32(_exact_gelu_gradient))
SQUARED_RELU = Functions(_in_fp32(_squared_relu), _in_fp32(_squared_relu_gradient))
SWIGLU = Functions(_swiglu, _in_fp32(_swiglu_gradient))
GEGLU = Functions(_in_fp32(_geglu), _in_fp32(_geglu_gradient))


def functions(activation: str) -> Functions:
    found: Functions = resolve_name(ACTIVATIONS[activation].functions)
    return found


def kernel(ops: Backend, activation: str) -> str | None:
    """Return the C++ kernels' name of the activation, or None."""
    return ACTIVATIONS[activation].kernel if ops.is_native("gemm") else None


def is_fused(ops: Backend, activation: str) -> bool:
    return kernel(ops, activation) is not None and not ACTIVATIONS[activation].gated


def as_gates(pre: Tensor) -> Tensor:
    return pre.view(len(pre), 2, pre.shape[-1] // 2)


def activate(ops: Backend, pre: Tensor, activation: str) -> Tensor:
    """Apply the activation, -> (rows, f)."""
    name = kernel(ops, activation)
    if name is None:
        return functions(activation).value(pre)
    if not ACTIVATIONS[activation].gated:
        inner = torch.empty_like(pre)
        ops.kernels.activate(pre, None, inner, name)
        return inner
    inner = pre.new_empty(len(pre), pre.shape[1] // 2)
    ops.kernels.gate(as_gates(pre), inner, name)
    return inner


def activation_gradient(
    ops: Backend, dinner: Tensor, pre: Tensor, dpre: Tensor, activation: str
) -> None:
    """Write the gradient of pre to dpre, from the value gradient dinner (rows, f)."""
    name = kernel(ops, activation)
    if name is not None and ACTIVATIONS[activation].gated:
        ops.kernels.gate_backward(dinner, as_gates(pre), as_gates(dpre), name)
    else:
        dpre.copy_(functions(activation).gradient(dinner, pre))
