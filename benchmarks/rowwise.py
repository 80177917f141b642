"""Kernels on rows, AdamW and the reductions of an update against torch's eager operations, forward and backward.

They are the kernels that the trainer calls, on shapes of `costs.accounting` for one tensor-parallel rank. Ours write into tensors
made once, as the trainer does; torch makes its own, in the same tuned memory. AdamW's baseline is torch.optim.AdamW(fused=True).
These operations are bound by memory: rates are bytes that must move over time, beside the triad of the same run.
Left out: GELU with its bias and its derivative, which the trainer computes inside the products (gemm.py times the products).

    python -m benchmarks rowwise --recipe 124m --micro-batch-size 4 [--dtype bf16]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.layout import Layout
from fugaku_megatron.costs import accounting

from . import rowwise_blocks
from .driver import DTYPES, Call, Case
from .eager import EPSILON, EagerPass, compare, relative_error
from .shapes import add_arguments, run_of

__all__ = ["add_arguments", "cases"]
UPDATE_ELEMENTS = 30_000_000  # 480 MB in AdamW's four buffers: far beyond any cache; a model with fewer parameters has its own
DROPOUT = 0.1
ADAMW = {"lr": 1e-4, "eps": 1e-8, "weight_decay": 0.01}
BETAS = (0.9, 0.999)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every operation of a layer and the head, then the update."""
    run, tp, dtype = run_of(options), options.tensor_model_parallel_size, DTYPES[options.dtype]
    model = run.model
    s, b, h, f = model.seq_length, options.micro_batch_size, model.hidden_size, model.ffn_hidden_size // tp
    v = accounting.padded_vocab_size(model, tp) // tp
    torch.manual_seed(0)
    yield layer_norm(s * b, h, dtype)
    yield residual(s, b, h, dtype)
    yield residual_norm(s, b, h, dtype)
    yield from rowwise_blocks.cases(model, s, b, tp, dtype)
    yield dropout(s, b, h, dtype)
    yield gelu(s * b, f, dtype)
    yield cross_entropy(s * b, v, split=False)
    yield cross_entropy(s * b, v, split=True)
    yield embedding(s * b, h, v, dtype)
    yield position(s, b, h, dtype)
    elements = min(UPDATE_ELEMENTS, accounting.stage_parameters(run, Layout(tp, tp, 1, 1), 0))
    yield squared_norm(elements)
    yield count_zeros(elements)
    yield sum_rows(4, elements // 4, dtype)
    yield adamw(elements)


def layer_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """y = layer_norm(x) and its gradients. x (rows, h)."""
    x, dy = (torch.randn(rows, h).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(h).to(dtype) for _ in range(2))
    y, dx, mean, rstd = torch.empty_like(x), torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    dw, db = torch.zeros(h), torch.zeros(h)
    calls = (Call("layer_norm", x, weight, bias, y, mean, rstd, EPSILON),
             Call("layer_norm_backward", dy, x, mean, rstd, weight, dx, dw, db))
    eager = EagerPass(lambda t: (F.layer_norm(t[0], (h,), t[1], t[2], EPSILON),), (x, weight, bias), (dy,))
    return compare("layer_norm", (rows, h), calls, (dx, dw, db), eager)


def residual(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """residual + x + bias without dropout, where the gradients of x and residual are dout. x (s, b, h)."""
    x, residual_in, dout = (torch.randn(s, b, h).to(dtype) for _ in range(3))
    bias, out, dbias = torch.randn(h).to(dtype), torch.empty_like(x), torch.zeros(h)
    calls = (Call("bias_dropout_add", x, bias, residual_in, out), Call("bias_dropout_add_backward", dout, None, dbias))
    eager = EagerPass(lambda t: (t[2] + (t[0] + t[1]),), (x, bias, residual_in), (dout,))
    return compare("residual", (s, b, h), calls, (dout, dbias, dout), eager)


def residual_norm(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """sum = residual + x + bias, y = layer_norm(sum), one pass each way, without dropout. x (s, b, h)."""
    x, residual_in, dy, dsum = (torch.randn(s, b, h).to(dtype) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(h).to(dtype) for _ in range(3))
    total, y, dx = (torch.empty_like(x) for _ in range(3))
    mean, rstd, dbias, dweight, dnorm = torch.empty(s * b), torch.empty(s * b), *(torch.zeros(h) for _ in range(3))
    calls = (Call("bias_dropout_add_layer_norm", x, bias, residual_in, total, weight, norm_bias, y, mean, rstd, EPSILON),
             Call("bias_dropout_add_layer_norm_backward", dy, dsum, total, mean, rstd, weight, dx, None, dweight, dnorm, dbias))

    def function(t: Sequence[Tensor]) -> tuple[Tensor, ...]:
        summed = t[2] + (t[0] + t[1])
        return summed, F.layer_norm(summed, (h,), t[3], t[4], EPSILON)

    eager = EagerPass(function, (x, bias, residual_in, weight, norm_bias), (dsum, dy))
    return compare("residual_norm", (s * b, h), calls, (dx, dbias, dx, dweight, dnorm), eager)


def dropout(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """The embedding's dropout, forward; its backward is the same call. x (s, b, h). Torch's mask is another."""
    x = torch.randn(s, b, h).to(dtype)
    out = torch.empty_like(x)

    def error() -> float:
        return relative_error(out, (out != 0) * x.double() / (1 - DROPOUT))

    return Case(op="dropout", shape=(s, b, h), calls=(Call("dropout", x, out, DROPOUT, 1, 2, 0),), baseline="torch",
                baseline_run=lambda: F.dropout(x, DROPOUT), error=error)


def gelu(rows: int, f: int, dtype: torch.dtype) -> Case:
    """gelu(x) in the tanh approximation, which the MLP's backward computes again. x (rows, f)."""
    x = torch.randn(rows, f).to(dtype)
    y = torch.empty_like(x)
    return Case(op="gelu", shape=(rows, f), calls=(Call("gelu", x, None, y),), baseline="torch",
                baseline_run=lambda: F.gelu(x, approximate="tanh"),
                error=lambda: relative_error(y, F.gelu(x.double(), approximate="tanh")))


def cross_entropy(rows: int, v: int, split: bool) -> Case:
    """Of FP32 logits (rows, v), in every precision; split: in the two passes between which ranks of a split vocabulary reduce."""
    logits, labels, dloss = torch.randn(rows, v), torch.randint(v, (rows,)), torch.full((rows,), 1 / rows)
    dlogits, (row_max, sum_exp, target_logit) = torch.empty_like(logits), torch.empty(3, rows)
    forward = (Call("cross_entropy_max", logits, row_max),
               Call("cross_entropy_sum", logits, row_max, labels, 0, sum_exp, target_logit)) if split else (
               Call("cross_entropy_forward", logits, labels, row_max, sum_exp, target_logit),)
    calls = (*forward, Call("cross_entropy_backward", logits, row_max, sum_exp, labels, 0, dloss, dlogits))
    eager = EagerPass(lambda t: (F.cross_entropy(t[0], t[1]),), (logits, labels), (torch.ones(()),))
    return compare("cross_entropy_tp" if split else "cross_entropy", (rows, v), calls, (dlogits,), eager, dtype="fp32")


def embedding(rows: int, h: int, v: int, dtype: torch.dtype) -> Case:
    """Of a table (v, h) into an FP32 gradient of all of it; autograd's dense one would cost torch far more than index_add_ does."""
    tokens, table, dout = torch.randint(v, (rows,)), torch.randn(v, h).to(dtype), torch.randn(rows, h).to(dtype)
    out, grad, torch_grad = torch.empty_like(dout), torch.zeros(v, h), torch.zeros(v, h)
    calls = Call("embedding", tokens, table, out), Call("embedding_backward", tokens, dout, grad)

    def eager() -> None:
        F.embedding(tokens, table)
        torch_grad.index_add_(0, tokens, dout.float())

    def error() -> float:
        grad.zero_()
        calls[1].run()
        exact = torch.zeros(v, h, dtype=torch.float64).index_add_(0, tokens, dout.double())
        return max(relative_error(grad, exact), float((out - table[tokens]).abs().max()))

    return Case(op="embedding", shape=(rows, h, v), calls=calls, baseline="torch", baseline_run=eager, error=error)


def position(s: int, b: int, h: int, dtype: torch.dtype) -> Case:
    """x (s, b, h) + table (s, h), and the table's FP32 gradient; that of x is dout."""
    x, dout, table = torch.randn(s, b, h).to(dtype), torch.randn(s, b, h).to(dtype), torch.randn(s, h).to(dtype)
    out, grad, torch_grad = torch.empty_like(x), torch.zeros(s, h), torch.zeros(s, h)
    calls = Call("add_position", x, table, out), Call("add_position_backward", dout, grad)

    def eager() -> None:
        torch.add(x, table.unsqueeze(1))
        torch_grad.add_(dout.sum(1, dtype=torch.float32))

    def error() -> float:
        grad.zero_()
        calls[1].run()
        return max(relative_error(grad, dout.double().sum(1)), relative_error(out, x.double() + table.double().unsqueeze(1)))

    return Case(op="position", shape=(s, b, h), calls=calls, baseline="torch", baseline_run=eager, error=error)


def squared_norm(n: int) -> Case:
    """Of an FP32 gradient: what clipping begins with."""
    grad = torch.randn(n)
    call = Call("squared_norm", grad)
    return Case(op="squared_norm", shape=(n,), calls=(call,), baseline="torch", baseline_run=lambda: torch.linalg.vector_norm(grad),
                error=lambda: abs(call.run() / float(grad.double().square().sum()) - 1), details={"dtype": "fp32"})


def count_zeros(n: int) -> Case:
    """Of an FP32 gradient: --log-num-zeros-in-grad."""
    grad = torch.randint(-1, 2, (n,)).float()
    call = Call("count_zeros", grad)
    return Case(op="count_zeros", shape=(n,), calls=(call,), baseline="torch", baseline_run=lambda: torch.count_nonzero(grad),
                error=lambda: abs(call.run() + int(torch.count_nonzero(grad)) - n) / n, details={"dtype": "fp32"})


def sum_rows(rows: int, n: int, dtype: torch.dtype) -> Case:
    """Parts of `rows` ranks, summed in FP32: what a reduction inside a node, or of BF16 gradients, computes."""
    parts, out = torch.randn(rows, n).to(dtype), torch.empty(n, dtype=dtype)
    call = Call("sum_rows", parts, out)

    def error() -> float:
        call.run()
        return relative_error(out, parts.double().sum(0))

    return Case(op="sum_rows", shape=(rows, n), calls=(call,), baseline="torch",
                baseline_run=lambda: torch.sum(parts, 0, dtype=torch.float32).to(dtype), error=error)


def adamw(n: int) -> Case:
    """One update of FP32 master weights: three streams read and written, the gradient read."""
    param, grad, m, v = torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n)
    torch_param = param.clone().requires_grad_()
    torch_param.grad = grad.clone()
    optimizer = torch.optim.AdamW([torch_param], betas=BETAS, fused=True, **ADAMW)

    def error() -> float:
        """Of a fresh first step on part of the buffer."""
        part = torch.randn(2, min(n, 1 << 16))
        values, exact = part[0].clone(), part[0].double().requires_grad_()
        adamw_call(values, part[1], torch.zeros_like(values), torch.zeros_like(values)).run()
        exact.grad = part[1].double()
        torch.optim.AdamW([exact], betas=BETAS, **ADAMW).step()
        return relative_error(values, exact.detach())

    return Case(op="adamw", shape=(n,), calls=(adamw_call(param, grad, m, v),), baseline="torch fused", baseline_run=optimizer.step,
                error=error, details={"dtype": "fp32"})


def adamw_call(*tensors: Tensor) -> Call:
    """The first step on param, grad, exp_avg and exp_avg_sq, (n) each."""
    return Call("adamw", *tensors, ADAMW["lr"], *BETAS, ADAMW["eps"], ADAMW["weight_decay"], 1)
