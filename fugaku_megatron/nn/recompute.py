"""Backward of a part of the graph, and recompute of activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def backward(y: Tensor, dy: Tensor | None) -> None:
    """torch.autograd.backward(y, dy) for y and dy of any shape, None standing for ones.

    Calls the engine itself: torch's function first loads its symbolic-shape checks with sympy, 500 modules and 32 MiB a rank.
    """
    dy = torch.ones_like(y) if dy is None else dy
    torch.autograd.Variable._execution_engine.run_backward(
        (y,), (dy,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Tensor],
        again: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
    ) -> Tensor:
        ctx.again, ctx.args = again, args
        ctx.save_for_backward(x)
        return function(x, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
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
    """function(x, *args) for x of any shape, whose intermediate tensors are dropped and computed again in backward.

    again: what backward calls instead of `function`; it must build the same graph and may leave out what only the values of the
    result need. Dropout masks are functions of their key, so there is no random state to restore and the second run has the same
    bits. torch.utils.checkpoint does the same and more, but its first call loads torch's compiler, 70 MiB a rank.
    """
    assert x.requires_grad or not torch.is_grad_enabled(), (
        "autograd would drop the function's gradients"
    )
    return _Recompute.apply(function, again or function, x, *args)
