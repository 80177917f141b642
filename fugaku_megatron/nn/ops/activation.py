"""Activations between an MLP's two matmuls, with or without a gate (Shazeer 2020, arXiv:2002.05202).

pre, their argument, is (rows, f), or with a gate (rows, 2 f): first the gates, then the values.
"""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...config.model import ModelConfig
from ...config.rows import ACTIVATIONS, ActivationPart
from ..parameter import accumulate
from .backend import Backend


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

    def value(self, pre: Tensor, *parameters: Tensor) -> Tensor:
        """Return the activation of pre by torch, -> (rows, f)."""
        found: Tensor = resolve_name(self.row.function)(pre, *self.settings, *parameters)
        return found


def _in_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute a function in FP32, -> its first argument's type."""

    def computed(x: Tensor, *arguments: Any) -> Tensor:
        floats = (one.float() if isinstance(one, Tensor) else one for one in arguments)
        return function(x.float(), *floats).to(x.dtype)

    return computed


def squared_relu(x: Tensor) -> Tensor:
    """So et al. 2021 (arXiv:2109.08668)."""
    return F.relu(x).square()


def gelu(x: Tensor) -> Tensor:
    """Hendrycks and Gimpel 2016 (arXiv:1606.08415), in its tanh form."""
    return F.gelu(x, approximate="tanh")


@_in_fp32
def swiglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    return F.silu(gates) * values


@_in_fp32
def geglu(x: Tensor) -> Tensor:
    gates, values = x.chunk(2, -1)
    return gelu(gates) * values


QUICK = 1.702  # Hendrycks and Gimpel 2016: x sigmoid(1.702 x) is near to the GELU


@_in_fp32
def quick_geglu(x: Tensor, limit: float | None, offset: float) -> Tensor:
    """limit: gates are at most this, values at most this in size; None: no limit"""
    gates, values = x.chunk(2, -1)
    if limit is not None:
        gates = gates.clamp(max=limit)
        values = values.clamp(-limit, limit)
    return gates * torch.sigmoid(QUICK * gates) * (values + offset)


XIELU_BETA = 0.5
XIELU_LIMIT = -1e-6  # expm1's argument is at most this


@_in_fp32
def xielu(x: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """Huang and Schlag 2024 (arXiv:2411.13010). p and n: the parameters before softplus"""
    negative = (XIELU_BETA + F.softplus(n)) * (torch.expm1(x.clamp(max=XIELU_LIMIT)) - x)
    return torch.where(x > 0, F.softplus(p) * x * x, negative) + XIELU_BETA * x


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
        return activation.value(pre, *activation.parameters)
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
    if name is None:
        parameters = (x.float() for x in activation.parameters)
        leaves = [x.detach().requires_grad_() for x in (pre, *parameters)]
        with torch.enable_grad():
            value = activation.value(*leaves)
        gradients = torch.autograd.grad(value, leaves, dinner)
        dpre.copy_(gradients[0])
        for parameter, gradient in zip(activation.parameters, gradients[1:], strict=True):
            accumulate(parameter, gradient)
    elif activation.gated:
        ops.kernels.gate_backward(dinner, as_gates(pre), as_gates(dpre), name)
    else:
        ops.kernels.activate_backward(dinner, pre, dpre, name)
