"""GPT samples from indexed tokens: Megatron-LM's --data-path data sets and their blend.

The sample order depends on no parallel layout. As in Megatron-core a "document" is an indexed
sequence. Shapes: n samples, s = seq_length; a sample is int64 (s + 1,). An index takes 12 bytes a
sample and 4 bytes a document and epoch.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, count
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..comm.agreement import on_root
from ..comm.base import Comm
from ..tokenizers.vocabulary import check_tokens
from .index_arrays import (
    BLOCK,
    Epochs,
    added_documents,
    added_samples,
    blending_blocks,
    build_document_index,
    build_shuffle_index,
    count_samples,
    sample_blocks,
    sample_index_dtype,
    shuffle_index_dtype,
)
from .index_cache import ArrayBlocks, Index, IndexCache, IndexRequest, Store, provide
from .indexed import IndexedDataset
from .token_arrays import TokenArrays

SPLITS = ("train", "valid", "test")
SEPARATE_LAST_EPOCH = (
    0.80  # Megatron's: a last epoch of which less than this share is used is shuffled by itself
)
# of each sample, and of each document in each epoch, while they are shuffled
SAMPLE_BYTES = 4
DOCUMENT_BYTES = 4
RELEASE_EVERY = (
    32  # samples after which pages of a mapped index go back, and open files are checked
)
GPT_ARRAYS = ("document_index", "sample_index", "shuffle_index")
BLEND_ARRAYS = ("dataset_index", "dataset_sample_index")


class DataOrder(NamedTuple):
    """Sample numbers for which the orders were first made; None: not made yet, or endless.

    Checkpoints record both: a longer or shorter run keeps these orders.
    """

    train: int | None = None
    valid: int | None = None

    def or_else(self, train: int | None, valid: int | None) -> DataOrder:
        return DataOrder(self.train or train, self.valid or valid)


NEW_ORDER = DataOrder()


class Dataset(Protocol):
    """Sequence with items int64 (seq_length + 1,). Raises IndexError beyond the last."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...


def check_index(index: int, dataset: Dataset) -> None:
    if not 0 <= index < len(dataset):
        raise IndexError(f"sample {index} of a dataset of {len(dataset)} samples")


def normalize(weights: Sequence[float], flag: str = "--data-path") -> list[float]:
    wrong = [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]
    if wrong:
        raise ValueError(
            f"{flag}: weight {wrong[0]:g} is not a positive number; to weigh a dataset 0, leave it out"
        )
    return shares_of(weights)


def shares_of(numbers: Sequence[float]) -> list[float]:
    """Divide by the sum in numpy's order: its last bits decide ties in blending."""
    array = np.array(numbers, dtype=np.float64)
    return [float(share) for share in array / array.sum()]


@dataclass(frozen=True)
class DatasetConfig:
    """Settings that all data sets share.

    comm: rank 0 builds the index; collective
    max_bytes: memory limit for a sample order
    """

    seq_length: int
    seed: int
    vocab_size: int | None = None
    comm: Comm | None = None
    max_bytes: int | None = None
    cache: IndexCache | None = None


class GPTDataset:
    """At least `num_samples` samples with seq_length + 1 tokens, cut across `documents` (sequence
    ids) in `indexed`.

    num_samples: filled with whole epochs end to end; None: one epoch
    begun: number for which the order was first made (None: `num_samples`); epochs are added, so
        sample i stays the same in a longer or shorter run

    Raises ValueError on every rank without tokens, if an epoch is shorter than a sample, or if the
    order needs too much memory.
    """

    def __init__(
        self,
        indexed: IndexedDataset | TokenArrays,
        name: str,
        documents: range,
        num_samples: int | None,
        config: DatasetConfig,
        begun: int | None = None,
    ):
        self.indexed = indexed
        self.name = name
        self.config = config
        self.num_documents = len(documents)
        self.num_tokens = on_root(config.comm, lambda: self._count_tokens(documents, num_samples))
        self._epochs = self._plan(num_samples, begun)
        self.num_epochs = self._epochs.total
        on_root(config.comm, lambda: self._check_memory(max(num_samples or 1, begun or 1)))
        self._fetched = 0
        self._index = self._build(documents)
        self.document_index, self.sample_index, self.shuffle_index = (
            self._index.arrays[name] for name in GPT_ARRAYS
        )

    def _count_tokens(self, documents: range, num_samples: int | None) -> int:
        s = self.config.seq_length
        blocks = (documents[i : i + BLOCK] for i in range(0, len(documents), BLOCK))
        per_epoch = sum(
            int(self.indexed.read_lengths(block.start, block.stop).sum(dtype=np.int64))
            for block in blocks
        )
        if s < 1 or (num_samples is not None and num_samples < 1):
            raise ValueError(
                f"{self.name} data: --seq-length {s} and {num_samples} samples must be >= 1"
            )
        if per_epoch < (s + 1 if num_samples is None else 1):
            raise ValueError(
                f"{self.name} data of {self.indexed.prefix}: {per_epoch} tokens in {len(documents)} documents, but a "
                f"sample takes --seq-length {s} + 1; shorten it, pass more data or change --split"
            )
        return per_epoch

    def _check_memory(self, num_samples: int) -> None:
        limit = self.config.max_bytes
        needed = SAMPLE_BYTES * num_samples + DOCUMENT_BYTES * self.num_documents * self.num_epochs
        if limit is not None and needed > limit:
            raise ValueError(
                f"{self.name} data of {self.indexed.prefix}: the order of {num_samples} samples, which read its "
                f"{self.num_documents} documents {self.num_epochs} times, takes about {needed / 2**30:.1f} GiB, and the "
                f"node has {limit / 2**30:.1f} GiB: pass fewer {length_flags(self.name)}, or more data"
            )

    def _plan(self, num_samples: int | None, begun: int | None) -> Epochs:
        """Plan the epochs. A little-used last epoch is shuffled separately."""
        if num_samples is None:
            return Epochs(1)
        s = self.config.seq_length
        per_epoch = self.num_tokens
        first = begun or num_samples
        epochs = -(-(first * s + 1) // per_epoch)
        needed = -(-(num_samples * s + 1) // per_epoch)
        threshold = int(SEPARATE_LAST_EPOCH * count_samples(per_epoch, s))
        used = first - count_samples((epochs - 1) * per_epoch, s)  # of the last epoch
        return Epochs(epochs, epochs > 1 and used < threshold, max(0, needed - epochs))

    def _build(self, documents: range) -> Index:
        s = self.config.seq_length
        seed = self.config.seed
        epochs = self._epochs
        count = epochs.total * len(documents)
        bounds = epochs.bounds(self.num_tokens, s)
        begun = bounds[epochs.separate_last]
        total = bounds[-1]

        def build(store: Store) -> None:
            rng = np.random.RandomState(seed)  # Megatron's generator; its stream is frozen
            shuffled = [build_document_index(documents, epochs.begun, epochs.separate_last, rng)]
            blocks: Iterable[np.ndarray]
            blocks = chain(shuffled, added_documents(documents, epochs.added, seed))
            document_index = store(ArrayBlocks("document_index", np.int32, (count,), blocks))
            lengths = self.indexed.read_lengths(documents.start, documents.stop)
            blocks = sample_blocks(lengths, document_index, s, documents.start)
            store(ArrayBlocks("sample_index", sample_dtype, (total + 1, 2), blocks))
            del lengths, blocks
            shuffled = [build_shuffle_index(bounds[0], begun, rng)]
            blocks = chain(shuffled, added_samples(bounds[epochs.separate_last :], seed))
            store(ArrayBlocks("shuffle_index", shuffle_dtype, (total,), blocks))

        sample_dtype = np.dtype(sample_index_dtype(count))
        shuffle_dtype = np.dtype(shuffle_index_dtype(total))
        description = {
            **self.indexed.description(),
            "first_document": documents.start,
            "documents": len(documents),
            "num_epochs": epochs.begun,
            "separate_last_epoch": epochs.separate_last,
            "index_split": self.name,
            "random_seed": seed,
            "sequence_length": s,
        }
        if epochs.added:
            description["added_epochs"] = epochs.added
        size = 4 * count + (2 * sample_dtype.itemsize + shuffle_dtype.itemsize) * total
        request = IndexRequest(
            self.indexed.prefix, "GPTDataset", self.name, description, GPT_ARRAYS, size
        )
        return provide(self.config.cache, request, build, self.config.comm)

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.joined(self.by_document(index))

    def joined(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return a sample's tokens as one checked array, int64 (s + 1,)."""
        tokens = np.concatenate(parts)
        assert len(tokens) == self.config.seq_length + 1
        if self.config.vocab_size is not None:
            check_tokens(tokens, self.config.vocab_size, self.indexed.path)
        return tokens.astype(np.int64)

    def by_document(self, index: int) -> list[np.ndarray]:
        """Return a sample's tokens, s + 1 together, by document."""
        check_index(index, self)
        self._fetched += 1
        if self._fetched % RELEASE_EVERY == 0:
            self._index.release()
            self.indexed.check_open()
        self._index.check()
        unshuffled = int(self.shuffle_index[index])
        (first, begin), (last, end) = self.sample_index[unshuffled : unshuffled + 2].tolist()
        parts = []
        for i in range(first, last + 1):
            offset = begin if i == first else 0
            length = (
                end + 1 - offset if i == last else None
            )  # + 1: the token shared with the next sample
            parts.append(self.indexed.get(self.document_index[i], offset, length))
        return parts


def length_flags(name: str) -> str:
    return "--train-iters or --train-samples" if name == SPLITS[0] else "--eval-iters"


class BlendedDataset:
    """Mixed data sets: the first n samples follow the `weights` for any n."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        weights: Sequence[float],
        num_samples: int,
        name: str = "train",
        cache: IndexCache | None = None,
        prefix: str = "",
        comm: Comm | None = None,
    ):
        assert len(datasets) == len(weights) > 0
        self.datasets = list(datasets)
        weights = normalize(weights)
        self._fetched = 0

        def build(store: Store) -> None:
            for part, dtype in enumerate((np.int16, np.int64)):
                blocks = (block[part] for block in blending_blocks(weights, num_samples))
                store(ArrayBlocks(BLEND_ARRAYS[part], dtype, (num_samples,), blocks))

        description = {
            "class": "BlendedDataset",
            "weights": weights,
            "size": num_samples,
            "index_split": name,
        }
        request = IndexRequest(
            prefix, "BlendedDataset", name, description, BLEND_ARRAYS, 10 * num_samples
        )
        self._index = provide(cache, request, build, comm)
        self.dataset_index, self.sample_index = (self._index.arrays[name] for name in BLEND_ARRAYS)
        on_root(comm, lambda: self._check_sizes(num_samples))

    def _check_sizes(self, num_samples: int) -> None:
        counts = sum(
            (
                np.bincount(self.dataset_index[start : start + BLOCK], minlength=len(self.datasets))
                for start in range(0, num_samples, BLOCK)
            ),
            np.zeros(len(self.datasets), np.int64),
        )
        self._index.release()
        for i, (dataset, needed) in enumerate(zip(self.datasets, counts)):
            if needed > len(dataset):
                raise ValueError(
                    f"blend of {num_samples} samples: dataset {i} has {len(dataset)}, its weight takes {needed}"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, self)
        self._fetched += 1
        if self._fetched % RELEASE_EVERY == 0:
            self._index.release()
        self._index.check()
        return self.datasets[int(self.dataset_index[index])][int(self.sample_index[index])]


class ValidationSets:
    """Samples of several validation sets, one set after another."""

    def __init__(self, datasets: Sequence[Dataset]):
        self.datasets = list(datasets)
        self._ends = [*accumulate(map(len, datasets))]

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, self)
        number = bisect_right(self._ends, index)
        return self.datasets[number][index - ([0, *self._ends][number])]


@dataclass
class ChangedDataset:
    """Data set whose samples a subclass changes."""

    dataset: Dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dataset, name)


def each_set(dataset: Dataset | None, change: Callable[[Dataset, int], Dataset]) -> Dataset | None:
    """Change a data set, or each of several validation sets with its number; None stays."""
    if isinstance(dataset, ValidationSets):
        return ValidationSets([*map(change, dataset.datasets, count())])
    return None if dataset is None else change(dataset, 0)


@dataclass
class MockDataset:
    """Samples for --mock-data: a pure function (seed, i), uniform over the vocabulary."""

    vocab_size: int
    seq_length: int
    num_samples: int
    seed: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> np.ndarray:
        check_index(index, self)
        rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, index], np.uint64)))
        return rng.integers(self.vocab_size, size=self.seq_length + 1, dtype=np.int64)
