"""Activations between an MLP's two matmuls, with or without a gate (Shazeer 2020, arXiv:2002.05202).

pre, their argument, is (rows, f), or with a gate (rows, 2 f): first the gates, then the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config.model import ModelConfig
from ...config.rows import ACTIVATIONS, ActivationPart
from ..parameter import accumulate
from .backend import Backend


class Functions(NamedTuple):
    """An activation in torch. The settings and parameters of `Activation` follow the arguments of each function.

    value: pre-activation -> value (rows, f).
    gradient: value gradient, pre-activation -> pre-activation gradient.
    parameter_gradients: value gradient, pre-activation -> gradient of each parameter; None without parameters.
    """

    value: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    parameter_gradients: Callable[..., tuple[Tensor, ...]] | None = None


class Activation(NamedTuple):
    """An activation of a layer.

    name: key in ACTIVATIONS.
    settings: the model's values of the row's settings.
    parameters: trained scalars (1,) of the layer.
    """

    name: str
    settings: tuple[float, ...] = ()
    parameters: tuple[Tensor, ...] = ()

    @staticmethod
    def of(model: ModelConfig, parameters: tuple[Tensor, ...] = ()) -> Activation:
        settings = tuple(getattr(model, name) for name in ACTIVATIONS[model.activation].settings)
        return Activation(model.activation, settings, parameters)

    @property
    def row(self) -> ActivationPart:
        return ACTIVATIONS[self.name]

    @property
    def gated(self) -> bool:
        return self.row.gated

    @property
    def functions(self) -> Functions:
        found: Functions = resolve_name(self.row.functions)
        return found

    @property
    def numbers(self) -> tuple[float | Tensor, ...]:
        return (*self.settings, *(parameter.detach() for parameter in self.parameters))


def _in_fp32(function: Callable[..., Tensor], tensors: int) -> Callable[..., Tensor]:
    """Compute a function in FP32. tensors: number of its first arguments; others are numbers"""

    def computed(*arguments: Any) -> Tensor:
        dtype = arguments[tensors - 1].dtype
        return function(*(x.float() if isinstance(x, Tensor) else x for x in arguments)).to(dtype)

    return computed


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


QUICK = 1.702  # Hendrycks and Gimpel 2016: x sigmoid(1.702 x) is near to the GELU


def _clamped(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Return gates, at most `limit`, and values, at most `limit` in size."""
    gates, values = x.chunk(2, -1)
    if limit is None:
        return gates, values
    return gates.clamp(max=limit), values.clamp(-limit, limit)


def _quick_geglu(x: Tensor, limit: float | None, offset: float) -> Tensor:
    gates, values = _clamped(x, limit)
    return gates * torch.sigmoid(QUICK * gates) * (values + offset)


def _quick_geglu_gradient(dy: Tensor, x: Tensor, limit: float | None, offset: float) -> Tensor:
    gates, values = _clamped(x, limit)
    sigmoid = torch.sigmoid(QUICK * gates)
    slope = sigmoid * (1.0 + QUICK * gates * (1.0 - sigmoid))
    both = torch.cat((dy * (values + offset) * slope, dy * gates * sigmoid), -1)
    if limit is None:
        return both
    return both * (torch.cat((gates, values), -1) == x)  # what is clamped has no slope


# xIELU: Huang and Schlag 2024 (arXiv:2411.13010). p and n: the parameters before softplus.
XIELU_BETA = 0.5
XIELU_LIMIT = -1e-6  # expm1's argument is at most this


def _xielu(x: Tensor, p: Tensor, n: Tensor) -> Tensor:
    negative = (XIELU_BETA + F.softplus(n)) * (torch.expm1(x.clamp(max=XIELU_LIMIT)) - x)
    return torch.where(x > 0, F.softplus(p) * x * x, negative) + XIELU_BETA * x


def _xielu_gradient(dy: Tensor, x: Tensor, p: Tensor, n: Tensor) -> Tensor:
    growth = torch.exp(x) * (x < XIELU_LIMIT) - 1.0
    slope = torch.where(x > 0, 2.0 * F.softplus(p) * x, (XIELU_BETA + F.softplus(n)) * growth)
    return dy * (slope + XIELU_BETA)


def _xielu_parameter_gradients(
    dy: Tensor, x: Tensor, p: Tensor, n: Tensor
) -> tuple[Tensor, Tensor]:
    dy = dy.float()
    x = x.float()
    of_p = torch.where(x > 0, dy * x * x, 0.0).sum()
    of_n = torch.where(x > 0, 0.0, dy * (torch.expm1(x.clamp(max=XIELU_LIMIT)) - x)).sum()
    return of_p * torch.sigmoid(p.float()), of_n * torch.sigmoid(n.float())


# Squared ReLU: So et al. 2021 (arXiv:2109.08668). GELU: Hendrycks and Gimpel 2016 (arXiv:1606.08415), "gelu" in its tanh form.
GELU = Functions(partial(F.gelu, approximate="tanh"), _gelu_gradient)
GELU_EXACT = Functions(_in_fp32(F.gelu, 1), _in_fp32(_exact_gelu_gradient, 2))
SQUARED_RELU = Functions(_in_fp32(_squared_relu, 1), _in_fp32(_squared_relu_gradient, 2))
SWIGLU = Functions(_swiglu, _in_fp32(_swiglu_gradient, 2))
GEGLU = Functions(_in_fp32(_geglu, 1), _in_fp32(_geglu_gradient, 2))
QUICK_GEGLU = Functions(_in_fp32(_quick_geglu, 1), _in_fp32(_quick_geglu_gradient, 2))
XIELU = Functions(
    _in_fp32(_xielu, 1),
    _in_fp32(_xielu_gradient, 2),
    parameter_gradients=_xielu_parameter_gradients,
)


def kernel(ops: Backend, activation: Activation) -> str | None:
    """Return the C++ kernels' name of the activation, or None."""
    return activation.row.kernel if ops.is_native("gemm") else None


def fused_kernel(ops: Backend, activation: Activation) -> str | None:
    """Return the C++ kernels' name of an activation that matmuls compute too, or None."""
    return None if activation.gated else kernel(ops, activation)


def as_gates(pre: Tensor) -> Tensor:
    return pre.view(len(pre), 2, pre.shape[-1] // 2)


def activate(ops: Backend, pre: Tensor, activation: Activation) -> Tensor:
    """Apply the activation, -> (rows, f)."""
    name = kernel(ops, activation)
    if name is None:
        return activation.functions.value(pre, *activation.numbers)
    if not activation.gated:
        inner = torch.empty_like(pre)
        ops.kernels.activate(pre, None, inner, name)
        return inner
    inner = pre.new_empty(len(pre), pre.shape[1] // 2)
    ops.kernels.gate(as_gates(pre), inner, name)
    return inner


def activation_gradient(
    ops: Backend, dinner: Tensor, pre: Tensor, dpre: Tensor, activation: Activation
) -> None:
    """Write the gradient of pre to dpre, from the value gradient dinner (rows, f), and add the gradients of parameters."""
    name = kernel(ops, activation)
    if name is not None and activation.gated:
        ops.kernels.gate_backward(dinner, as_gates(pre), as_gates(dpre), name)
        return
    functions = activation.functions
    dpre.copy_(functions.gradient(dinner, pre, *activation.numbers))
    if functions.parameter_gradients is not None:
        gradients = functions.parameter_gradients(dinner, pre, *activation.numbers)
        for parameter, gradient in zip(activation.parameters, gradients, strict=True):
            accumulate(parameter, gradient)
