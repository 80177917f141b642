"""AdamW's moments in 8 bits: codes of each element and one FP32 scale for each block of 256, --exp-avg-dtype int8.

Codes are not spaced evenly, so that a block may hold numbers of very different size (Dettmers et al. 2021, "8-bit Optimizers via
Block-wise Quantization", arXiv:2110.02861, has block-wise scales and another code): the first moment is scale sign(q) (q / 127)^2,
rounded to nearest, the second scale (q / 255)^4, rounded up or down at random so that its mean is right; an element above 0 has at
least q = 1, because it divides. Checkpoints hold both in FP32.

Also the rounding of BF16 weights without FP32 master weights, --main-params-dtype bf16.
Left out: the update, which is made in FP32 (`optim`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from ..config.groups import MOMENT_BLOCK
from .flat import Place

SIGNED, UNSIGNED = 127.0, 255.0


class EightBitMoment:
    """One moment of n elements, zeros at first. signed: the first one, or else the second."""

    def __init__(self, n: int, signed: bool) -> None:
        self.signed, self.n = signed, n
        blocks = -(-n // MOMENT_BLOCK)
        self.codes = torch.zeros(n, dtype=torch.int8 if signed else torch.uint8)
        self.scales = torch.zeros(blocks)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def read(self, start: int, end: int) -> Tensor:
        """Elements [start, end) in FP32; `start` begins a block, and `end` ends one or is n."""
        values = self.codes[start:end].float()
        values = values.mul_(values.abs()).div_(SIGNED**2) if self.signed else values.div_(UNSIGNED).square_().square_()
        return _by_block(values, self._scales(start, end), torch.mul)

    def write(self, start: int, values: Tensor, seed: int) -> None:
        """Round values (n,) into elements from `start` on, which begins a block. seed: of the second moment's random numbers."""
        end = start + len(values)
        scales = self._scales(start, end)
        torch.cat([view.abs().amax(-1).view(-1) for view in _blocks(values)], out=scales)
        x = _by_block(values.clone(), scales.clamp(min=torch.finfo(torch.float32).tiny), torch.div)
        if self.signed:
            self.codes[start:end] = x.abs().sqrt_().mul_(SIGNED).round_().mul_(x.sign())
            return
        low = x.sqrt().sqrt_().mul_(UNSIGNED).floor_().clamp_(0.0, UNSIGNED - 1)
        below, above = ((low + more).div_(UNSIGNED).square_().square_() for more in (0, 1))
        chance = torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
        up = chance.mul_(above.sub_(below)) < x - below
        self.codes[start:end] = torch.where((low == 0) & (x > 0), low + 1, low + up)

    def _scales(self, start: int, end: int) -> Tensor:
        return self.scales[start // MOMENT_BLOCK : -(-end // MOMENT_BLOCK)]


def _blocks(values: Tensor) -> list[Tensor]:
    """Views of whole blocks (k, block), and of a last one that is shorter."""
    whole = len(values) // MOMENT_BLOCK * MOMENT_BLOCK
    views = [values[:whole].view(-1, MOMENT_BLOCK), values[whole:]]
    return [view for view in views if view.numel()]


def _by_block(values: Tensor, scales: Tensor, function: Callable[..., Tensor]) -> Tensor:
    """values = function(values, the scale of its block), in place."""
    done = 0
    for view in _blocks(values):
        rows = len(view) if view.dim() == 2 else 1
        factor = scales[done : done + rows]
        function(view, factor[:, None] if view.dim() == 2 else factor, out=view)
        done += rows
    return values


def round_at_random(values: Tensor, place: Place, seed: int, step: int) -> Tensor:
    """values (n,), FP32, in BF16: up with the probability of what is cut off, so that the mean is right.

    The random word of an element is a function of the seed, the step and its number in the global tensor, so that it is the same in
    every layout. The hash is that of kernels_sve/adamw_rounding.h with other keys, because the second moment has those.
    """
    low, high = (zlib.crc32(f"{key} {seed} {place.stream} {step}".encode()) for key in ("low", "high"))
    h = place.numbers(len(values)).to(torch.int32).bitwise_xor_(_signed(low))
    h = _mixed(h, 16).mul_(_signed(0x85EBCA6B))
    h = _mixed(h, 13).bitwise_xor_(_signed(high)).mul_(_signed(0xC2B2AE35))
    bits = values.view(torch.int32) + (h >> 16).bitwise_and_(0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def _signed(word: int) -> int:
    """The bits of a word of 32 as an int32."""
    return word - (word >> 31 << 32)


def _mixed(h: Tensor, shift: int) -> Tensor:
    """h ^ (h >> shift) of words of 32 bits, in place."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << 32 - shift) - 1))
