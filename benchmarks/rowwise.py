"""Row-wise and pointwise kernels and AdamW, forward and backward, against torch's eager operations.

Shapes are those of `run.accounting` on one tensor-parallel rank. Ours writes into tensors made once, as the trainer does;
torch makes its own, in the same tuned memory. AdamW's rival is torch.optim.AdamW(fused=True); axpy shows what updates in place can
reach. These operations are bound by memory: rates are bytes that must move over time, beside the triad of the same run.

    python -m benchmarks rowwise --recipe 124m --micro-batch-size 4 [--dtype bf16]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.host import kernels
from fugaku_megatron.run import accounting

from .driver import DTYPES, Case
from .shapes import add_arguments, run_of

__all__ = ["add_arguments", "cases"]
ADAMW_ELEMENTS = 30_000_000  # 480 MB in four buffers: far beyond any cache; a model with fewer parameters has its own
EPSILON = 1e-5
Eager = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Every operation of a layer and the head, then the update."""
    run, tp, dtype = run_of(options), options.tensor_model_parallel_size, DTYPES[options.dtype]
    model = run.model
    rows, h, f = model.seq_length * options.micro_batch_size, model.hidden_size, model.ffn_hidden_size // tp
    v = accounting.padded_vocab_size(model, tp) // tp
    torch.manual_seed(0)
    yield layer_norm(rows, h, dtype)
    yield residual_norm(rows, h, dtype)
    yield gelu(rows, f, dtype)
    yield cross_entropy(rows, v)
    yield embedding(rows, h, v, dtype)
    elements = min(ADAMW_ELEMENTS, accounting.stage_parameters(run, accounting.Layout(tp, tp, 1, 1), 0))
    yield adamw(elements)
    yield axpy(elements)


def gradients(function: Eager, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Forward and backward by autograd; gradients of all floating inputs."""
    leaves = [t for t in inputs if t.requires_grad]
    return list(torch.autograd.grad(function(inputs), leaves, grads))


def compare(op: str, shape: tuple[int, ...], ours: Callable[[], None], results: Sequence[Tensor], function: Eager,
            inputs: Sequence[Tensor], grads: Sequence[Tensor], moved: float, **details: str) -> Case:
    """A case whose rival is `function` forward and backward; `results`: our gradients, in the order of the leaves."""
    def leaves(dtype: torch.dtype | None) -> list[Tensor]:
        made = [t.to(dtype or t.dtype) if t.is_floating_point() else t for t in inputs]
        return [t.detach().clone().requires_grad_(t.is_floating_point()) for t in made]

    theirs = leaves(None)

    def error() -> float:
        for sums in results:
            if sums.dim() == 1:  # sums over rows are added to
                sums.zero_()
        ours()
        exact = gradients(function, leaves(torch.float64), [g.double() for g in grads])
        return max(float((got.double() - right).abs().max() / right.abs().max()) for got, right in zip(results, exact, strict=True))

    return Case(op=op, shape=shape, run=ours, rival="torch", rival_run=lambda: gradients(function, theirs, grads), error=error,
                moved_bytes=moved, details=details)


def layer_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """x and dy are read, y and dx written, x read again."""
    x, dy = (torch.randn(rows, h).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(h).to(dtype) for _ in range(2))
    y, dx, mean, rstd = torch.empty_like(x), torch.empty_like(x), torch.empty(rows), torch.empty(rows)
    dw, db = torch.zeros(h), torch.zeros(h)

    def ours() -> None:
        kernels.layer_norm(x, weight, bias, y, mean, rstd, EPSILON)
        kernels.layer_norm_backward(dy, x, mean, rstd, weight, dx, dw, db)

    return compare("layer_norm", (rows, h), ours, (dx, dw, db), lambda t: (F.layer_norm(t[0], (h,), t[1], t[2], EPSILON),),
                   (x, weight, bias), (dy,), 5 * x.nbytes)


def residual_norm(rows: int, h: int, dtype: torch.dtype) -> Case:
    """sum = residual + x + bias, y = layer_norm(sum), one pass each way, without dropout."""
    x, residual, dy, dsum = (torch.randn(rows, 1, h).to(dtype) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(h).to(dtype) for _ in range(3))
    total, y, dx = (torch.empty_like(x) for _ in range(3))
    mean, rstd, dbias, dweight, dnorm = torch.empty(rows), torch.empty(rows), *(torch.zeros(h) for _ in range(3))

    def ours() -> None:
        kernels.bias_dropout_add_layer_norm(x, bias, residual, total, weight, norm_bias, y, mean, rstd, EPSILON)
        kernels.bias_dropout_add_layer_norm_backward(dy, dsum, total, mean, rstd, weight, dx, None, dweight, dnorm, dbias)

    def eager(t: Sequence[Tensor]) -> tuple[Tensor, ...]:
        summed = t[2] + (t[0] + t[1])
        return summed, F.layer_norm(summed, (h,), t[3], t[4], EPSILON)

    return compare("residual_norm", (rows, h), ours, (dx, dbias, dx, dweight, dnorm), eager, (x, bias, residual, weight, norm_bias),
                   (dsum, dy), 8 * x.nbytes)


def gelu(rows: int, f: int, dtype: torch.dtype) -> Case:
    """gelu(x + bias) in the tanh approximation."""
    x, dy, bias = torch.randn(rows, f).to(dtype), torch.randn(rows, f).to(dtype), torch.randn(f).to(dtype)
    y, dx, db = torch.empty_like(x), torch.empty_like(x), torch.zeros(f)

    def ours() -> None:
        kernels.gelu(x, bias, y)
        kernels.gelu_backward(dy, x, bias, dx, db)

    return compare("bias_gelu", (rows, f), ours, (dx, db), lambda t: (F.gelu(t[0] + t[1], approximate="tanh"),), (x, bias), (dy,),
                   5 * x.nbytes)


def cross_entropy(rows: int, v: int) -> Case:
    """Of FP32 logits, in every precision."""
    logits, labels, dloss = torch.randn(rows, v), torch.randint(v, (rows,)), torch.full((rows,), 1 / rows)
    dlogits, (top, total, target) = torch.empty_like(logits), torch.empty(3, rows)

    def ours() -> None:
        kernels.cross_entropy_forward(logits, labels, top, total, target)
        kernels.cross_entropy_backward(logits, top, total, labels, 0, dloss, dlogits)

    return compare("cross_entropy", (rows, v), ours, (dlogits,), lambda t: (F.cross_entropy(t[0], t[1]),), (logits, labels),
                   (torch.ones(()),), 3 * logits.nbytes, dtype="fp32")


def embedding(rows: int, h: int, v: int, dtype: torch.dtype) -> Case:
    """Into an FP32 gradient of the whole table; autograd's dense one would cost torch far more than index_add_ does."""
    tokens, table, dout = torch.randint(v, (rows,)), torch.randn(v, h).to(dtype), torch.randn(rows, h).to(dtype)
    out, grad, rival_grad = torch.empty_like(dout), torch.zeros(v, h), torch.zeros(v, h)

    def ours() -> None:
        kernels.embedding(tokens, table, out)
        kernels.embedding_backward(tokens, dout, grad)

    def eager() -> None:
        F.embedding(tokens, table)
        rival_grad.index_add_(0, tokens, dout.float())

    def error() -> float:
        grad.zero_()
        ours()
        exact = torch.zeros(v, h, dtype=torch.float64).index_add_(0, tokens, dout.double())
        return max(float((grad - exact).abs().max() / exact.abs().max()), float((out - table[tokens]).abs().max()))

    return Case(op="embedding", shape=(rows, h, v), run=ours, rival="torch", rival_run=eager, error=error,
                moved_bytes=3 * dout.nbytes + 2 * rows * h * grad.element_size())


def adamw(n: int) -> Case:
    """One update of FP32 master weights: three streams read and written, the gradient read."""
    param, grad, m, v = torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n)
    rival = param.clone().requires_grad_()
    rival.grad = grad.clone()
    optimizer = torch.optim.AdamW([rival], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)

    def error() -> float:
        """Of a fresh first step on part of the buffer."""
        part = torch.randn(2, min(n, 1 << 16))
        values, exact = part[0].clone(), part[0].double().requires_grad_()
        kernels.adamw(values, part[1], torch.zeros_like(values), torch.zeros_like(values), 1e-4, 0.9, 0.999, 1e-8, 0.01, 1)
        exact.grad = part[1].double()
        torch.optim.AdamW([exact], lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01).step()
        return float((values - exact.detach()).abs().max() / exact.detach().abs().max())

    return Case(op="adamw", shape=(n,), run=lambda: kernels.adamw(param, grad, m, v, 1e-4, 0.9, 0.999, 1e-8, 0.01, 1),
                rival="torch fused", rival_run=optimizer.step, error=error, moved_bytes=7 * param.nbytes,
                details={"dtype": "fp32"})


def axpy(n: int) -> Case:
    """y += alpha x: the bandwidth of an update in place."""
    x, y, rival_y = (torch.randn(n) for _ in range(3))

    def error() -> float:
        before = y.double()
        kernels.axpy(1e-6, x, y)
        return float((y - (before + 1e-6 * x.double())).abs().max() / before.abs().max())

    return Case(op="axpy", shape=(n,), run=lambda: kernels.axpy(1e-6, x, y), rival="torch",
                rival_run=lambda: rival_y.add_(x, alpha=1e-6), error=error, moved_bytes=3 * x.nbytes, details={"dtype": "fp32"})
