"""Tensors computed from a parameter that share the parameter's gradient."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor

from .gradients import gradient_of, is_frozen
from .q8_weight import scales_of


class _View(Tensor):
    """A tensor with the parameter's gradient in another shape, looked up in backward: it may have no memory before."""

    # Results are plain tensors, as with a parameter.
    __torch_function__: Any = torch._C._disabled_torch_function_impl
    parameter: Tensor
    number: int | None = None  # of a matrix, if the parameter stacks several
    rows: slice | None = None

    @property
    def frozen(self) -> bool:
        return is_frozen(self.parameter)

    @property
    def scales(self) -> Tensor | None:
        """Scales of a weight in eight bits (`q8_weight`)."""
        scales = scales_of(self.parameter)
        if scales is None:
            return None
        if self.number is not None:
            scales = scales[self.number]
        return scales.view(*self.shape[:-1], -1)

    @property
    def main_grad(self) -> Tensor | None:
        gradient: Tensor | None = gradient_of(self.parameter)
        if gradient is None:
            return None
        if self.number is not None:
            gradient = gradient[self.number]
        if self.rows is not None:
            gradient = gradient[self.rows]
        return gradient.view(self.shape)


def derived(parameter: Tensor, values: Tensor) -> _View:
    """Attach the parameter's gradient to `values`, a function with slope 1."""
    view = values.as_subclass(_View)
    view.parameter = parameter
    return view


def matrix_of(parameter: Tensor, number: int) -> Tensor:
    """Return matrix `number` (outputs, h) of a parameter (e, ..., h), with its gradient."""
    view = derived(parameter, parameter.detach()[number].flatten(0, -2))
    view.number = number
    return view


def rows_of(parameter: Tensor, rows: slice) -> Tensor:
    """Return rows of a parameter (n, ...), with their gradient."""
    view = derived(parameter, parameter.detach()[rows])
    view.rows = rows
    return view


@overload
def matrix(parameter: Tensor) -> Tensor: ...
@overload
def matrix(parameter: None) -> None: ...
def matrix(parameter: Tensor | None) -> Tensor | None:
    """Return a parameter (2, f, ...) as (2 f, ...), with its gradient."""
    return None if parameter is None else derived(parameter, parameter.detach().flatten(0, 1))
