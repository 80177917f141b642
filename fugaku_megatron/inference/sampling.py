"""The choice of the next token from its logits."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..run.checks import check

MIN_TEMPERATURE = 1e-6  # above 0: logits divided by less are not finite in FP32
MAX_SEED = 2**63 - 1  # what torch's generator takes
NEXT_SAMPLE = 0x9E3779B97F4A7C15  # between the seeds of two samples: 2^64 over the golden ratio (Steele et al. 2014, SplitMix64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a choice, with Megatron's names beside our own."""
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: %(default)s)")
    parser.add_argument("--top-k", "--top_k", type=int, default=40, help="choose among the likeliest tokens, this many; "
                        "0: all (default: %(default)s)")
    parser.add_argument("--top-p", "--top_p", type=float, default=0.0, help="choose among the likeliest tokens that together have "
                        "this probability; 0: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the choice among tokens (default: %(default)s)")


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; see the flags' help. A temperature of 0 takes the likeliest token, the first of several."""

    temperature: float
    top_k: int
    top_p: float
    seed: int

    @staticmethod
    def of(options: argparse.Namespace) -> Sampling:
        """From parsed flags. Raises ValueError for values out of range."""
        temperature, seed = options.temperature, options.seed
        check(0 <= temperature < math.inf, f"--temperature is {temperature}: give 0 or more")
        check(temperature == 0 or temperature >= MIN_TEMPERATURE, f"--temperature is {temperature}: give 0, which always takes the "
              f"likeliest token, or at least {MIN_TEMPERATURE}")
        check(options.top_k >= 0, f"--top-k is {options.top_k}: give a number of tokens, or 0 for all")
        check(0 <= options.top_p <= 1, f"--top-p is {options.top_p}: give a probability up to 1, or 0 for all tokens")
        check(0 <= seed <= MAX_SEED, f"--seed is {seed}: give a number from 0 to {MAX_SEED}")
        return Sampling(temperature, options.top_k, options.top_p, seed)

    def chance(self, sample: int) -> torch.Generator:
        """The random numbers of a sample, which do not depend on how many others there are."""
        return torch.Generator().manual_seed((self.seed + sample * NEXT_SAMPLE) % 2**63)

    def pick(self, logits: Tensor, chance: torch.Generator) -> int:
        """One token from logits (v,). Every choice takes one random number, whatever the last bits of the logits are."""
        if self.temperature == 0.0:
            return int(logits.numpy().argmax())  # 5 us for 50257 tokens, where torch takes 58
        best, tokens = logits.topk(min(self.top_k or len(logits), len(logits)))
        cumulative = torch.softmax((best - best[0]) / self.temperature, 0).cumsum(0)
        if 0 < self.top_p < 1:  # the tokens before which less than top_p is reached
            cumulative = cumulative[: 1 + int((cumulative[:-1] < self.top_p * cumulative[-1]).sum())]
        place = torch.searchsorted(cumulative, torch.rand(1, generator=chance) * cumulative[-1], right=True)
        return int(tokens[min(int(place), len(cumulative) - 1)])
