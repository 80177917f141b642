"""Document, sample and shuffle index, and blending, by Megatron-core's rules (gpt_dataset.py, helpers.cpp)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

BLOCK = 2**20  # documents or samples at a time


def build_document_index(
    documents: range, num_epochs: int, separate_last: bool, rng: np.random.RandomState
) -> np.ndarray:
    """Return shuffled document ids, int32 (epochs * documents,); `separate_last`: shuffle the last
    epoch separately.
    """
    index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), num_epochs)
    together = len(index) - len(documents) * separate_last
    rng.shuffle(index[:together])
    rng.shuffle(index[together:])
    return index


def count_samples(tokens: int, seq_length: int) -> int:
    """Count the samples with seq_length + 1 tokens, neighbours sharing one."""
    return (tokens - 1) // seq_length


def sample_index_dtype(num_documents: int) -> type:
    return np.int32 if num_documents < 2**31 else np.int64


def sample_blocks(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, first: int = 0
) -> Iterator[np.ndarray]:
    """Yield the sample index, int32 or int64 (n + 1, 2), blockwise: document position and offset.

    lengths: documents' from number `first` on

    Sample i has the concatenated tokens i*s to (i+1)*s, inclusive. It begins in the first document
    that ends after its first token, so empty documents are skipped.
    """
    # ended: tokens of the documents before this block
    dtype = sample_index_dtype(len(document_index))
    sample = 0
    ended = 0
    for start in range(0, len(document_index), BLOCK):
        part = lengths[document_index[start : start + BLOCK] - first]
        ends = np.cumsum(part, dtype=np.int64) + ended
        ended = int(ends[-1])
        stop = (
            count_samples(ended, seq_length) + 1
        )  # samples that begin before the end of this block
        for some in range(sample, stop, BLOCK):
            begins = np.arange(some, min(some + BLOCK, stop), dtype=np.int64) * seq_length
            places = np.searchsorted(ends, begins, side="right")
            yield np.stack([places + start, begins - (ends[places] - part[places])], axis=1).astype(
                dtype
            )
        sample = stop


def shuffle_index_dtype(total: int) -> type:
    return np.uint32 if total < 2**32 - 2 else np.int64


def build_shuffle_index(num_first: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """Return uint32 or int64 (total,): [0, num_first) permuted, then [num_first, total)."""
    index: np.ndarray = np.arange(total, dtype=shuffle_index_dtype(total))
    rng.shuffle(index[:num_first])
    rng.shuffle(index[num_first:])
    return index


class Epochs(NamedTuple):
    """Epochs in an order.

    begun: Megatron-core's epochs, with which the run began
    separate_last: shuffle the last one separately
    added: further epochs for a longer run, each shuffled separately
    """

    begun: int
    separate_last: bool = False
    added: int = 0

    @property
    def total(self) -> int:
        return self.begun + self.added

    def bounds(self, tokens: int, seq_length: int) -> list[int]:
        """Return ends of separately shuffled ranges, in samples. tokens: in an epoch."""
        ends = [*range(self.begun, self.total + 1)]
        if self.separate_last:
            ends.insert(0, self.begun - 1)
        return [count_samples(end * tokens, seq_length) for end in ends]


# random streams of the added epochs, next to the seed
ADDED_DOCUMENTS = 1
ADDED_SAMPLES = 2


def added_documents(documents: range, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """Yield each added epoch's document ids, int32 (documents,), for any number of epochs alike."""
    rng = np.random.RandomState([seed, ADDED_DOCUMENTS])
    for _ in range(epochs):
        yield build_document_index(documents, 1, False, rng)


def added_samples(bounds: Sequence[int], seed: int) -> Iterator[np.ndarray]:
    """Yield each added epoch's shuffled sample numbers.

    bounds: ends, in samples: before, and after each added epoch

    The first sample, with the previous epoch's remaining tokens, stays first, so that token counts
    differ by at most one.
    """
    rng = np.random.RandomState([seed, ADDED_SAMPLES])
    for first, end in zip(bounds, bounds[1:]):
        index: np.ndarray = np.arange(first, end, dtype=np.int64)
        rng.shuffle(index[1:])
        yield index


def blending_blocks(
    weights: Sequence[float], num_samples: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks: data set, int16 (n,), and sample number in it, int64 (n,).

    weights: sum to 1

    Megatron's greedy choice: largest weight * samples so far - samples taken, the first on a tie.
    """
    taken = [0] * len(weights)
    for start in range(0, num_samples, BLOCK):
        before = list(taken)
        chosen = []
        for n in range(start, min(start + BLOCK, num_samples)):
            errors = [weight * (n or 1) - count for weight, count in zip(weights, taken)]
            best = errors.index(max(errors))
            taken[best] += 1
            chosen.append(best)
        dataset_index = np.array(chosen, np.int16)
        sample_index = np.empty(len(chosen), np.int64)
        for i, count in enumerate(taken):
            sample_index[dataset_index == i] = np.arange(before[i], count)
        yield dataset_index, sample_index
