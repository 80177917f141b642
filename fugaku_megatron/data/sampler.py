"""Micro-batches of a data-parallel rank, as numpy arrays.

Shapes: s = sequence length, b = micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .dataset import Dataset

BatchSizes = Callable[[int], int]  # samples consumed -> global batch size
StepSamples = Callable[[int, int], Sequence[int]]  # (samples consumed, count) -> sample numbers


def first_sample(
    consumed: int, micro_batch: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> int:
    return consumed + (micro_batch * dp_size + dp_rank) * micro_batch_size


def consecutive(consumed: int, count: int) -> Sequence[int]:
    return range(consumed, consumed + count)


def fetch(dataset: Dataset, samples: Sequence[int]) -> np.ndarray:
    """Fetch b samples: int64 (s + 1, b), or (2, s + 1, b) with marks. A token's label is in the
    next row.
    """
    return np.stack([dataset[i] for i in samples], axis=-1)


def global_batches(
    dataset: Dataset,
    consumed: int,
    global_batch_size: BatchSizes,
    samples: StepSamples,
) -> Iterator[Sequence[int]]:
    """Yield each iteration's sample numbers up to the last full batch; arguments as
    `micro_batches`.
    """
    while (batch := samples(consumed, global_batch_size(consumed)))[-1] < len(dataset):
        yield batch
        consumed = batch[-1] + 1


def micro_batches(
    dataset: Dataset,
    consumed: int,
    global_batch_size: BatchSizes,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    samples: StepSamples = consecutive,
) -> Iterator[np.ndarray]:
    """Yield this data-parallel rank's micro-batches from sample `consumed` on, as `fetch`.

    global_batch_size: such as `config.batches.RampUp`
    samples: such as `config.sample_rules.Skips.samples`

    Ends before the first incomplete global batch.
    """
    for batch in global_batches(dataset, consumed, global_batch_size, samples):
        yield from own_micro_batches(dataset, batch, micro_batch_size, dp_rank, dp_size)


def own_micro_batches(
    dataset: Dataset, batch: Sequence[int], micro_batch_size: int, dp_rank: int, dp_size: int
) -> Iterator[np.ndarray]:
    for m in range(len(batch) // (micro_batch_size * dp_size)):
        first = first_sample(0, m, micro_batch_size, dp_rank, dp_size)
        yield fetch(dataset, batch[first : first + micro_batch_size])
