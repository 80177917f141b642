"""Causal attention between its two projections: forward alone, forward and backward, against torch's scaled_dot_product_attention.

Shapes are those of fugaku_megatron.run.accounting: sequence s, this rank's heads, head size d. Both sides read and write Megatron's
fused (s, b, heads * 3 * d) tensor; torch's side works on (b, heads, s, d) views of it. FLOPs are those of
kernels_sve/kernels.inc: forward's two products below the diagonal, and 2.5 times as many in backward, which computes S and dP
again. Left out: dropout, the projections.

    python -m benchmarks attention --recipe 124m                                        12 heads, s 1024, d 64
    python -m benchmarks attention --recipe 30b --tensor-model-parallel-size 4          14 heads, s 2048, d 128
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.run import accounting

from .driver import DTYPES, Call, Case
from .shapes import add_arguments, run_of

__all__ = ["add_arguments", "cases"]


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Forward, and forward with backward."""
    run, tp, b = run_of(options), options.tensor_model_parallel_size, options.micro_batch_size
    record = next(r for r in accounting.layer_records(run, tp) if r.name == "attention")
    s, _, d = record.gemm
    heads = record.gemm_count // b
    torch.manual_seed(0)
    qkv = torch.randn(s, b, heads * 3 * d).to(DTYPES[options.dtype])
    dout = torch.randn(s, b, heads * d).to(qkv.dtype)
    out, dqkv, lse = torch.empty_like(dout), torch.empty_like(qkv), torch.empty(b, heads, s)
    forward, both = torch_calls(qkv, dout, heads)
    call = Call("attention_forward", qkv, out, lse)
    common = {"shape": (heads, s, d), "baseline": "torch sdpa", "details": {"micro_batch_size": b}}
    yield Case(op="attention_forward", calls=(call,), baseline_run=forward, error=lambda: error(qkv, dout, heads, out, None),
               **common)
    yield Case(op="attention", calls=(call, Call("attention_backward", qkv, out, lse, dout, dqkv)), baseline_run=both,
               error=lambda: error(qkv, dout, heads, out, dqkv), **common)


def torch_calls(qkv: Tensor, dout: Tensor, heads: int) -> tuple[Callable[[], object], Callable[[], None]]:
    """(forward, forward and backward) of torch on the same tensor."""
    leaf = qkv.detach().clone().requires_grad_()

    def forward() -> Tensor:
        return sdpa(leaf, heads)

    def both() -> None:
        leaf.grad = None
        torch.autograd.backward(forward(), dout, inputs=[leaf])

    return torch.no_grad()(forward), both


def sdpa(qkv: Tensor, heads: int) -> Tensor:
    """(s, b, heads 3 d) -> (s, b, heads d)."""
    s, b, _ = qkv.shape
    q, k, v = qkv.view(s, b, heads, 3, -1).permute(3, 1, 2, 0, 4)  # (b, heads, s, d) each
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, -1)


def error(qkv: Tensor, dout: Tensor, heads: int, out: Tensor, dqkv: Tensor | None) -> float:
    """Largest difference of the last sample's last head from double precision, relative to the largest value there."""
    d = dout.shape[-1] // heads
    one = qkv[:, -1:, -3 * d:].double().requires_grad_()  # (s, 1, 3 d)
    exact = sdpa(one, 1)
    pairs = [(out[:, -1:, -d:], exact.detach())]
    if dqkv is not None:
        exact.backward(dout[:, -1:, -d:].double())
        pairs.append((dqkv[:, -1:, -3 * d:], one.grad))
    return max(float((got.double() - right).abs().max() / right.abs().max()) for got, right in pairs)
