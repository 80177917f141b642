"""Shapes, inputs and references of attention."""

import functools
import math

import torch

from fugaku_megatron.host import kernels

DROPOUT = {"p": 0.3, "seed": 3, "stream": 4, "first_sample": 5, "first_head": 2}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# s around the vector lengths 4, 8 and 16 and the tiles of 12, 24, 48 and 96; heads of every usual size
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 47, 48, 49, 61, 97, 101, 129]
HEAD_SIZES = [4, 8, 64, 80, 92, 96, 128, 12, 20, 64, 4, 36, 64, 8, 128, 80, 92, 64, 96]
SHAPES = [(s, 1 + s % 3, 1 + s % 5, d) for s, d in zip(LENGTHS, HEAD_SIZES, strict=True)]
SHAPES += [(257, 1, 2, 64), (193, 2, 1, 128), (13, 6, 3, 8)]
# ((s, b, heads, d), groups, window): windows of one key, within a tile, across tiles of every target, and larger than s
GROUPED = [
    ((17, 2, 6, 8), 3, None),
    ((49, 1, 4, 64), 2, 1),
    ((97, 2, 3, 20), 1, 5),
    ((131, 1, 6, 12), 2, 13),
    ((193, 1, 2, 80), 1, 96),
    ((300, 1, 7, 4), 1, 100),
    ((257, 1, 3, 16), 3, 49),
    ((129, 3, 4, 36), 4, 48),
    ((61, 1, 9, 8), 3, 400),
    ((210, 1, 2, 96), 2, 5),
    ((30, 1, 2, 256), 1, 7),
    ((700, 1, 2, 4), 1, 1),
    ((1000, 1, 1, 4), 1, 150),
    ((2, 1, 4, 128), 2, 2),
    ((230, 1, 20, 4), 1, 70),
]


def make(s, b, heads, d, dtype=torch.float32, seed=0, groups=None):
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(s, b, (heads + 2 * (groups or heads)) * d, generator=generator).to(dtype)
    return qkv, torch.randn(s, b, heads * d, generator=generator).to(dtype)


def attention(qkv, dout, heads, **options):
    """Return (out, lse, dqkv) of the kernels. Every output is full of NaN before."""
    s, b, _ = dout.shape
    out = torch.full_like(dout, math.nan)
    lse = torch.full((b, heads, s), math.nan)
    dqkv = torch.full_like(qkv, math.nan)
    kernels.attention_forward(qkv, out, lse, **options)
    kernels.attention_backward(qkv, out, lse, dout, dqkv, **options)
    return out, lse, dqkv


def document_starts(s, b, seed):
    """Return each position's first position of its document, int32 (b, s).

    Documents have 1 to s tokens. Short documents are more frequent.
    """
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(b, s, generator=generator) < torch.rand(b, 1, generator=generator) ** 3
    begins[:, 0] = True
    return torch.where(begins, torch.arange(s), 0).cummax(1)[0].int()


def explicit(
    qkv,
    dout,
    heads,
    p=0.0,
    seed=0,
    stream=0,
    first_sample=0,
    first_head=0,
    window=None,
    starts=None,
):
    """Return `attention` from the formula in double, with the mask of kernels.dropout on (b, heads, s, s)."""
    s, b, width = qkv.shape
    d = dout.shape[2] // heads
    groups = (width // d - heads) // 2
    x = qkv.double().requires_grad_()
    q, k, v = (
        x.view(s, b, groups, -1, d).permute(1, 2, 3, 0, 4).split([heads // groups, 1, 1], dim=2)
    )  # (b, groups, _, s, d)
    q, k, v = (part.expand(b, groups, heads // groups, s, d).flatten(1, 2) for part in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d)
    seen = torch.ones(s, s, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    if starts is not None:
        seen = (seen & (torch.arange(s) >= starts[:, :, None]))[:, None]
    scores = scores.masked_fill(~seen, -math.inf)
    mask = torch.ones(b, heads, s, s)
    if p:
        kernels.dropout(
            mask, mask, p, seed, stream, first_sample, sample_dim=0, row0=first_head * s
        )
    out = ((scores.softmax(-1) * mask) @ v).permute(2, 0, 1, 3).reshape(s, b, -1)
    out.backward(dout.double())
    return out.detach(), scores.detach().logsumexp(-1), x.grad


@functools.cache
def exact(shape, dtype, dropout, groups=None, window=None, documents=None):
    """Return explicit() of make(), cached for every target. documents: the seed of document_starts."""
    qkv, dout = make(*shape, dtype, groups=groups)
    starts = None if documents is None else document_starts(*shape[:2], documents)
    return explicit(
        qkv, dout, shape[2], window=window, starts=starts, **(DROPOUT if dropout else {})
    )


def assert_close(got, want, tolerance):
    """Compare the largest error with the largest value of the whole tensor."""
    for name, a, e in zip(("out", "lse", "dqkv"), got, want, strict=True):
        assert torch.isfinite(a).all(), name
        error = (a.double() - e).abs().max().item()
        assert error <= tolerance * max(1.0, e.abs().max().item()), f"{name}: {error}"
