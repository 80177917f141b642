"""Operators that PyTorch composes of others, so that it has no kernel of their backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..comm.autograd import Function, Gradients


class Composed(Function[Tensor]):
    """Value of an operator of `inputs`: Composed.apply(forward, backward, compose, *inputs).

    forward(*inputs): computes the value, and tensors that are saved for `backward`.
    backward(dy, *inputs, *saved): computes the gradients of the inputs.
    compose(*inputs): computes the value by torch's operators, for the other gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, forward: Callable[..., Any], backward: object, compose: object, *inputs: Tensor
    ) -> Tensor:
        y: Tensor
        y, *saved = forward(*inputs)
        ctx.save_for_backward(*inputs, *saved)
        ctx.kernels = backward
        ctx.compose = compose
        ctx.count = len(inputs)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        """Compute the gradients by kernels if they can read dy: no batch of vmap, and no second derivative is wanted."""
        dy = dy.resolve_neg()
        functorch = torch._C._functorch
        is_batch = functorch.is_batchedtensor(dy) or functorch.is_legacy_batchedtensor(dy)
        create_graph = torch.is_grad_enabled()
        if not is_batch and not create_graph:
            return None, None, None, *ctx.kernels(dy, *ctx.saved_tensors)
        inputs = ctx.saved_tensors[: ctx.count]
        wanted = [each for each in inputs if each.requires_grad]
        with torch.enable_grad():
            y = ctx.compose(*inputs)
            found = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
        gradients = (next(found) if each.requires_grad else None for each in inputs)
        return None, None, None, *gradients
