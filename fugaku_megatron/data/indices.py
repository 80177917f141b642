"""The index arrays that fix the order of samples: documents, samples, shuffle, blend. Pure numpy functions.

The rules and the random stream are Megatron-core's (gpt_dataset.py, helpers.cpp), so equal files, seeds and counts give
its order. Left out: caching the arrays on disk; 10 billion tokens take seconds to index.
Test: pytest tests/test_indices.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def build_document_index(
    documents: np.ndarray, num_epochs: int, separate_last: bool, rng: np.random.RandomState
) -> np.ndarray:
    """int32 (epochs * documents,): document ids of all epochs shuffled together; with `separate_last` the last epoch by itself."""
    if separate_last:
        head = build_document_index(documents, num_epochs - 1, False, rng)
        return np.concatenate([head, build_document_index(documents, 1, False, rng)])
    index = np.tile(documents.astype(np.int32), num_epochs)
    rng.shuffle(index)
    return index


def build_sample_index(lengths: np.ndarray, document_index: np.ndarray, seq_length: int) -> np.ndarray:
    """int32 or int64 (n + 1, 2): position in `document_index` and offset in that document where each of n samples begins.

    Sample i takes tokens i*s to (i+1)*s, both included, of the documents laid end to end: neighbouring samples share one token.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    begins = np.arange((int(ends[-1]) - 1) // seq_length + 1, dtype=np.int64) * seq_length
    places = np.searchsorted(ends, begins, side="right")  # the first document that ends beyond: skips empty ones
    index = np.empty((len(begins), 2), np.int32 if len(document_index) < 2**31 else np.int64)
    index[:, 0] = places
    index[:, 1] = begins - (ends[places] - lengths[document_index[places]])
    return index


def build_shuffle_index(num_first: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """uint32 or int64 (total,): a permutation of [0, num_first) followed by one of [num_first, total)."""
    index = np.arange(total, dtype=np.uint32 if total < 2**32 - 2 else np.int64)
    rng.shuffle(index[:num_first])
    if num_first < total:
        rng.shuffle(index[num_first:])
    return index


def build_blending_indices(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(dataset of each sample int16 (n,), its sample number within that dataset int64 (n,)); weights sum to 1.

    Megatron's greedy choice: the dataset with the largest weight * samples so far - samples taken, the first on a tie.
    Each choice depends on the one before, so this is a loop: about 0.4 microseconds per sample for two to four datasets.
    """
    taken = [0] * len(weights)
    chosen = []
    for n in range(num_samples):
        errors = [weight * (n or 1) - count for weight, count in zip(weights, taken)]
        best = errors.index(max(errors))
        taken[best] += 1
        chosen.append(best)
    dataset_index = np.array(chosen, np.int16)
    sample_index = np.empty(num_samples, np.int64)
    for i, count in enumerate(taken):
        sample_index[dataset_index == i] = np.arange(count)
    return dataset_index, sample_index
