"""Fill-in-the-middle samples (Bavarian et al. 2022, arXiv:2207.14255): prefix, middle and suffix of a text in another order.

Rules: Megatron-LM's megatron/training/datasets/fim_dataset.py. Two differ: random numbers are a function of seed and sample,
so that a resumed run draws them again, and an empty document keeps its end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..tokenizers.hugging_face import HuggingFaceTokenizer
from ..tokenizers.tokenizer import Tokenizer
from .dataset import ChangedDataset, Dataset, each_set


class FimTokens(NamedTuple):
    """Token ids. split: between the files of a sample; None: a document is one file"""

    prefix: int
    middle: int
    suffix: int
    pad: int
    eod: int
    split: int | None = None


class FimRule(NamedTuple):
    """Shares of documents and files that are rearranged, and of those with the suffix first.

    no_prefix: texts that begin with it stay
    """

    tokens: FimTokens
    rate: float
    spm_rate: float
    fragment_rate: float | None = None
    no_prefix: str | None = None


@dataclass
class FimDataset(ChangedDataset):
    """Samples with rearranged texts, int64 (s + 1,)."""

    rule: FimRule
    tokenizer: Tokenizer
    seed: int

    def __getitem__(self, index: int) -> np.ndarray:
        sample = self.dataset[index]
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], np.uint64)))
        pieces: list[np.ndarray] = []
        for document, end in _segments(sample, self.rule.tokens.eod):
            pieces += [*self._files(document, rng), end]
        result = np.concatenate(pieces)[: len(sample)]
        padding = np.full(len(sample) - len(result), self.rule.tokens.pad)
        return np.concatenate([result, padding]).astype(np.int64)

    def _files(self, document: np.ndarray, rng: np.random.Generator) -> Iterator[np.ndarray]:
        """Yield a document's files rearranged, with the tokens between them."""
        split = self.rule.tokens.split
        rate = self.rule.rate
        if split is None or split not in document:
            yield self._rearranged(document, rate, rng)
            return
        if rng.random() >= rate:
            yield document
            return
        assert self.rule.fragment_rate is not None
        for file, end in _segments(document, split):
            yield self._rearranged(file, self.rule.fragment_rate, rng)
            yield end

    def _rearranged(self, file: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
        """Return prefix, suffix and middle of a file after their tokens, or the file, at random."""
        rule = self.rule
        if not len(file) or rng.random() >= rate:
            return file
        text = self._decode(file)
        if rule.no_prefix is not None and text.startswith(rule.no_prefix):
            return file
        low, high = sorted(rng.integers(0, len(text) + 1, 2).tolist())
        prefix = self._encode(text[:low])
        middle = self._encode(text[low:high])
        suffix = self._encode(text[high:])
        ids = rule.tokens
        if rng.random() < rule.spm_rate:
            joined = [ids.prefix, ids.suffix, *suffix, ids.middle, *prefix, *middle]
        else:
            joined = [ids.prefix, *prefix, ids.suffix, *suffix, ids.middle, *middle]
        return np.array(joined, np.int64)

    def _decode(self, file: np.ndarray) -> str:
        ids = file.tolist()
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return str(self.tokenizer.library.decode(ids, skip_special_tokens=True))
        return self.tokenizer.decode(ids)

    def _encode(self, text: str) -> list[int]:
        """Tokenize without special tokens around the text."""
        if isinstance(self.tokenizer, HuggingFaceTokenizer):
            return list(self.tokenizer.library(text, add_special_tokens=False).input_ids)
        return self.tokenizer.encode(text)


def _segments(tokens: np.ndarray, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the tokens up to each `end`, and `end` (1,) or nothing (0,) after them."""
    for segment in np.split(tokens, np.flatnonzero(tokens == end) + 1):
        length = len(segment)
        if length and segment[-1] == end:
            length -= 1
        yield segment[:length], segment[length:]


def fill_in_middle(
    dataset: Dataset | None, rule: FimRule, tokenizer: Tokenizer, seed: int
) -> Dataset | None:
    """Return the data set with rearranged texts. seed: another one for each split"""
    return each_set(dataset, lambda each, number: FimDataset(each, rule, tokenizer, seed + number))
