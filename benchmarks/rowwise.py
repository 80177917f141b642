"""Row-wise and pointwise kernels against torch's eager operations, forward + backward, at the shapes of the recipes.

    python -m benchmarks.rowwise [--threads 2] [--repeat 15] [--cases layer_norm gelu ...]
    python -m benchmarks.rowwise --cpu-time        one thread and its CPU time: for a machine with other work on it

Both sides are timed in turn in one process; medians. Ours writes into tensors made once, outside the timing, as the trainer
does. torch makes its own, and is timed twice: with glibc's defaults, which give every large tensor back to the kernel and
fault it in again, and after mallopt has told glibc to keep memory. Left out: half precision, other machines' shapes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from fugaku_megatron import accounting, kernels, recipes

Timed = Callable[[], object]
SETTINGS = (("124M, micro-batch 1", recipes.gpt_124m, 1, 1), ("124M, micro-batch 4", recipes.gpt_124m, 4, 1),
            ("30B, TP 4", recipes.gpt_30b, 1, 4))
ADAMW_ELEMENTS = 30_000_000  # 480 MB in four buffers: far beyond any cache


def keep_memory() -> None:
    """Tell glibc to take large blocks from the heap and never to give it back."""
    libc = ctypes.CDLL(None)
    m_trim_threshold, m_mmap_max = -1, -4
    if not (libc.mallopt(m_mmap_max, 0) and libc.mallopt(m_trim_threshold, 2**31 - 1)):
        raise RuntimeError("mallopt refused: this C library cannot be told to keep memory")


def layer_norm(rows: int, h: int) -> tuple[Timed, Timed, int]:
    x, dy, weight, bias = torch.randn(rows, h), torch.randn(rows, h), torch.randn(h), torch.randn(h)
    y, dx, mean, rstd, dw, db = (torch.empty(rows, h), torch.empty(rows, h), torch.empty(rows), torch.empty(rows),
                                 torch.zeros(h), torch.zeros(h))

    def ours() -> None:
        kernels.layer_norm(x, weight, bias, y, mean, rstd, 1e-5)
        kernels.layer_norm_backward(dy, x, mean, rstd, weight, dx, dw, db)

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    return ours, lambda: torch.autograd.grad(F.layer_norm(leaves[0], (h,), *leaves[1:]), leaves, dy), 5 * 4 * rows * h


def residual_norm(rows: int, h: int, p: float = 0.1) -> tuple[Timed, Timed, int]:
    x, residual, dy, dsum = (torch.randn(rows, 1, h) for _ in range(4))
    bias, weight, norm_bias = (torch.randn(h) for _ in range(3))
    total, y, dresidual, dx = (torch.empty(rows, 1, h) for _ in range(4))
    mean, rstd, sums = torch.empty(rows), torch.empty(rows), [torch.zeros(h) for _ in range(3)]

    def ours() -> None:
        kernels.bias_dropout_add_layer_norm(x, bias, residual, total, weight, norm_bias, y, mean, rstd, 1e-5, p, 1)
        kernels.bias_dropout_add_layer_norm_backward(dy, dsum, total, mean, rstd, weight, dresidual, dx, *sums, p, 1)

    leaves = [t.clone().requires_grad_() for t in (x, bias, residual, weight, norm_bias)]

    def eager() -> None:
        r = leaves[2] + F.dropout(leaves[0] + leaves[1], p)
        torch.autograd.grad((r, F.layer_norm(r, (h,), *leaves[3:])), leaves, (dsum, dy))

    return ours, eager, 9 * 4 * rows * h


def gelu(rows: int, f: int) -> tuple[Timed, Timed, int]:
    x, dy, bias = torch.randn(rows, f), torch.randn(rows, f), torch.randn(f)
    y, dx, db = torch.empty(rows, f), torch.empty(rows, f), torch.zeros(f)

    def ours() -> None:
        kernels.gelu(x, bias, y)
        kernels.gelu_backward(dy, x, bias, dx, db)

    leaves = [t.clone().requires_grad_() for t in (x, bias)]
    return ours, lambda: torch.autograd.grad(F.gelu(leaves[0] + leaves[1], approximate="tanh"), leaves, dy), 5 * 4 * rows * f


def cross_entropy(rows: int, v: int) -> tuple[Timed, Timed, int]:
    logits, labels, dloss = torch.randn(rows, v), torch.randint(v, (rows,)), torch.full((rows,), 1 / rows)
    dlogits, (top, sum_exp, target) = torch.empty(rows, v), (torch.empty(rows) for _ in range(3))

    def ours() -> None:
        kernels.cross_entropy_forward(logits, labels, top, sum_exp, target)
        kernels.cross_entropy_backward(logits, top, sum_exp, labels, 0, dloss, dlogits)

    leaf = logits.clone().requires_grad_()
    return ours, lambda: torch.autograd.grad(F.cross_entropy(leaf, labels), leaf), 3 * 4 * rows * v


def adamw(n: int) -> tuple[Timed, Timed, int]:
    param, grad, m, v = torch.randn(n), torch.randn(n), torch.zeros(n), torch.zeros(n)
    rival = param.clone().requires_grad_()
    rival.grad = grad.clone()
    optimizer = torch.optim.AdamW([rival], lr=1e-4, fused=True)
    return lambda: kernels.adamw(param, grad, m, v, 1e-4, 0.9, 0.999, 1e-8, 0.01, 1), optimizer.step, 7 * 4 * n


def axpy(n: int) -> tuple[Timed, Timed, int]:
    """The bandwidth of in-place updates: what AdamW can reach at best."""
    x, y = torch.randn(n), torch.randn(n)
    return lambda: kernels.axpy(1e-6, x, y), lambda: y.add_(x, alpha=1e-6), 3 * 4 * n


def embedding(rows: int, h: int, v: int) -> tuple[Timed, Timed, int]:
    tokens, table, dout = torch.randint(v, (rows,)), torch.randn(v, h), torch.randn(rows, h)
    out, grad = torch.empty(rows, h), torch.zeros(v, h)

    def ours() -> None:
        kernels.embedding(tokens, table, out)
        kernels.embedding_backward(tokens, dout, grad)

    def eager() -> None:  # into the same kind of buffer; autograd's dense gradient of the whole table would cost far more
        F.embedding(tokens, table)
        grad.index_add_(0, tokens, dout)

    return ours, eager, 5 * 4 * rows * h


def cases() -> Iterator[tuple[str, str, str, Callable[[], tuple[Timed, Timed, int]]]]:
    """(kernel, setting, shape, maker of (ours, torch's, bytes that must move))."""
    for setting, recipe, b, tp in SETTINGS:
        model = recipe().model
        rows, h, f = model.seq_length * b, model.hidden_size, model.ffn_hidden_size // tp
        v = accounting.padded_vocab_size(model, tp) // tp
        for name, make, shape in (("layer_norm", layer_norm, (rows, h)), ("residual_norm", residual_norm, (rows, h)),
                                  ("gelu", gelu, (rows, f)), ("cross_entropy", cross_entropy, (rows, v)),
                                  ("embedding", embedding, (rows, h, v))):
            yield name, setting, "x".join(map(str, shape)), lambda make=make, shape=shape: make(*shape)
    for name, make in (("adamw", adamw), ("axpy", axpy)):
        yield name, "flat buffer", str(ADAMW_ELEMENTS), lambda make=make: make(ADAMW_ELEMENTS)


def turns(functions: tuple[Timed, ...], repeat: int, clock: Callable[[], float], seconds: float = 1.5) -> list[list[float]]:
    """Seconds of each call, the functions called in turn; fewer turns than `repeat` once `seconds` have passed, never below 3."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    start = time.perf_counter()
    for turn in range(repeat):
        if turn >= 3 and time.perf_counter() - start > seconds:
            break
        for function, taken in zip(functions, times, strict=True):
            begin = clock()
            function()
            taken.append(clock() - begin)
    return times


def rows(repeat: int = 15, names: list[str] | None = None,
         clock: Callable[[], float] = time.perf_counter) -> Iterator[dict[str, object]]:
    """One row per kernel and shape, first with glibc's defaults, then with memory kept: medians of ours and of torch's in ms, their
    ratio, the ratio of the two shortest times (which other work on the machine disturbs least), GB/s of our shortest."""
    for memory in ("glibc defaults", "memory kept"):
        if memory == "memory kept":
            keep_memory()
        for name, setting, shape, make in cases():
            if names and name not in names:
                continue
            ours, eager, moved = make()
            mine, rival = turns((ours, eager), repeat, clock)
            median = statistics.median(mine), statistics.median(rival)
            yield {"kernel": name, "setting": setting, "shape": shape, "memory": memory, "ours ms": median[0] * 1e3,
                   "torch ms": median[1] * 1e3, "torch / ours": median[1] / median[0], "shortest": min(rival) / min(mine),
                   "ours GB/s": moved / min(mine) / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--cases", nargs="*")
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args()
    threads = 1 if options.cpu_time else options.threads
    clock = time.thread_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(threads)
    # torch's backward of a CPU graph runs on the calling thread, so its CPU time is counted too.
    print(f"target {kernels.active()}, {threads} threads, {clock.__name__}, torch {torch.__version__}")
    for i, row in enumerate(rows(options.repeat, options.cases, clock)):
        if i == 0:
            print("  ".join(f"{name:>{12 if isinstance(value, float) else 19}}" for name, value in row.items()))
        print("  ".join(f"{value:12.2f}" if isinstance(value, float) else f"{value:>19}" for value in row.values()), flush=True)


if __name__ == "__main__":
    main()
