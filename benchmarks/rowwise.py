"""Kernels on rows, AdamW and the reductions of an update against torch's eager operations, forward and backward.

They are the kernels that the trainer calls, on shapes of `costs.layers` for one tensor-parallel rank: the blocks of GPT-2 and
of Llama, Mistral and Qwen. Ours write into tensors made once, as the trainer does; torch makes its own, in the same tuned memory.
The baseline of RMS norm, SwiGLU and rotary positions is the code of Hugging Face's transformers (models/llama, models/qwen3): norms
in FP32 with the result cast back, the gate and what it multiplies as separate tensors, queries and keys turned as
x cos + rotate_half(x) sin with cosines and sines in the precision of x. AdamW's baseline is torch.optim.AdamW(fused=True).
These operations are bound by memory: rates are bytes that must move over time, next to the triad of the same run.
Left out: GELU with its bias and its derivative, which the trainer computes inside the matmuls (gemm.py times the matmuls).

    python -m benchmarks rowwise --recipe 124m --micro-batch-size 4 [--dtype bf16]

Legend: s sequence, b micro-batch, h hidden, f feed-forward, v vocabulary of this rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.run_config import ModelConfig
from fugaku_megatron.costs.sizes import vocabulary_rows
from fugaku_megatron.costs.stages import stage_parameters

from . import driver, shapes
from .driver import DTYPES, Call, Case, relative_error

TORCH_HERE = True
UPDATE_ELEMENTS = 30_000_000  # 480 MB in AdamW's four buffers: far beyond any cache; a model with fewer parameters has its own
EPSILON = 1e-5
DROPOUT = 0.1
ROTARY_BASE = 10000.0
ADAMW = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
BETAS = (0.9, 0.999)
add_arguments = driver.add_arguments


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield every operation of a layer and the head, then the update."""
    run = shapes.run_of(options)
    tp = options.tensor_model_parallel_size
    dtype = DTYPES[options.dtype]
    model = run.model
    s = model.seq_length
    b = options.micro_batch_size
    h = model.hidden_size
    f = model.ffn_hidden_size // tp
    v = vocabulary_rows(run)
    torch.manual_seed(0)
    yield layer_norm(s * b, h, dtype)
    yield residual(s, b, h, dtype)
    yield residual_norm(s, b, h, dtype)
    yield rms_norm(s * b, h, dtype)
    yield residual_rms_norm(s, b, h, dtype)
    yield swiglu(s * b, f, dtype)
    heads = Heads.of(model, tp)
    yield rotary(s, b, heads, dtype)
    yield rotary_norm(s, b, heads, dtype)
    yield dropout(s, b, h, dtype)
    yield gelu(s * b, f, dtype)
    yield cross_entropy(s * b, v, split=False)
    yield cross_entropy(s * b, v, split=True)
    yield embedding(s * b, h, v, dtype)
    yield position(s, b, h, dtype)
    yield from update(min(UPDATE_ELEMENTS, stage_parameters(run, 0)), dtype)


def compare(
    op: str,
    shape: tuple[int, ...],
    calls: tuple[Call, ...],
    results: Sequence[Tensor],
    function: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    **details: str,
) -> Case:
    """Return a case whose baseline is torch's function(*inputs), forward and backward from the gradients of its results.

    results: our gradients, in the order of the floating inputs, which may share the memory of the inputs.
    """
    leaves = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    grads = [grad.contiguous() for grad in grads]

    def gradients(leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.autograd.grad(function(*leaves), [t for t in leaves if t.requires_grad], grads)

    def error() -> float:
        exact_leaves = [
            t.detach().double().requires_grad_() if t.requires_grad else t for t in leaves
        ]
        exact = gradients(exact_leaves, [grad.double() for grad in grads])
        return max(relative_error(*pair) for pair in zip(results, exact, strict=True))

    return Case(
        op=op,
        shape=shape,
        calls=calls,
        baseline_run=lambda: gradients(leaves, grads),
        error=error,
        details=details,
    )


def random(dtype: torch.dtype, count: int, *shape: int) -> list[Tensor]:
    """Return `count` tensors of normal values, each of that shape (...,)."""
    return [torch.randn(*shape).to(dtype) for _ in range(count)]


# GPT-2's block --------------------------------------------------------------------------------------------------------------------


def layer_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of y = layer_norm(x) and its gradients. x (rows, h)."""
    x, dy = random(dtype, 2, rows, h)
    weight, bias = random(dtype, 2, h)
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    mean, rstd = torch.empty(2, rows)
    dw, db = torch.zeros(2, h)
    calls = (
        Call("layer_norm", x, weight, bias, y, mean, rstd, EPSILON),
        Call("layer_norm_backward", dy, x, mean, rstd, weight, dx, dw, db),
    )
    return compare(
        "layer_norm",
        (rows, h),
        calls,
        (dx, dw, db),
        lambda x, w, b: F.layer_norm(x, (h,), w, b, EPSILON),
        (x, weight, bias),
        (dy,),
    )


def residual(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of residual + x + bias without dropout, where the gradients of x and residual are dout. x (s, b, h)."""
    x, residual_in, dout = random(dtype, 3, s, b, h)
    (bias,) = random(dtype, 1, h)
    out = torch.empty_like(x)
    dbias = torch.zeros(h)
    calls = (
        Call("bias_dropout_add", x, bias, residual_in, out),
        Call("bias_dropout_add_backward", dout, None, dbias),
    )
    return compare(
        "residual",
        (s, b, h),
        calls,
        (dout, dbias, dout),
        lambda x, bias, residual: residual + (x + bias),
        (x, bias, residual_in),
        (dout,),
    )


def residual_norm(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of sum = residual + x + bias, y = layer_norm(sum), one pass each way, without dropout. x (s, b, h)."""
    x, residual_in, dy, dsum = random(dtype, 4, s, b, h)
    bias, weight, norm_bias = random(dtype, 3, h)
    total, y, dx = (torch.empty_like(x) for _ in range(3))
    mean, rstd = torch.empty(2, s * b)
    dbias, dweight, dnorm = torch.zeros(3, h)
    calls = (
        Call(
            "bias_dropout_add_layer_norm",
            x,
            bias,
            residual_in,
            total,
            weight,
            norm_bias,
            y,
            mean,
            rstd,
            EPSILON,
        ),
        Call(
            "bias_dropout_add_layer_norm_backward",
            dy,
            dsum,
            total,
            mean,
            rstd,
            weight,
            dx,
            None,
            dweight,
            dnorm,
            dbias,
        ),
    )

    def eager(
        x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, norm_bias: Tensor
    ) -> tuple[Tensor, ...]:
        summed = residual + (x + bias)
        return summed, F.layer_norm(summed, (h,), weight, norm_bias, EPSILON)

    return compare(
        "residual_norm",
        (s * b, h),
        calls,
        (dx, dbias, dx, dweight, dnorm),
        eager,
        (x, bias, residual_in, weight, norm_bias),
        (dsum, dy),
    )


def dropout(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of the embedding's dropout, forward; its backward is the same call. x (s, b, h). Torch's mask is another."""
    (x,) = random(dtype, 1, s, b, h)
    out = torch.empty_like(x)
    return Case(
        op="dropout",
        shape=(s, b, h),
        calls=(Call("dropout", x, out, DROPOUT, 1, 2, 0),),
        baseline_run=lambda: F.dropout(x, DROPOUT),
        error=lambda: relative_error(out, (out != 0) * x.double() / (1 - DROPOUT)),
    )


def gelu(rows: int, f: int, dtype: torch.dtype) -> Case:
    """Return the case of gelu(x) in the tanh approximation, which the MLP's backward computes again. x (rows, f)."""
    (x,) = random(dtype, 1, rows, f)
    y = torch.empty_like(x)
    return Case(
        op="gelu",
        shape=(rows, f),
        calls=(Call("activate", x, None, y),),
        baseline_run=lambda: F.gelu(x, approximate="tanh"),
        error=lambda: relative_error(y, F.gelu(x.double(), approximate="tanh")),
    )


def cross_entropy(rows: int, v: int, split: bool) -> Case:
    """Return the case of FP32 logits (rows, v), in every precision.

    split: in the two passes between which ranks of a split vocabulary reduce.
    """
    logits = torch.randn(rows, v)
    labels = torch.randint(v, (rows,))
    dloss = torch.full((rows,), 1 / rows)
    dlogits = torch.empty_like(logits)
    row_max, sum_exp, target_logit = torch.empty(3, rows)
    forward = (
        (
            Call("cross_entropy_max", logits, row_max),
            Call("cross_entropy_sum", logits, row_max, labels, 0, sum_exp, target_logit),
        )
        if split
        else (Call("cross_entropy_forward", logits, labels, row_max, sum_exp, target_logit),)
    )
    calls = (
        *forward,
        Call("cross_entropy_backward", logits, row_max, sum_exp, labels, 0, dloss, dlogits),
    )
    return compare(
        "cross_entropy_tp" if split else "cross_entropy",
        (rows, v),
        calls,
        (dlogits,),
        F.cross_entropy,
        (logits, labels),
        (torch.ones(()),),
        dtype="fp32",
    )


def embedding(rows: int, h: int, v: int, dtype: torch.dtype) -> Case:
    """Return the case of a table (v, h) with an FP32 gradient of all of it.

    Autograd's dense gradient would cost torch far more than index_add_ does.
    """
    tokens = torch.randint(v, (rows,))
    (table,) = random(dtype, 1, v, h)
    (dout,) = random(dtype, 1, rows, h)
    out = torch.empty_like(dout)
    grad = torch.zeros(v, h)
    torch_grad = torch.zeros(v, h)
    calls = Call("embedding", tokens, table, out), Call("embedding_backward", tokens, dout, grad)

    def eager() -> None:
        F.embedding(tokens, table)
        torch_grad.index_add_(0, tokens, dout.float())

    def error() -> float:
        exact = torch.zeros(v, h, dtype=torch.float64).index_add_(0, tokens, dout.double())
        return max(relative_error(grad, exact), float((out - table[tokens]).abs().max()))

    return Case(op="embedding", shape=(rows, h, v), calls=calls, baseline_run=eager, error=error)


def position(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of x (s, b, h) + table (s, h), and the table's FP32 gradient; the gradient of x is dout."""
    x, dout = random(dtype, 2, s, b, h)
    (table,) = random(dtype, 1, s, h)
    out = torch.empty_like(x)
    grad, torch_grad = torch.zeros(2, s, h)
    calls = Call("add_position", x, table, out), Call("add_position_backward", dout, grad)

    def eager() -> None:
        torch.add(x, table.unsqueeze(1))
        torch_grad.add_(dout.sum(1, dtype=torch.float32))

    def error() -> float:
        return max(
            relative_error(grad, dout.double().sum(1)),
            relative_error(out, x.double() + table.double().unsqueeze(1)),
        )

    return Case(op="position", shape=(s, b, h), calls=calls, baseline_run=eager, error=error)


# Blocks of Llama, Mistral and Qwen ------------------------------------------------------------------------------------------------


def eager_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalize x (..., h) and multiply by weight (h,)."""
    single = x.float() if x.dtype != torch.float64 else x
    normed = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + EPSILON)
    return weight * normed.to(x.dtype)


def rms_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of y = rms_norm(x) and its gradients. x (rows, h)."""
    x, dy = random(dtype, 2, rows, h)
    (weight,) = random(dtype, 1, h)
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    rstd = torch.empty(rows)
    dw = torch.zeros(h)
    calls = (
        Call("rms_norm", x, weight, y, rstd, EPSILON),
        Call("rms_norm_backward", dy, x, rstd, weight, dx, dw),
    )
    return compare("rms_norm", (rows, h), calls, (dx, dw), eager_rms_norm, (x, weight), (dy,))


def residual_rms_norm(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """Return the case of sum = residual + x, y = rms_norm(sum), one pass each way, without bias and dropout. x (s, b, h)."""
    x, residual_in, dy, dsum = random(dtype, 4, s, b, h)
    (weight,) = random(dtype, 1, h)
    total, y, dx = (torch.empty_like(x) for _ in range(3))
    rstd = torch.empty(s * b)
    dw = torch.zeros(h)
    calls = (
        Call("bias_dropout_add_rms_norm", x, None, residual_in, total, weight, y, rstd, EPSILON),
        Call(
            "bias_dropout_add_rms_norm_backward", dy, dsum, total, rstd, weight, dx, None, dw, None
        ),
    )

    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        summed = residual + x
        return summed, eager_rms_norm(summed, weight)

    return compare(
        "residual_rms_norm",
        (s * b, h),
        calls,
        (dx, dx, dw),
        eager,
        (x, residual_in, weight),
        (dsum, dy),
    )


def swiglu(rows: int, f: int, dtype: torch.dtype) -> Case:
    """Return the case of silu(gate) up and its gradients, which take the memory of gate and up, as in the trainer. gate and up (rows, f).

    With small values and gradients of 2 or -2 what is left there after each round is about as large as before.
    """
    x = (0.01 * torch.randn(rows, 2, f)).to(dtype)
    dy = torch.randn(rows, f).sign().mul_(2).to(dtype)
    calls = Call("gate", x, torch.empty_like(dy)), Call("gate_backward", dy, x, x)
    return compare(
        "swiglu",
        (rows, f),
        calls,
        x.unbind(1),
        lambda gate, up: F.silu(gate) * up,
        x.unbind(1),
        (dy,),
    )


@dataclass(frozen=True)
class Heads:
    """Queries and keys of one rank: n heads in g groups, of d columns each."""

    heads: int
    groups: int
    d: int

    @classmethod
    def of(cls, model: ModelConfig, tp: int) -> Heads:
        """Return the heads of one of tp ranks."""
        return cls(model.num_attention_heads // tp, model.query_groups // tp, model.kv_channels)

    @property
    def queries(self) -> int:
        """Queries of a group."""
        return self.heads // self.groups

    def random(self, s: int, b: int, dtype: torch.dtype) -> Tensor:
        """Return (s, b, g (n/g + 2), d), as the kernels take it."""
        return torch.randn(s, b, self.groups * (self.queries + 2), self.d).to(dtype)

    def parts(self, x: Tensor) -> list[Tensor]:
        """Return the views of the queries (s, b, g, n/g, d) and keys (s, b, g, 1, d) of x."""
        return list(x.unflatten(2, (self.groups, -1)).split((self.queries, 1, 1), 3)[:2])


def angles(s: int, d: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines (s, d / 2) of the positions 0 to s - 1."""
    turns = torch.outer(torch.arange(s), ROTARY_BASE ** (-torch.arange(0, d, 2) / d))
    return turns.cos(), turns.sin()


def turned(x: Tensor, turns: Sequence[Tensor]) -> Tensor:
    """Rotate columns i and i + d / 2 of x (s, b, g, k, d) by cosines and sines (s, d), which have each angle twice."""
    first, second = x.chunk(2, -1)
    cos, sin = (t.to(x.dtype)[:, None, None, None] for t in turns)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotary(s: int, b: int, heads: Heads, dtype: torch.dtype) -> Case:
    """Return the case of rotated queries and keys, and their gradients. The kernels take them next to the values, which they copy."""
    x = heads.random(s, b, dtype)
    dy = heads.random(s, b, dtype)
    turns = angles(s, heads.d)
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    twice = [t.repeat(1, 2) for t in turns]
    calls = (
        Call("rotary", x, *turns, y, heads.queries),
        Call("rotary", dy, *turns, dx, heads.queries, inverse=True),
    )
    return compare(
        "rotary",
        (s, b, heads.heads, heads.d),
        calls,
        heads.parts(dx),
        lambda q, k: (turned(q, twice), turned(k, twice)),
        heads.parts(x),
        heads.parts(dy),
    )


def rotary_norm(s: int, b: int, heads: Heads, dtype: torch.dtype) -> Case:
    """Return the case of `rotary` after an RMS norm of each query and key (Qwen3)."""
    x = heads.random(s, b, dtype)
    dy = heads.random(s, b, dtype)
    turns = angles(s, heads.d)
    y = torch.empty_like(x)
    dx = torch.empty_like(x)
    weights = random(dtype, 2, heads.d)
    sums = list(torch.zeros(2, heads.d))
    twice = [t.repeat(1, 2) for t in turns]
    calls = (
        Call("rotary_norm", x, *weights, *turns, y, heads.queries, EPSILON),
        Call("rotary_norm_backward", dy, x, *weights, *turns, dx, *sums, heads.queries, EPSILON),
    )

    def eager(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        return turned(eager_rms_norm(q, q_weight), twice), turned(
            eager_rms_norm(k, k_weight), twice
        )

    return compare(
        "rotary_norm",
        (s, b, heads.heads, heads.d),
        calls,
        (*heads.parts(dx), *sums),
        eager,
        (*heads.parts(x), *weights),
        heads.parts(dy),
    )


# The update -----------------------------------------------------------------------------------------------------------------------


def update(n: int, dtype: torch.dtype) -> Iterator[Case]:
    """Yield reductions of n FP32 gradients, sums over 4 ranks' parts as inside a node or of BF16 gradients, and AdamW."""
    fp32 = {"shape": (n,), "details": {"dtype": "fp32"}}
    grad = torch.randn(n)
    signs = torch.randint(-1, 2, (n,)).float()
    norm = Call("squared_norm", grad)
    zeros = Call("count_zeros", signs)
    yield Case(
        op="squared_norm",
        calls=(norm,),
        baseline_run=lambda: torch.linalg.vector_norm(grad),
        error=lambda: abs(norm.run() / float(grad.double().square().sum()) - 1),
        **fp32,
    )
    yield Case(
        op="count_zeros",
        calls=(zeros,),
        baseline_run=lambda: torch.count_nonzero(signs),
        error=lambda: abs(zeros.run() + int(torch.count_nonzero(signs)) - n) / n,
        **fp32,
    )
    (parts,) = random(dtype, 1, 4, n // 4)
    out = torch.empty(n // 4, dtype=dtype)
    yield Case(
        op="sum_rows",
        shape=(4, n // 4),
        calls=(Call("sum_rows", parts, out),),
        baseline_run=lambda: torch.sum(parts, 0, dtype=torch.float32).to(dtype),
        error=lambda: relative_error(out, parts.double().sum(0)),
    )
    yield adamw(n)


def adamw(n: int) -> Case:
    """Return the case of one update of FP32 master weights: three streams read and written, the gradient read."""
    param = torch.randn(n)
    grad = torch.randn(n)
    m = torch.zeros(n)
    v = torch.zeros(n)
    torch_param = param.clone().requires_grad_()
    exact = param[: 1 << 16].double().requires_grad_()
    torch_param.grad = grad.clone()
    exact.grad = grad[: 1 << 16].double()
    optimizer = torch.optim.AdamW([torch_param], betas=BETAS, fused=True, **ADAMW)

    def error() -> float:
        """Return the error of the first step, on part of the buffer."""
        torch.optim.AdamW([exact], betas=BETAS, **ADAMW).step()
        return relative_error(param[: 1 << 16], exact.detach())

    call = Call(
        "adamw", param, grad, m, v, ADAMW["lr"], *BETAS, ADAMW["eps"], ADAMW["weight_decay"], 1
    )
    return Case(
        op="adamw",
        shape=(n,),
        calls=(call,),
        baseline="torch fused",
        baseline_run=optimizer.step,
        error=error,
        details={"dtype": "fp32"},
    )


measure, text = driver.family(cases)
