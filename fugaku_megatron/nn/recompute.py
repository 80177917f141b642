"""Backward of a subgraph, and recompute of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Function, Gradients


def backward(y: Tensor, dy: Tensor | None) -> None:
    """Run torch.autograd.backward(y, dy) without its import of sympy, 32 MiB a rank. dy: None means ones."""
    dy = torch.ones_like(y) if dy is None else dy
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (dy,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Recompute(Function[Tensor]):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        again: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
    ) -> Tensor:
        ctx.again = again
        ctx.args = args
        ctx.save_for_backward(x)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.again(x, *ctx.args)
        y.data = y.new_empty(1)  # backward reads none of the result
        backward(y, dy)
        return None, None, x.grad, *(None for _ in ctx.args)


def recompute(
    function: Callable[..., Tensor],
    x: Tensor,
    *args: Any,
    again: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return function(x, *args), and recompute its intermediate tensors in backward.

    Dropout needs no random state. torch.utils.checkpoint would load torch's compiler, 70 MiB a rank.

    again: called in backward in place of `function`; builds the same graph and may skip values that only the result needs.
    """
    assert x.requires_grad or not torch.is_grad_enabled(), (
        "autograd would drop the function's gradients"
    )
    return _Recompute.apply(function, again or function, x, *args)
