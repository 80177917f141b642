"""Documents of a preprocessed data set in input order or shuffled."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

DocumentTokens = tuple[np.ndarray, np.ndarray]  # token ids of some documents, and how many each has

PILE_BYTES = 2**26  # of tokens that are shuffled in memory at a time
MAX_PILES = 256
SHUFFLE_SEED = 1234


def in_order(tokens: np.ndarray, lengths: np.ndarray) -> Iterator[DocumentTokens]:
    ends = np.cumsum(lengths, dtype=np.int64)
    start = 0
    limit = PILE_BYTES // tokens.itemsize
    while start < len(lengths):
        begin = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, begin + limit, "right")))
        yield tokens[begin : ends[stop - 1]], lengths[start:stop]
        start = stop


def pile_count(size: int) -> int:
    return min(MAX_PILES, -(-size // PILE_BYTES))


def shuffled(
    tokens: np.ndarray, lengths: np.ndarray, piles: int, folder: Path
) -> Iterator[DocumentTokens]:
    """Yield all documents in a random order that depends only on their number and `piles`.

    Documents go at random to piles in temporary files, and each pile is shuffled in memory: all
    orders are equally likely, and tokens may exceed memory.
    """
    random = np.random.RandomState(SHUFFLE_SEED)  # its stream is the same in every numpy
    if piles <= 1:
        order = random.permutation(len(lengths))
        yield _gathered(tokens, lengths, order), lengths[order]
        return
    pile_of = random.randint(piles, size=len(lengths))
    done = 0
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(piles)]
        for part, counts in in_order(tokens, lengths):
            numbers = pile_of[done : done + len(counts)]
            for number in np.unique(numbers):
                files[number].write(_gathered(part, counts, np.flatnonzero(numbers == number)).data)
            done += len(counts)
        for number, file in enumerate(files):
            with file:
                file.seek(0)
                part = np.frombuffer(file.read(), tokens.dtype)
                counts = lengths[pile_of == number]
            order = random.permutation(len(counts))
            yield _gathered(part, counts, order), counts[order]


def _gathered(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    ends = np.cumsum(lengths, dtype=np.int64)
    parts = [
        tokens[end - length : end]
        for end, length in zip(ends[order].tolist(), lengths[order].tolist())
    ]
    return np.concatenate([tokens[:0], *parts])
