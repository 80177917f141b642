"""Gradients of operators that PyTorch composes of others, so that it has no kernel of their backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def is_plain(gradient: Tensor) -> bool:
    """Return True for a gradient that a kernel can read: no batch of vmap, and no second derivative is wanted."""
    functorch = torch._C._functorch
    is_batch = functorch.is_batchedtensor(gradient) or functorch.is_legacy_batchedtensor(gradient)
    return not (is_batch or torch.is_grad_enabled())


def gradients(
    compose: Callable[[], Tensor], inputs: Sequence[Tensor], dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of inputs, None for an input that wants none, by torch's operators in `compose`."""
    wanted = [each for each in inputs if each.requires_grad]
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        found = iter(torch.autograd.grad(compose(), wanted, dy, create_graph=create_graph))
    return tuple(next(found) if each.requires_grad else None for each in inputs)
