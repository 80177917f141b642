"""Stochastic rounding to BF16, with random numbers by global position."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from .flat import Place

UNIFORM_BITS = 24  # of a random number, which FP32 holds


def round_at_random(values: Tensor, place: Place, seed: int, step: int) -> Tensor:
    """values (n,), FP32, in BF16: up with the probability of what is cut off, so that the mean is right.

    The random word of an element is a function of the seed, the step and its number in the global tensor, so that it is the same in
    every layout. The hash is that of kernels_sve/adamw_rounding.h with other keys, because the second moment has those.
    """
    words = _words(place.numbers(len(values)), ("low", "high"), place.stream, seed, step)
    bits = values.view(torch.int32) + (words >> 16).bitwise_and_(0xFFFF)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def random_numbers(numbers: Tensor, stream: int, seed: int, step: int) -> Tensor:
    """Return uniform random numbers in [0, 1) of elements with these numbers in a global tensor, (n,), in FP32.

    stream: of the tensor's random numbers. They are independent of those of `round_at_random`.
    """
    words = _words(numbers, ("moment low", "moment high"), stream, seed, step)
    return (words >> 32 - UNIFORM_BITS).bitwise_and_((1 << UNIFORM_BITS) - 1) * 2.0**-UNIFORM_BITS


def _words(numbers: Tensor, keys: tuple[str, str], stream: int, seed: int, step: int) -> Tensor:
    """Return a random word of 32 bits for each number, (n,); its upper bits are the better ones."""
    low, high = (zlib.crc32(f"{key} {seed} {stream} {step}".encode()) for key in keys)
    h = numbers.to(torch.int32).bitwise_xor_(_signed(low))
    h = _mixed(h, 16).mul_(_signed(0x85EBCA6B))
    return _mixed(h, 13).bitwise_xor_(_signed(high)).mul_(_signed(0xC2B2AE35))


def _signed(word: int) -> int:
    """The bits of a word of 32 as an int32."""
    return word - (word >> 31 << 32)


def _mixed(h: Tensor, shift: int) -> Tensor:
    """h ^ (h >> shift) of words of 32 bits, in place."""
    return h.bitwise_xor_((h >> shift).bitwise_and_((1 << 32 - shift) - 1))
