"""Dropout whose mask is a function of the global position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
