"""Shapes, inputs and references for attention."""

import functools
import math
import os
from typing import NamedTuple

import torch

from fugaku_megatron.host import kernels

DROPOUT = {"p": 0.3, "seed": 3, "stream": 4, "first_sample": 5, "first_head": 2}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case(NamedTuple):
    """Shape and mask.

    d: elements of a value, and of a query and a key without key_size
    documents: a seed for document_starts
    """

    s: int
    b: int
    heads: int
    d: int
    groups: int | None = None
    window: int | None = None
    documents: int | None = None
    key_size: int | None = None
    scale: float | None = None

    def inputs(self, dtype=torch.float32):
        """Return qkv, dout and the number of heads."""
        sizes = {"groups": self.groups, "key_size": self.key_size}
        return *make(*self[:4], dtype, **sizes), self.heads

    def mask(self):
        starts = None
        if self.documents is not None:
            starts = document_starts(self.s, self.b, self.documents)
        return {"window": self.window, "starts": starts}

    def options(self):
        """Return the keyword arguments of the kernels."""
        return {**self.mask(), "key_size": self.key_size, "scale": self.scale}


# s around the vector lengths 4, 8 and 16 and the tiles of 12, 24, 48 and 96; heads of every usual size
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 47, 48, 49, 61, 97, 101, 129]
HEAD_SIZES = [4, 8, 64, 80, 92, 96, 128, 12, 20, 64, 4, 36, 64, 8, 128, 80, 92, 64, 96]
PLAIN = [Case(s, 1 + s % 3, 1 + s % 5, d) for s, d in zip(LENGTHS, HEAD_SIZES, strict=True)]
PLAIN += [Case(257, 1, 2, 64), Case(193, 2, 1, 128), Case(13, 6, 3, 8)]
# Windows of one key, within a tile, across tiles of every target, and larger than s.
GROUPED = [
    Case(17, 2, 6, 8, groups=3),
    Case(49, 1, 4, 64, groups=2, window=1),
    Case(97, 2, 3, 20, groups=1, window=5),
    Case(131, 1, 6, 12, groups=2, window=13),
    Case(193, 1, 2, 80, groups=1, window=96),
    Case(300, 1, 7, 4, groups=1, window=100),
    Case(257, 1, 3, 16, groups=3, window=49),
    Case(129, 3, 4, 36, groups=4, window=48),
    Case(61, 1, 9, 8, groups=3, window=400),
    Case(210, 1, 2, 96, groups=2, window=5),
    Case(30, 1, 2, 256, groups=1, window=7),
    Case(700, 1, 2, 4, groups=1, window=1),
    Case(1000, 1, 1, 4, groups=1, window=150),
    Case(2, 1, 4, 128, groups=2, window=2),
    Case(230, 1, 20, 4, groups=1, window=70),
]
CASES = [*PLAIN, *GROUPED]
CASES += [case._replace(documents=seed) for seed, case in enumerate(GROUPED)]
# Keys of DeepSeek-V3 and MiniCPM3, keys much wider than values, keys narrower than values
WIDE = [
    Case(129, 1, 2, 128, key_size=192, scale=0.1),
    Case(97, 2, 3, 64, key_size=96),
    Case(210, 1, 2, 4, groups=1, window=96, key_size=256, scale=0.05),
    Case(131, 1, 6, 36, groups=2, window=13, documents=1, key_size=12),
    Case(193, 1, 4, 92, groups=2, documents=2, key_size=100),
]
SMALL = [Case(1, 1, 1, 4, 1, 1), Case(17, 2, 3, 8, 3), Case(33, 1, 4, 20, 2, 9)]
SMALL += [case._replace(documents=3) for case in SMALL[1:]]
SMALL += [Case(33, 2, 4, 8, 2, 9, 3, key_size=12, scale=0.5)]


def cases(target, dtype):
    """Return all cases in FP32, and fewer in another dtype, for the slow reference and under an emulator."""
    if target == "reference":
        return SMALL
    few = dtype != torch.float32 or "QEMU_CPU" in os.environ  # set by tools/arm_env.py
    return [*(CASES[::3] if few else CASES), *WIDE]


def make(s, b, heads, d, dtype=torch.float32, groups=None, key_size=None):
    generator = torch.Generator().manual_seed(0)
    groups = groups or heads
    key_size = key_size or d
    width = heads * key_size + groups * (key_size + d)
    qkv = torch.randn(s, b, width, generator=generator).to(dtype)
    return qkv, torch.randn(s, b, heads * d, generator=generator).to(dtype)


def attention(qkv, dout, heads, **options):
    """Return the kernels' (out, lse, dqkv). Every output is full of NaN before."""
    s, b, _ = dout.shape
    out = torch.full_like(dout, math.nan)
    lse = torch.full((b, heads, s), math.nan)
    dqkv = torch.full_like(qkv, math.nan)
    kernels.attention_forward(qkv, out, lse, **options)
    kernels.attention_backward(qkv, out, lse, dout, dqkv, **options)
    return out, lse, dqkv


def document_starts(s, b, seed):
    """Return the first position in each position's document, int32 (b, s).

    Documents have 1 to s tokens. Short documents are more frequent.
    """
    generator = torch.Generator().manual_seed(seed)
    begins = torch.rand(b, s, generator=generator) < torch.rand(b, 1, generator=generator) ** 3
    begins[:, 0] = True
    return torch.where(begins, torch.arange(s), 0).cummax(1)[0].int()


def split(qkv, dout, heads, key_size=None):
    """Return views (s, b, groups, columns) of queries, and of keys with values."""
    s, b, width = qkv.shape
    d = dout.shape[2] // heads
    key_size = key_size or d
    groups = (width - heads * key_size) // (key_size + d)
    return qkv.view(s, b, groups, -1).split([heads // groups * key_size, key_size + d], dim=3)


def explicit(qkv, dout, heads, window=None, starts=None, key_size=None, scale=None, **dropout):
    """Return `attention` from the formula in double, with the mask of kernels.dropout on (b, heads, s, s)."""
    s, b, _ = qkv.shape
    d = dout.shape[2] // heads
    key_size = key_size or d
    first_head = dropout.pop("first_head", 0)
    x = qkv.double().requires_grad_()
    queries, keys_values = split(x, dout, heads, key_size)
    q = queries.unflatten(3, (-1, key_size)).flatten(2, 3).permute(1, 2, 0, 3)  # (b, heads, s, _)
    k, v = (
        part.permute(1, 2, 0, 3).repeat_interleave(heads // part.shape[2], 1)
        for part in keys_values.split([key_size, d], dim=3)
    )
    scores = q @ k.transpose(-1, -2) * (scale or key_size**-0.5)
    visible = torch.ones(s, s, dtype=torch.bool).tril()
    if window is not None:
        visible = visible.triu(1 - window)
    if starts is not None:
        visible = (visible & (torch.arange(s) >= starts[:, :, None]))[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    mask = torch.ones(b, heads, s, s)
    if dropout:
        kernels.dropout(mask, mask, **dropout, sample_dim=0, row0=first_head * s)
    out = ((scores.softmax(-1) * mask) @ v).permute(2, 0, 1, 3).reshape(s, b, -1)
    out.backward(dout.double())
    return out.detach(), scores.detach().logsumexp(-1), x.grad


@functools.cache
def exact(case, dtype, dropout=False):
    """Return explicit() for a case, cached for every target."""
    return explicit(*case.inputs(dtype), **case.options(), **(DROPOUT if dropout else {}))


def assert_close(got, want, tolerance=None):
    """Compare the largest error with the tensor's largest value."""
    tolerance = tolerance or TOLERANCE[got[0].dtype]
    for name, a, e in zip(("out", "lse", "dqkv"), got, want, strict=True):
        assert torch.isfinite(a).all(), name
        error = (a.double() - e).abs().max().item()
        assert error <= tolerance * max(1.0, e.abs().max().item()), f"{name}: {error}"
