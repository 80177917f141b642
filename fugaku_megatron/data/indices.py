"""The index arrays that fix the order of samples: documents, samples, shuffle, blend. Pure numpy functions.

The rules and the random stream are Megatron-core's (gpt_dataset.py, helpers.cpp), so equal files, seeds and counts give
its order. What is not shuffled is made in blocks, so that it need not fit in memory. Left out: keeping the arrays (index_cache.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

BLOCK = 2**20  # documents or samples at a time


def build_document_index(
    documents: np.ndarray | range, num_epochs: int, separate_last: bool, rng: np.random.RandomState
) -> np.ndarray:
    """int32 (epochs * documents,): document ids of all epochs shuffled together; with `separate_last` the last epoch by itself."""
    rows = np.empty((num_epochs, len(documents)), np.int32)
    rows[:] = np.arange(documents.start, documents.stop, dtype=np.int32) if isinstance(documents, range) else documents
    index = rows.reshape(-1)
    together = len(index) - len(documents) * separate_last
    rng.shuffle(index[:together])
    if separate_last:
        rng.shuffle(index[together:])
    return index


def count_samples(tokens: int, seq_length: int) -> int:
    """Samples of seq_length + 1 tokens, neighbours sharing one, in `tokens` tokens."""
    return (tokens - 1) // seq_length


def sample_index_dtype(num_documents: int) -> type:
    """Of a sample index of `num_documents`, all epochs counted."""
    return np.int32 if num_documents < 2**31 else np.int64


def sample_blocks(lengths: np.ndarray, document_index: np.ndarray, seq_length: int, first: int = 0) -> Iterator[np.ndarray]:
    """Consecutive parts, (at most BLOCK, 2) each, of the sample index, int32 or int64 (n + 1, 2): position in `document_index`
    and offset in that document where each of n samples begins. lengths: of the documents from number `first` on.

    Sample i takes tokens i*s to (i+1)*s, both included, of the documents laid end to end: neighbouring samples share one token.
    It begins in the first document that ends beyond its first token, so empty documents are skipped.
    """
    dtype, sample, ended = sample_index_dtype(len(document_index)), 0, 0  # ended: tokens of the documents before this block
    for start in range(0, len(document_index), BLOCK):
        part = lengths[document_index[start : start + BLOCK] - first]
        ends = np.cumsum(part, dtype=np.int64) + ended
        ended = int(ends[-1])
        stop = count_samples(ended, seq_length) + 1  # samples that begin before the end of this block
        for some in range(sample, stop, BLOCK):
            begins = np.arange(some, min(some + BLOCK, stop), dtype=np.int64) * seq_length
            places = np.searchsorted(ends, begins, side="right")
            yield np.stack([places + start, begins - (ends[places] - part[places])], axis=1).astype(dtype)
        sample = stop


def shuffle_index_dtype(total: int) -> type:
    """Of a shuffle index of `total` samples."""
    return np.uint32 if total < 2**32 - 2 else np.int64


def build_shuffle_index(num_first: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """uint32 or int64 (total,): a permutation of [0, num_first) followed by one of [num_first, total)."""
    index: np.ndarray = np.arange(total, dtype=shuffle_index_dtype(total))
    rng.shuffle(index[:num_first])
    if num_first < total:
        rng.shuffle(index[num_first:])
    return index


def blending_blocks(weights: Sequence[float], num_samples: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Consecutive parts, at most BLOCK long, of two arrays: the dataset of each sample, int16 (n,), and its sample number within
    that dataset, int64 (n,). weights sum to 1.

    Megatron's greedy choice: the dataset with the largest weight * samples so far - samples taken, the first on a tie.
    Each choice depends on the one before, so this is a loop: about 0.4 microseconds per sample for two to four datasets.
    """
    taken = [0] * len(weights)
    for start in range(0, num_samples, BLOCK):
        before, chosen = list(taken), []
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
