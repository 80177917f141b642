"""Causal attention between its two projections: forward, with backward, of one new token; against torch's own.

torch's is scaled_dot_product_attention. attention_decode is generation: one token of each sample against s keys and values of
earlier ones (or as many as a window has), which memory bounds; attention_decode_latent has one key for all heads, whose
beginning is the value, and is bound by arithmetic, so both limits are printed.

Shapes are as in costs/attention.py: sequence s, this rank's heads and groups, head size d; with --key-size queries and keys
have their own. Both sides read and write Megatron's fused (s, b, columns) tensor; torch's side works on (b, heads, s, d) and
(b, groups, s, d) views of it, with enable_gqa. A window is a mask there. FLOPs are counted as in kernels_sve/kernels.inc:
forward's two matmuls below the diagonal and inside the window, and backward's five, of which two compute S and dP again.
attention_part is a rectangle without a diagonal, of half of the queries and half of the keys, with forward and backward. Left
out: dropout, documents, the projections.

    python -m benchmarks attention --recipe 124m                                        12 heads, s 1024, d 64
    python -m benchmarks attention --recipe 124m --num-query-groups 3                   4 of them to a key and a value
    python -m benchmarks attention --recipe 30b --tensor-model-parallel-size 4          14 heads, s 2048, d 128
    python -m benchmarks attention --recipe 30b --tensor-model-parallel-size 4 --window-size 511,0
    python -m benchmarks attention --recipe 124m --key-size 192 --value-size 128        DeepSeek-V3's heads
    python -m benchmarks attention --recipe 124m --num-query-groups 1 --key-size 576 --value-size 512 --seq-length 16384
        --dtype bf16 --only attention_decode    its latents: keys and values apart, and values as the beginnings of keys
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fugaku_megatron.config.fields import check

from . import driver, preloads, shapes
from .driver import DTYPES, Call, Case, relative_error

TORCH_HERE = True
SDPA = "torch sdpa"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a model's shapes."""
    driver.add_arguments(parser)
    parser.add_argument(
        "--num-query-groups",
        type=int,
        metavar="N",
        help="groups of heads that share a key and a value",
    )
    parser.add_argument(
        "--window-size", metavar="LEFT,0", help="a token sees itself and LEFT tokens before it"
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="tokens of a sample (default: the recipe's)"
    )
    parser.add_argument(
        "--key-size", type=int, metavar="N", help="elements of a query and of a key (default: d)"
    )
    parser.add_argument(
        "--value-size", type=int, metavar="N", help="elements d of a value (default: the recipe's)"
    )
    parser.set_defaults(mkl=preloads.BOTH)


@dataclass(frozen=True)
class Shape:
    """Shape of one rank's attention.

    heads: in groups over s tokens, whose values have d elements, queries and keys key_size
    window: of tokens, None for all
    """

    heads: int
    groups: int
    s: int
    d: int
    key_size: int
    window: int | None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Heads, s and d; the groups after the heads, the key size before d and the window at the end where they say something."""
        groups = (self.groups,) if self.groups < self.heads else ()
        key_size = (self.key_size,) if self.key_size != self.d else ()
        window = (self.window,) if self.window is not None else ()
        return self.heads, *groups, self.s, *key_size, self.d, *window

    @property
    def columns(self) -> tuple[int, int, int]:
        """Columns of the queries, the key and the value of a group."""
        return self.heads // self.groups * self.key_size, self.key_size, self.d

    @property
    def width(self) -> int:
        """Columns of all groups."""
        return self.groups * sum(self.columns)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (.., groups, heads / groups, key_size), keys and values (.., groups, columns) of rows (.., width)."""
        q, k, v = rows.unflatten(-1, (self.groups, -1)).split(self.columns, dim=-1)
        return q.unflatten(-1, (-1, self.key_size)), k, v


def shape_of(options: argparse.Namespace) -> Shape:
    """Return a rank's shape in the run of `options`. ValueError for sizes that the kernels lack."""
    for name, size in (("key", options.key_size), ("value", options.value_size)):
        fits = size is None or (size > 0 and size % 4 == 0)
        check(fits, f"--{name}-size {size}: pass a multiple of 4")
    length = (
        {}
        if options.seq_length is None
        else dict.fromkeys(("seq_length", "max_position_embeddings"), options.seq_length)
    )
    run = shapes.run_of(options, **length)
    tp = options.tensor_model_parallel_size
    model = run.model
    d = options.value_size or model.kv_channels
    return Shape(
        model.num_attention_heads // tp,
        model.query_groups // tp,
        model.seq_length,
        d,
        options.key_size or d,
        model.window,
    )


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield forward, forward with backward, and the next token of sequences."""
    shape = shape_of(options)
    b = options.micro_batch_size
    torch.manual_seed(0)
    qkv = torch.randn(shape.s, b, shape.width).to(DTYPES[options.dtype])
    dout = torch.randn(shape.s, b, shape.heads * shape.d).to(qkv.dtype)
    out = torch.empty_like(dout)
    dqkv = torch.empty_like(qkv)
    lse = torch.empty(b, shape.heads, shape.s)
    forward, both = torch_calls(qkv, dout, shape)
    sizes = {"window": shape.window, "key_size": shape.key_size}
    call = Call("attention_forward", qkv, out, lse, **sizes)
    back = Call("attention_backward", qkv, out, lse, dout, dqkv, **sizes)
    common = {
        "shape": shape.numbers,
        "baseline": SDPA,
        "details": {"micro_batch_size": b},
    }
    yield Case(
        op="attention_forward",
        calls=(call,),
        baseline_run=forward,
        error=lambda: error(qkv, dout, shape, out, None),
        **common,
    )
    yield Case(
        op="attention",
        calls=(call, back),
        baseline_run=both,
        error=lambda: error(qkv, dout, shape, out, dqkv),
        **common,
    )
    yield decoding(shape, b, qkv.dtype, common)
    if shape.groups == 1 and shape.d < shape.key_size:
        yield latent_decoding(shape, b, qkv.dtype, common)
    if shape.window is None:
        yield part_of_ranks(shape, b, qkv.dtype, common)


def decoding(shape: Shape, rows: int, dtype: torch.dtype, common: dict) -> Case:
    """Return the case of one token of each of `rows` samples, whose caches are full."""
    slots = min(shape.window or shape.s, shape.s)
    qkv = torch.randn(rows, shape.width).to(dtype)
    keys, values = (
        torch.randn(rows, shape.groups, slots, size).to(dtype) for size in (shape.key_size, shape.d)
    )
    out = qkv.new_empty(rows, shape.heads * shape.d)
    places = torch.arange(rows)
    call = Call("attention_decode", qkv, keys, values, places, places + slots - 1, out)

    def baseline(at: torch.dtype = dtype) -> Tensor:
        queries, key, value = shape.split(qkv.to(at))
        last = torch.arange(slots - 1, slots - 1 + rows) % slots
        for cache, new in ((keys, key), (values, value)):
            cache[places, :, last] = new.to(dtype)
        return F.scaled_dot_product_attention(queries, keys.to(at), values.to(at)).reshape(
            rows, -1
        )  # a group's queries as rows

    return Case(
        op="attention_decode",
        calls=(call,),
        baseline_run=baseline,
        error=lambda: relative_error(out, baseline(torch.float64)),
        **common,
    )


def latent_decoding(shape: Shape, rows: int, dtype: torch.dtype, common: dict) -> Case:
    """Return `decoding` with one cache: a value is the first d elements of its key (absorbed projections of latent attention)."""
    qkv = torch.randn(rows, (shape.heads + 1) * shape.key_size).to(dtype)
    keys = torch.randn(rows, 1, shape.s, shape.key_size).to(dtype)
    values = keys[..., : shape.d]
    out = qkv.new_empty(rows, shape.heads * shape.d)
    places = torch.arange(rows)
    call = Call("attention_decode", qkv, keys, values, places, places + shape.s - 1, out)

    def baseline(at: torch.dtype = dtype) -> Tensor:
        queries, key = qkv.view(rows, 1, -1, shape.key_size).split((shape.heads, 1), dim=2)
        last = torch.arange(shape.s - 1, shape.s - 1 + rows) % shape.s
        keys[places, :, last] = key[:, :, 0]
        context = F.scaled_dot_product_attention(queries.to(at), keys.to(at), values.to(at))
        return context.reshape(rows, -1)

    return Case(
        op="attention_decode_latent",
        calls=(call,),
        baseline_run=baseline,
        error=lambda: relative_error(out, baseline(torch.float64)),
        shows_bandwidth=True,
        **common,
    )


def part_of_ranks(shape: Shape, b: int, dtype: torch.dtype, common: dict) -> Case:
    """Return the case of forward with backward of the second half of the queries and the first half of the keys."""
    half = shape.s // 2
    heads = shape.heads
    groups = shape.groups
    d = shape.d
    both = shape.key_size + d
    qkv, kv, dout = (
        torch.randn(half, b, columns).to(dtype)
        for columns in (shape.width, groups * both, heads * d)
    )
    out = torch.empty_like(dout)
    lse = torch.empty(b, heads, half)
    dqkv = torch.zeros(qkv.shape)
    dkv = torch.zeros(kv.shape)
    places = {"s": 2 * half, "first_query": half, "first_key": 0, "key_size": shape.key_size}
    calls = (
        Call("attention_part_forward", qkv, kv, out, lse, **places),
        Call("attention_part_backward", qkv, kv, out, lse, dout, dqkv, dkv, **places),
    )

    def baseline(at: torch.dtype = dtype) -> list[Tensor]:
        leaves = [x.detach().to(at).requires_grad_() for x in (qkv, kv)]
        queries = shape.split(leaves[0])[0].permute(1, 2, 3, 0, 4).flatten(1, 2)
        by_group = leaves[1].view(half, b, groups, both).permute(1, 2, 0, 3)
        keys, values = by_group.split((shape.key_size, d), dim=3)
        context = F.scaled_dot_product_attention(
            queries, keys, values, enable_gqa=groups < heads
        ).permute(2, 0, 1, 3)
        context.reshape(half, b, -1).backward(dout.to(at))
        return [context.detach().reshape(half, b, -1), *(leaf.grad for leaf in leaves)]

    return Case(
        op="attention_part",
        calls=calls,
        baseline_run=baseline,
        **common,
        error=lambda: max(map(relative_error, (out, dqkv, dkv), baseline(torch.float64))),
    )


def torch_calls(
    qkv: Tensor, dout: Tensor, shape: Shape
) -> tuple[Callable[[], object], Callable[[], None]]:
    """Return (forward, forward and backward) of torch on the same tensor."""
    leaf = qkv.detach().clone().requires_grad_()
    mask = mask_of(shape)

    def forward() -> Tensor:
        return sdpa(leaf, shape, mask)

    def both() -> None:
        leaf.grad = None
        torch.autograd.backward(forward(), dout, inputs=[leaf])

    return torch.no_grad()(forward), both


def mask_of(shape: Shape) -> Tensor | None:
    """Return (s, s), true where a query sees a key; None without a window, for which torch has a flag."""
    if shape.window is None:
        return None
    return torch.ones(shape.s, shape.s, dtype=torch.bool).tril().triu(1 - shape.window)


def sdpa(qkv: Tensor, shape: Shape, mask: Tensor | None) -> Tensor:
    """Attend by torch: (s, b, width) -> (s, b, heads d)."""
    s, b, _ = qkv.shape
    q, k, v = shape.split(qkv)
    context = F.scaled_dot_product_attention(
        q.permute(1, 2, 3, 0, 4).flatten(1, 2),
        k.permute(1, 2, 0, 3),
        v.permute(1, 2, 0, 3),
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=shape.groups < shape.heads,
    )
    return context.permute(2, 0, 1, 3).reshape(s, b, -1)


def error(qkv: Tensor, dout: Tensor, shape: Shape, out: Tensor, dqkv: Tensor | None) -> float:
    """Return the largest difference of the last sample's last group from double precision, relative to the largest value there."""
    one_in = sum(shape.columns)
    one_out = shape.heads // shape.groups * shape.d
    last = replace(shape, heads=shape.heads // shape.groups, groups=1)
    one = qkv[:, -1:, -one_in:].double().requires_grad_()  # (s, 1, (heads / groups + 2) d)
    exact = sdpa(one, last, mask_of(shape))
    pairs = [(out[:, -1:, -one_out:], exact.detach())]
    if dqkv is not None:
        exact.backward(dout[:, -1:, -one_out:].double())
        pairs.append((dqkv[:, -1:, -one_in:], one.grad))
    return max(relative_error(*pair) for pair in pairs)


measure, text = driver.family(cases)
