"""Kernels on this CPU: their results against the scalar references, and how fast those run that memory bounds.

A case makes the arguments of one kernel from fixed numbers, so that every machine computes the same. `compared` runs it by the
target in use and by the reference; `elementwise_rates` times it on arrays beyond the caches. Neither needs MPI.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..calibration import host_kernels
from ..host import kernels

EPSILON, DROPOUT = 1e-5, (0.1, 1, 2, 0)  # of norms; p, seed, stream, first sample
ADAMW = (1e-3, 0.9, 0.95, 1e-8, 0.1, 3)  # lr, beta1, beta2, eps, weight decay, step
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}  # of the largest difference, relative to the largest value
LSE = 3.0  # a plausible logarithm of a row's sum in attention


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of a case. rows x cols: of element-wise kernels. m, n, k: of matmuls. s: tokens of attention. words: vocabulary."""

    rows: int = 37
    cols: int = 200
    m: int = 37
    n: int = 83
    k: int = 65
    s: int = 45
    heads: int = 3
    d: int = 64
    words: int = 301


class Numbers:
    """Tensors of fixed values; shapes are any shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self._random = dtype, np.random.default_rng(1)

    def normal(self, *shape: int) -> Tensor:
        """Normal values (...,)."""
        return self.single(*shape).to(self.dtype)

    def single(self, *shape: int) -> Tensor:
        """Normal values in FP32 (...,)."""
        return torch.from_numpy(self._random.standard_normal(shape, np.float32))

    def below(self, limit: int, count: int) -> Tensor:
        """So many whole numbers below `limit` (n,)."""
        return torch.from_numpy(self._random.integers(0, limit, count))


Arguments = tuple[Any, ...]
Cases = dict[str, Callable[[], Arguments]]
zeros = torch.zeros


def _norms(t: Numbers, z: Sizes) -> Cases:
    r, c = z.rows, z.cols

    def rows(count: int) -> list[Tensor]:
        return [t.normal(r, 1, c) for _ in range(count)]

    return {
        "layer_norm": lambda: (*rows(1), t.normal(c), t.normal(c), *rows(1), zeros(r), zeros(r), EPSILON),
        "layer_norm_backward": lambda: (*rows(2), zeros(r), torch.ones(r), t.normal(c), *rows(1), zeros(c), zeros(c)),
        "rms_norm": lambda: (*rows(1), t.normal(c), *rows(1), zeros(r), EPSILON),
        "rms_norm_backward": lambda: (*rows(2), torch.ones(r), t.normal(c), *rows(1), zeros(c)),
        "bias_dropout_add": lambda: (*rows(1), t.normal(c), *rows(2), *DROPOUT),
        "bias_dropout_add_layer_norm": lambda: (*rows(1), t.normal(c), *rows(2), t.normal(c), t.normal(c), *rows(1), zeros(r),
                                                zeros(r), EPSILON, *DROPOUT),
        "dropout": lambda: (*rows(2), *DROPOUT),
    }


def _activations(t: Numbers, z: Sizes) -> Cases:
    r, c, heads = z.rows, z.cols, 3 * z.heads

    def angles() -> Tensor:
        return torch.arange(r * z.d // 2).view(r, -1) / 100

    return {
        "activate": lambda: (t.normal(r, c), None, t.normal(r, c)),
        "gate": lambda: (t.normal(r, 2, c), t.normal(r, c)),
        "gate_backward": lambda: (t.normal(r, c), t.normal(r, 2, c), t.normal(r, 2, c)),
        "embedding": lambda: (t.below(z.words, r), t.normal(z.words, c), t.normal(r, c)),
        "embedding_backward": lambda: (t.below(z.words, r), t.normal(r, c), zeros(z.words, c)),
        "rotary": lambda: (t.normal(r, 1, heads, z.d), angles().cos(), angles().sin(), t.normal(r, 1, heads, z.d), 1),
    }


def _loss_and_update(t: Numbers, z: Sizes) -> Cases:
    r, n = z.rows, z.rows * z.cols
    return {
        "cross_entropy_forward": lambda: (t.single(r, z.words), t.below(z.words, r), zeros(r), zeros(r), zeros(r)),
        "cross_entropy_backward": lambda: (t.single(r, z.words), zeros(r), torch.full((r,), 99.0), t.below(z.words, r), 0,
                                           torch.full((r,), 1 / r), zeros(r, z.words)),
        "adamw": lambda: (t.single(n), t.single(n), t.single(n), t.single(n).square(), *ADAMW),
        "squared_norm": lambda: (t.normal(n),),
    }


def _matmuls(t: Numbers, z: Sizes) -> Cases:
    m, n, k, width = z.m, z.n, z.k, z.heads * z.d
    return {
        "linear_forward": lambda: (t.normal(m, k), t.normal(n, k), t.normal(m, n)),
        "linear_data_gradient": lambda: (t.normal(m, n), t.normal(n, k), t.normal(m, k)),
        "linear_weight_gradient": lambda: (t.normal(m, n), t.normal(m, k), zeros(n, k)),
        "attention_forward": lambda: (t.normal(z.s, 1, 3 * width), t.normal(z.s, 1, width), zeros(1, z.heads, z.s)),
        "attention_backward": lambda: (t.normal(z.s, 1, 3 * width), t.normal(z.s, 1, width), torch.full((1, z.heads, z.s), LSE),
                                       t.normal(z.s, 1, width), t.normal(z.s, 1, 3 * width)),
    }


def cases(dtype: torch.dtype, sizes: Sizes) -> Cases:
    """Kernel -> what makes the arguments of its call."""
    found: Cases = {}
    for family in (_norms, _activations, _loss_and_update, _matmuls):
        found |= family(Numbers(dtype), sizes)
    return found


ONLY_FP32 = ("cross_entropy_forward", "cross_entropy_backward", "adamw")
ELEMENTWISE = ("layer_norm", "layer_norm_backward", "bias_dropout_add", "bias_dropout_add_layer_norm", "activate", "gate",
               "gate_backward", "rotary", "adamw")


def result(name: str, dtype: torch.dtype, sizes: Sizes) -> list[Tensor]:
    """All floating operands, any shape, after a call of the kernel, and the number that it returns."""
    arguments = cases(dtype, sizes)[name]()
    value = getattr(kernels, name)(*arguments)
    tensors = [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()]
    return tensors + ([torch.tensor([value])] if isinstance(value, float) else [])


def checksum(tensors: Sequence[Tensor]) -> str:
    """Twelve hexadecimal digits of the bits of tensors of any shape."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def difference(ours: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor, any shape; infinite for a NaN."""
    worst = 0.0
    for a, b in zip(ours, exact, strict=True):
        error = float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst


def compared(sizes: Sizes | None = None) -> list[dict[str, Any]]:
    """A row for each kernel and precision: its checksum, the reference's, the difference, whether that is small enough."""
    rows, sizes = [], sizes or Sizes()
    for dtype, limit in TOLERANCE.items():
        for name in cases(dtype, sizes):
            if dtype != torch.float32 and name in ONLY_FP32:
                continue
            ours = result(name, dtype, sizes)
            with kernels.target("reference"):
                exact = result(name, dtype, sizes)
            error = difference(ours, exact)
            rows.append({"kernel": name, "dtype": str(dtype).removeprefix("torch."), "checksum": checksum(ours),
                         "reference": checksum(exact), "difference": min(error, 1e30), "good": error <= limit})
    return rows


def elementwise_rates(sizes: Sizes, triad_gbs: float, rounds: int) -> list[dict[str, Any]]:
    """GB/s of the FP32 kernels that memory bounds, and their share of the triad's."""
    rows, made = [], cases(torch.float32, sizes)
    for name in ELEMENTWISE:
        arguments, call = made[name](), getattr(kernels, name)
        seconds = host_kernels.seconds_each([lambda f=call, a=arguments: f(*a)], rounds)  # type: ignore[misc]
        rate = kernels.table.bytes(name, *arguments) / seconds / 1e9
        rows.append({"kernel": name, "gbs": rate, "of_triad": rate / triad_gbs})
    return rows
