"""What the operations of both backends share: accumulation of gradients, dropout's key, backward and recompute.

Left out: everything that has two implementations (`torch_ops`, `native_ops`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor


@dataclass(frozen=True)
class DropoutKey:
    """Selects a dropout mask: a function of seed, stream and the element's position in its sample's global tensor.

    `sample_dim` counts samples from `first_sample`, the last dimension counts columns from 0, and all other dimensions together
    count rows from `row0`. Where a rank has two parts of a sequence, row `cut` and those after it count from `after_cut`.
    """

    seed: int
    stream: int
    first_sample: int
    sample_dim: int
    row0: int = 0
    cut: int | None = None
    after_cut: int = 0

    @staticmethod
    def of_runs(runs: Sequence[range], seed: int, stream: int, first_sample: int) -> DropoutKey:
        """That of an activation (s, b, h) with the positions `runs`, one or two."""
        run, *second = runs
        cut, after_cut = (len(run), second[0].start) if second else (None, 0)
        return DropoutKey(seed, stream, first_sample, 1, run.start, cut, after_cut)

    def runs(self) -> Iterator[tuple[slice | None, DropoutKey]]:
        """The parts of the rows whose numbers follow one another, None for all rows, each with a key of its own."""
        if self.cut is None:
            yield None, self
        else:
            yield slice(self.cut), replace(self, cut=None)
            yield slice(self.cut, None), replace(self, row0=self.after_cut, cut=None)


def as_rows(x: Tensor) -> Tensor:
    """(..., h) -> (rows, h), contiguous."""
    return x.contiguous().view(-1, x.shape[-1])


def parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(number, rows) of each group that has rows, of groups whose rows follow one another."""
    start = 0
    for number, count in enumerate(counts):
        if count:
            yield number, slice(start, start + count)
        start += count


@overload
def gradient_of(parameter: Tensor) -> Tensor: ...
@overload
def gradient_of(parameter: None) -> None: ...
def gradient_of(parameter: Tensor | None) -> Tensor | None:
    """The FP32 gradient `main_grad` of a parameter, of its shape; None where there is no parameter, and where it is frozen."""
    return None if parameter is None else parameter.main_grad  # type: ignore[attr-defined]  # torch's class does not know it


def is_frozen(parameter: Tensor) -> bool:
    """Whether a parameter is not trained, so that nothing needs to be kept for its gradient. Also of what is made of one."""
    return getattr(parameter, "frozen", False)


def vector_gradient(parameter: Tensor) -> Tensor:
    """`gradient_of` (h) for kernels that compute it in any case; memory that nobody reads where the parameter is frozen."""
    return torch.zeros(parameter.shape) if is_frozen(parameter) else gradient_of(parameter)


def accumulate(parameter: Tensor, grad: Tensor) -> None:
    """Add `grad` (the parameter's shape, any shape and float dtype) to the parameter's FP32 gradient, unless it is frozen."""
    if not is_frozen(parameter):
        gradient_of(parameter).add_(grad)


def masked(kernels: Any, x: Tensor, p: float, key: DropoutKey) -> Tensor:
    """x (any shape) with elements zeroed with probability p and the others scaled by 1 / (1 - p)."""
    x = x.contiguous()
    out = torch.empty_like(x)
    for part, own in key.runs():
        rows, made = (x, out) if part is None else (x[part], out[part])
        kernels.dropout(
            rows, made, p, own.seed, own.stream, own.first_sample, own.sample_dim, own.row0
        )
    return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor, p: float, key: DropoutKey) -> Tensor:
        ctx.kernels, ctx.p, ctx.key = kernels, p, key
        return masked(kernels, x, p, key)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None, None]:
        return None, masked(ctx.kernels, dy, ctx.p, ctx.key), None, None


def dropout(kernels: Any, x: Tensor, p: float, key: DropoutKey) -> Tensor:
    """Zero elements of x (any shape) with probability p and scale the others by 1/(1-p). The mask depends on `key` alone."""
    return x if p == 0.0 else _Dropout.apply(kernels, x, p, key)


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


Angles = tuple[Tensor, Tensor]  # cosines and sines (positions, rotated elements / 2), FP32


@dataclass(frozen=True)
class Heads:
    """How qkv (s, b, g (n/g + 2) d) lies: for each group its n/g queries, its key and its value, d elements each."""

    heads: int
    groups: int
    head_size: int

    @staticmethod
    def of(qkv: Tensor, head_size: int, groups: int | None) -> Heads:
        """Those of qkv (s, b, width); groups None: as many as heads."""
        slots = qkv.shape[-1] // head_size
        return (
            Heads(slots // 3, slots // 3, head_size)
            if groups is None
            else Heads(slots - 2 * groups, groups, head_size)
        )

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views of queries (s, b, g, n/g, d), keys and values (s, b, g, 1, d)."""
        each = self.heads // self.groups
        return qkv.view(*qkv.shape[:2], self.groups, each + 2, self.head_size).split(
            (each, 1, 1), dim=3
        )
