"""Prompts, and the choice of the next token from its logits."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..config.checks import check

MIN_TEMPERATURE = 1e-6  # above 0: logits divided by less are not finite in FP32
MAX_SEED = 2**63 - 1  # what torch's generator takes
NEXT_SAMPLE = 0x9E3779B97F4A7C15  # between the seeds of two samples: 2^64 over the golden ratio (Steele et al. 2014, SplitMix64)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; see the flags' help. A temperature of 0 takes the likeliest token, the first of several.

    Raises ValueError for values out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.0
    seed: int = 1234

    def __post_init__(self) -> None:
        temperature = self.temperature
        check(0 <= temperature < math.inf, f"--temperature is {temperature}: pass 0 or more")
        check(temperature == 0 or temperature >= MIN_TEMPERATURE, f"--temperature is {temperature}: pass 0, which always takes the "
              f"likeliest token, or at least {MIN_TEMPERATURE}")
        check(self.top_k >= 0, f"--top-k is {self.top_k}: pass a number of tokens, or 0 for all")
        check(0 <= self.top_p <= 1, f"--top-p is {self.top_p}: pass a probability up to 1, or 0 for all tokens")
        check(0 <= self.seed <= MAX_SEED, f"--seed is {self.seed}: pass a number from 0 to {MAX_SEED}")

    @staticmethod
    def of(options: argparse.Namespace) -> Sampling:
        """From the parsed flags of `add_arguments`."""
        return Sampling(options.temperature, options.top_k, options.top_p, options.seed)

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of a choice, with Megatron's names beside our own."""
    add = parser.add_argument
    add("--temperature", type=float, default=Sampling.temperature, help="0: always the likeliest token (default: %(default)s)")
    add("--top-k", "--top_k", type=int, default=Sampling.top_k, help="choose among the likeliest tokens, this many; 0: all "
        "(default: %(default)s)")
    add("--top-p", "--top_p", type=float, default=Sampling.top_p, help="choose among the likeliest tokens that together have this "
        "probability; 0: all (default: %(default)s)")
    add("--seed", type=int, default=Sampling.seed, help="of the choice among tokens (default: %(default)s)")


def prompts_of(path: str) -> list[str]:
    """One prompt a line, or the strings of a JSON list in a file that ends in .json. Raises ValueError where that fails."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        prompts = json.loads(text) if path.endswith(".json") else [line for line in text.splitlines() if line]
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--prompts {path}: {reason}: pass a UTF-8 file of lines, or a JSON list of texts (.json)") from None
    check(isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts),
          f"--prompts {path}: it is not a JSON list of texts: pass one, such as [\"a\", \"b\"]")
    check(len(prompts) > 0, f"--prompts {path} has no prompt: pass at least one line")
    return prompts


class Ending:
    """Where continuations end: at a token, or before a word. decode: ids -> text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], eod: int | None, words: Sequence[str]) -> None:
        self.decode, self.eod, self.words = decode, eod, tuple(words)

    def text(self, ids: Sequence[int]) -> str:
        """The text of a continuation, up to where it ends."""
        text = self.decode([i for i in ids if i != self.eod])
        ends = [place for word in self.words if (place := text.find(word)) >= 0]
        return text[: min(ends)] if ends else text

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether nothing follows these tokens."""
        if ids[-1] == self.eod:
            return True
        return bool(self.words) and any(word in self.decode(ids) for word in self.words)

    def certain(self, ids: Sequence[int]) -> str:
        """The text that further tokens do not change: without what may become one of the words, or is half a character."""
        text = self.text(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        held = max((n for word in self.words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
        return text[: len(text) - held]
