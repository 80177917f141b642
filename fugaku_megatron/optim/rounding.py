"""Stochastic rounding to BF16, with random numbers by global position."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .flat import Place

UNIFORM_BITS = 24  # FP32 represents them exactly


def round_at_random(values: Tensor, place: Place, seed: int, step: int) -> Tensor:
    """Round FP32 values (n,) to BF16 stochastically, so that the mean is exact.

    Random numbers depend on the seed, the step and the global position. The hash is the one in kernels_sve/optimizer/adamw_rounding.h with
    different keys.
    """
    words = _words(place.numbers(len(values)), ("low", "high"), place.stream, seed, step)
    bits = values.view(torch.int32) + (words >> 16).bitwise_and_(0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def random_numbers(numbers: Tensor, stream: int, seed: int, step: int) -> Tensor:
    """Return uniform FP32 random numbers (n,) in [0, 1), independent of the random numbers in `round_at_random`."""
    words = _words(numbers, ("moment low", "moment high"), stream, seed, step)
    mask = (1 << UNIFORM_BITS) - 1
    bits = (words >> 32 - UNIFORM_BITS).bitwise_and_(mask)
    return bits * 2.0**-UNIFORM_BITS


def _words(numbers: Tensor, keys: tuple[str, str], stream: int, seed: int, step: int) -> Tensor:
    """Return a random 32-bit word for each number, best bits at the top."""
    low, high = (zlib.crc32(f"{key} {seed} {stream} {step}".encode()) for key in keys)
    h = numbers.to(torch.int32)
    h.bitwise_xor_(_signed(low))
    _mix(h, 16)
    h.mul_(_signed(0x85EBCA6B))
    _mix(h, 13)
    h.bitwise_xor_(_signed(high))
    return h.mul_(_signed(0xC2B2AE35))


def _signed(word: int) -> int:
    return word - (word >> 31 << 32)


def _mix(h: Tensor, shift: int) -> None:
    mask = (1 << 32 - shift) - 1
    h.bitwise_xor_((h >> shift).bitwise_and_(mask))
