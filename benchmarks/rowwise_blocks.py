"""The kernels of Llama's, Mistral's and Qwen's blocks against torch's eager operations as plain modelling code writes them.

RMS norm alone and behind the residual sum, SwiGLU, and rotary positions with and without a norm of queries and keys; each forward
and backward. The baseline is the code of Hugging Face's transformers (models/llama, models/qwen3): norms in FP32 with the result
cast back, the gate and what it multiplies as tensors of their own, queries and keys turned as x cos + rotate_half(x) sin with
cosines and sines in the precision of x. A part of `python -m benchmarks rowwise`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.run_config import ModelConfig

from .driver import Call, Case
from .eager import EPSILON, EagerPass, compare, relative_error

ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class Heads:
    """Queries and keys of one rank: n heads in g groups, of d columns each."""

    heads: int
    groups: int
    d: int

    @property
    def queries(self) -> int:
        """Of a group."""
        return self.heads // self.groups

    def random(self, s: int, b: int, dtype: torch.dtype) -> Tensor:
        """(s, b, g (n/g + 2), d), as the kernels take it."""
        return torch.randn(s, b, self.groups * (self.queries + 2), self.d).to(dtype)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Views of the queries (s, b, g, n/g, d) and keys (s, b, g, 1, d) of x."""
        return list(x.unflatten(2, (self.groups, -1)).split((self.queries, 1, 1), 3)[:2])


def cases(model: ModelConfig, s: int, b: int, tp: int, dtype: torch.dtype) -> Iterator[Case]:
    """Those of one layer on one of tp tensor-parallel ranks; s sequence, b micro-batch."""
    h, heads = model.hidden_size, Heads(model.num_attention_heads // tp, model.query_groups // tp, model.kv_channels)
    yield rms_norm(s * b, h, dtype)
    yield residual_rms_norm(s, b, h, dtype)
    yield swiglu(s * b, model.ffn_hidden_size // tp, dtype)
    yield rotary(s, b, heads, dtype)
    yield rotary_norm(s, b, heads, dtype)


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., h), weight (h) -> (..., h)."""
    single = x.float() if x.dtype != torch.float64 else x
    normed = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * normed.to(x.dtype)


def rms_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """y = rms_norm(x) and its gradients. x (rows, h)."""
    x, dy, weight = torch.randn(rows, h).to(dtype), torch.randn(rows, h).to(dtype), torch.randn(h).to(dtype)
    y, dx, rstd, dw = torch.empty_like(x), torch.empty_like(x), torch.empty(rows), torch.zeros(h)
    calls = (Call("rms_norm", x, weight, y, rstd, EPSILON), Call("rms_norm_backward", dy, x, rstd, weight, dx, dw))
    eager = EagerPass(lambda t: (eager_rms_norm(*t),), (x, weight), (dy,))
    return compare("rms_norm", (rows, h), calls, (dx, dw), eager)


def residual_rms_norm(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """sum = residual + x, y = rms_norm(sum), one pass each way, without bias and dropout. x (s, b, h)."""
    x, residual, dy, dsum = (torch.randn(s, b, h).to(dtype) for _ in range(4))
    weight, rstd, dw = torch.randn(h).to(dtype), torch.empty(s * b), torch.zeros(h)
    total, y, dx = (torch.empty_like(x) for _ in range(3))
    calls = (Call("bias_dropout_add_rms_norm", x, None, residual, total, weight, y, rstd, EPSILON),
             Call("bias_dropout_add_rms_norm_backward", dy, dsum, total, rstd, weight, dx, None, dw, None))

    def function(t: Sequence[Tensor]) -> tuple[Tensor, ...]:
        summed = t[1] + t[0]
        return summed, eager_rms_norm(summed, t[2])

    eager = EagerPass(function, (x, residual, weight), (dsum, dy))
    return compare("residual_rms_norm", (s * b, h), calls, (dx, dx, dw), eager)


def swiglu(rows: int, f: int, dtype: torch.dtype) -> Case:
    """silu(gate) up and its gradients, which take the memory of gate and up, as in the trainer. gate and up (rows, f).

    With small values and gradients of 2 or -2 what is left there after each round is about as large as before.
    """
    x, dy = (0.01 * torch.randn(rows, 2, f)).to(dtype), torch.randn(rows, f).sign().mul_(2).to(dtype)
    calls = Call("swiglu", x, torch.empty_like(dy)), Call("swiglu_backward", dy, x, x)

    def eager(values: Tensor) -> EagerPass:
        return EagerPass(lambda t: (F.silu(t[0]) * t[1],), [part.contiguous() for part in values.unbind(1)], (dy,))

    def error() -> float:
        plain = eager(x)
        exact = plain.gradients(plain.leaves(torch.float64), (dy.double(),))
        for call in calls:
            call.run()
        return max(relative_error(*pair) for pair in zip(x.unbind(1), exact, strict=True))

    plain = eager(x)
    leaves = plain.leaves()
    return Case(op="swiglu", shape=(rows, f), calls=calls, baseline="torch", baseline_run=lambda: plain.gradients(leaves, (dy,)),
                error=error)


def angles(s: int, d: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (s, d / 2) of the positions 0 to s - 1."""
    turns = torch.outer(torch.arange(s), ROTARY_BASE ** (-torch.arange(0, d, 2) / d))
    return turns.cos(), turns.sin()


def eager_turned(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """x (s, b, g, k, d) with columns i and i + d / 2 turned by cosines and sines (s, d), which hold each angle twice."""
    (first, second), (cos, sin) = x.chunk(2, -1), (t.to(x.dtype)[:, None, None, None] for t in turns)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary(s: int, b: int, heads: Heads, dtype: torch.dtype) -> Case:
    """Queries and keys turned, and their gradients. The kernels take them as they lie beside the values and copy these."""
    x, dy, (cos, sin) = heads.random(s, b, dtype), heads.random(s, b, dtype), angles(s, heads.d)
    y, dx, turns = torch.empty_like(x), torch.empty_like(x), (cos.repeat(1, 2), sin.repeat(1, 2))
    calls = Call("rotary", x, cos, sin, y, heads.queries), Call("rotary", dy, cos, sin, dx, heads.queries, inverse=True)
    eager = EagerPass(lambda t: tuple(eager_turned(part, turns) for part in t), [part.contiguous() for part in heads.parts(x)],
                      [part.contiguous() for part in heads.parts(dy)])
    return compare("rotary", (s, b, heads.heads, heads.d), calls, heads.parts(dx), eager)


def rotary_norm(s: int, b: int, heads: Heads, dtype: torch.dtype) -> Case:
    """The same behind an RMS norm of each query and key (Qwen3)."""
    x, dy, (cos, sin) = heads.random(s, b, dtype), heads.random(s, b, dtype), angles(s, heads.d)
    y, dx, turns = torch.empty_like(x), torch.empty_like(x), (cos.repeat(1, 2), sin.repeat(1, 2))
    weights, sums = [torch.randn(heads.d).to(dtype) for _ in range(2)], [torch.zeros(heads.d) for _ in range(2)]
    calls = (Call("rotary_norm", x, *weights, cos, sin, y, heads.queries, EPSILON),
             Call("rotary_norm_backward", dy, x, *weights, cos, sin, dx, *sums, heads.queries, EPSILON))
    eager = EagerPass(lambda t: tuple(eager_turned(eager_rms_norm(*pair), turns) for pair in zip(t[:2], t[2:], strict=True)),
                      [*(part.contiguous() for part in heads.parts(x)), *weights], [part.contiguous() for part in heads.parts(dy)])
    return compare("rotary_norm", (s, b, heads.heads, heads.d), calls, (*heads.parts(dx), *sums), eager)
