"""What the benchmarks of kernels on rows compare with: torch's eager operations under autograd, forward and backward.

Left out: which operations (rowwise.py, rowwise_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .driver import Call, Case

EPSILON = 1e-5
Eager = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class EagerPass:
    """Torch's forward and backward of the same operation: function(inputs), and the gradients of its results."""

    function: Eager
    inputs: Sequence[Tensor]
    grads: Sequence[Tensor]

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Copies of the inputs, the floating ones in `dtype` and with gradients."""
        copies = [t.to(dtype or t.dtype) if t.is_floating_point() else t for t in self.inputs]
        return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in copies]

    def gradients(self, leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """Of all floating leaves, by autograd."""
        return list(torch.autograd.grad(self.function(leaves), [t for t in leaves if t.requires_grad], grads))


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Largest difference, relative to the largest exact value."""
    return float((ours.double() - exact).abs().max() / exact.abs().max())


def compare(op: str, shape: tuple[int, ...], calls: tuple[Call, ...], results: Sequence[Tensor], eager: EagerPass,
            **details: str) -> Case:
    """A case whose baseline is `eager` forward and backward; `results`: our gradients, in the order of its floating inputs."""
    leaves = eager.leaves()

    def error() -> float:
        for sums in results:
            if sums.dim() == 1:  # sums over rows are added to
                sums.zero_()
        for call in calls:
            call.run()
        exact = eager.gradients(eager.leaves(torch.float64), [g.double() for g in eager.grads])
        return max(relative_error(ours, right) for ours, right in zip(results, exact, strict=True))

    return Case(op=op, shape=shape, calls=calls, baseline="torch", baseline_run=lambda: eager.gradients(leaves, eager.grads),
                error=error, details=details)
