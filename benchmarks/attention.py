"""Causal attention, forward and backward, against torch's scaled_dot_product_attention, in turn in one process.

    python -m benchmarks.attention [--threads 2] [--repeat 9] [--dropout 0.1]

Rates count the causal products once: forward 2 * 2 * s * (s / 2) * d per head, backward 2.5 times that. Both sides read and write
Megatron's fused (s, b, heads * 3 * d) tensors: torch's side works on (b, heads, s, d) views of it.
Left out: the projections around attention.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from fugaku_megatron import kernels

# heads, s, d: GPT-2 124M and the sizes of larger models
SHAPES = [(12, 1024, 64), (14, 2048, 128), (12, 1024, 80), (8, 1024, 96)]
DTYPES = [torch.float32, torch.bfloat16]


def seconds(functions: list[Callable[[], None]], repeat: int) -> list[float]:
    """Median seconds of each function, called in turn `repeat` times after one warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    for _ in range(repeat):
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in times]


def ours(qkv: torch.Tensor, heads: int, p: float) -> list[Callable[[], None]]:
    """Forward and backward of the kernels, into tensors made once."""
    s, b, width = qkv.shape
    out = qkv.new_empty(s, b, width // 3)
    lse = torch.empty(b, heads, s)
    dout, dqkv = torch.randn_like(out), torch.empty_like(qkv)
    where = {"p": p, "seed": 1, "stream": 2}
    return [
        lambda: kernels.attention_forward(qkv, out, lse, **where),
        lambda: kernels.attention_backward(qkv, out, lse, dout, dqkv, **where),
    ]


def torch_sdpa(qkv: torch.Tensor, heads: int, p: float) -> list[Callable[[], None]]:
    """Forward and backward of torch on the same tensor."""
    s, b, width = qkv.shape
    leaf = qkv.detach().requires_grad_()
    dout = torch.randn(s, b, width // 3).to(qkv.dtype)
    saved: dict[str, torch.Tensor] = {}

    def forward() -> None:
        q, k, v = leaf.view(s, b, heads, 3, -1).permute(3, 1, 2, 0, 4)  # (b, heads, s, d) each
        context = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        saved["out"] = context.permute(2, 0, 1, 3).reshape(s, b, -1)

    def backward() -> None:
        leaf.grad = None
        torch.autograd.backward(saved["out"], dout, inputs=[leaf])

    return [forward, backward]


def rows(repeat: int = 9, p: float = 0.0) -> Iterator[dict[str, object]]:
    """One row per shape and dtype: GFLOP/s of forward, backward and both, ours and torch's, and the ratio of both."""
    for heads, s, d in SHAPES:
        forward_flops = 2 * 2 * s * (s / 2) * d * heads
        for dtype in DTYPES:
            qkv = torch.randn(s, 1, heads * 3 * d).to(dtype)
            times = seconds([*ours(qkv, heads, p), *torch_sdpa(qkv, heads, p)], repeat)
            row: dict[str, object] = {"heads": heads, "s": s, "d": d, "dtype": str(dtype).removeprefix("torch.")}
            for name, (forward, backward) in (("ours", times[:2]), ("torch", times[2:])):
                row[f"{name} forward"] = forward_flops / forward / 1e9
                row[f"{name} backward"] = 2.5 * forward_flops / backward / 1e9
                row[f"{name} both"] = 3.5 * forward_flops / (forward + backward) / 1e9
            row["ratio"] = (times[2] + times[3]) / (times[0] + times[1])
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--dropout", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, target {kernels.active()}, {args.threads} threads, GFLOP/s")
    for row in rows(args.repeat, args.dropout):
        print("  ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


if __name__ == "__main__":
    main()
