"""The arrays of a data set's index, which fix the order of its samples: documents, samples, shuffle, blend.

The rules and the random stream are Megatron-core's (gpt_dataset.py, helpers.cpp), so equal files, seeds and counts lead to its
order. What is not shuffled is computed in blocks, so that it need not fit in memory. One process builds the arrays and writes
them to files next to the data, and every reader maps them:

    PREFIX/cache/GPTDataset_indices/<hash>-GPTDataset-train-description.txt      what the arrays follow from, as JSON
    PREFIX/cache/GPTDataset_indices/<hash>-GPTDataset-train-document_index.npy   ... sample_index.npy, shuffle_index.npy

These are Megatron's names, and --data-cache-path names another folder, as Megatron's does; <hash> is the MD5 of the description,
which holds other fields than Megatron's. Files appear under their names when they are whole, the description last, so a builder may
be killed at any moment. A reader that does not see what rank 0 has built, because the data lies on the disk of its node, builds it
there. An index of at most `IndexCache.in_memory` bytes is kept in memory instead, unless a folder was named.
Left out: removing the files of data that is no longer used.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from ..comm.agreement import agree, describe, on_root
from .files import MappedFile

if TYPE_CHECKING:
    from ..comm.base import Comm

BLOCK = 2**20  # documents or samples at a time


def build_document_index(
    documents: np.ndarray | range, num_epochs: int, separate_last: bool, rng: np.random.RandomState
) -> np.ndarray:
    """int32 (epochs * documents,): document ids of all epochs shuffled together; with `separate_last` the last epoch by itself."""
    rows = np.empty((num_epochs, len(documents)), np.int32)
    rows[:] = (
        np.arange(documents.start, documents.stop, dtype=np.int32)
        if isinstance(documents, range)
        else documents
    )
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


def sample_blocks(
    lengths: np.ndarray, document_index: np.ndarray, seq_length: int, first: int = 0
) -> Iterator[np.ndarray]:
    """Consecutive parts, (at most BLOCK, 2) each, of the sample index, int32 or int64 (n + 1, 2): position in `document_index`
    and offset in that document where each of n samples begins. lengths: of the documents from number `first` on.

    Sample i takes tokens i*s to (i+1)*s, both included, of the documents laid end to end: neighbouring samples share one token.
    It begins in the first document that ends beyond its first token, so empty documents are skipped.
    """
    dtype, sample, ended = (
        sample_index_dtype(len(document_index)),
        0,
        0,
    )  # ended: tokens of the documents before this block
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
    """Of a shuffle index of `total` samples."""
    return np.uint32 if total < 2**32 - 2 else np.int64


def build_shuffle_index(num_first: int, total: int, rng: np.random.RandomState) -> np.ndarray:
    """uint32 or int64 (total,): a permutation of [0, num_first) followed by one of [num_first, total)."""
    index: np.ndarray = np.arange(total, dtype=shuffle_index_dtype(total))
    rng.shuffle(index[:num_first])
    if num_first < total:
        rng.shuffle(index[num_first:])
    return index


class Epochs(NamedTuple):
    """How often the data is read, and how its order is shuffled.

    begun: epochs of the order that the run began with, which is Megatron-core's. separate_last: the last of these is shuffled by
    itself. added: epochs after them, each shuffled by itself, for a run that became longer.
    """

    begun: int
    separate_last: bool = False
    added: int = 0

    @property
    def total(self) -> int:
        return self.begun + self.added

    def bounds(self, tokens: int, seq_length: int) -> list[int]:
        """Samples at the ends of the ranges that are shuffled by themselves. tokens: of an epoch."""
        ends = [*range(self.begun, self.total + 1)]
        if self.separate_last:
            ends.insert(0, self.begun - 1)
        return [count_samples(end * tokens, seq_length) for end in ends]


ADDED_DOCUMENTS, ADDED_SAMPLES = 1, 2  # random streams of the added epochs, next to the seed


def added_documents(documents: np.ndarray | range, epochs: int, seed: int) -> Iterator[np.ndarray]:
    """The document ids of each added epoch, int32 (documents,), in an order that does not depend on the number of epochs."""
    rng = np.random.RandomState([seed, ADDED_DOCUMENTS])
    for _ in range(epochs):
        yield build_document_index(documents, 1, False, rng)


def added_samples(bounds: Sequence[int], seed: int) -> Iterator[np.ndarray]:
    """The sample numbers of each added epoch, shuffled. bounds: samples at the end of the epochs before, and of each added one.

    The first sample has the tokens that the epoch before has left over, so it stays the first: every token is then trained as
    often as all others, or once more.
    """
    rng = np.random.RandomState([seed, ADDED_SAMPLES])
    for first, end in zip(bounds, bounds[1:]):
        index: np.ndarray = np.arange(first, end, dtype=np.int64)
        rng.shuffle(index[1:])
        yield index


def blending_blocks(
    weights: Sequence[float], num_samples: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
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


# The arrays in files ------------------------------------------------------------------------------------------------------------

IN_MEMORY = 64 << 20  # bytes of an index that need no file
ABANDONED = 3600.0  # s after which an unfinished file belongs to a builder that was killed


class Store(Protocol):
    """Takes an array as consecutive blocks, and returns it as it is kept."""

    def __call__(
        self,
        name: str,
        dtype: np.dtype | type,
        shape: tuple[int, ...],
        blocks: Iterable[np.ndarray],
    ) -> np.ndarray: ...


Build = Callable[[Store], None]


@dataclass(frozen=True)
class IndexCache:
    """Where indices are kept. path: --data-cache-path; None: next to the data. in_memory: bytes that are not worth a file."""

    path: str | None = None
    in_memory: int = IN_MEMORY

    def folder(self, prefix: str, kind: str) -> Path:
        return Path(self.path) if self.path else Path(prefix) / "cache" / f"{kind}_indices"


@dataclass(frozen=True)
class Index:
    """Arrays by name, and the files that they are mapped from, none for arrays in memory."""

    arrays: dict[str, np.ndarray]
    files: tuple[MappedFile, ...] = ()

    def release(self) -> None:
        for file in self.files:
            file.release()

    def check(self) -> None:
        """Raise ValueError where a file was cut."""
        for file in self.files:
            file.check()


class _Files:
    """The files of one index in `folder`; their names follow from `description`."""

    def __init__(self, folder: Path, kind: str, split: str, description: dict[str, Any]) -> None:
        self.folder, self.text = folder, json.dumps(description, indent=4)
        digest = hashlib.md5(self.text.encode(), usedforsecurity=False).hexdigest()
        self.base = f"{digest}-{kind}-{split}"
        self.mapped: list[MappedFile] = []

    def path(self, name: str) -> Path:
        return self.folder / f"{self.base}-{name}"

    def open(self, names: Iterable[str]) -> Index:
        """Map all arrays. OSError or ValueError where a file is missing or not whole."""
        if self.path("description.txt").read_text() != self.text:
            raise ValueError(f"{self.path('description.txt')} describes another index")
        files = {name: MappedFile(self.path(f"{name}.npy")) for name in names}
        return Index({name: file.npy() for name, file in files.items()}, tuple(files.values()))

    def build(self, build: Build) -> None:
        """Write all arrays, then the description, which makes them valid. OSError when the folder takes no files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_abandoned()
        build(self.store)
        self._write("description.txt", [self.text.encode()])

    def store(
        self,
        name: str,
        dtype: np.dtype | type,
        shape: tuple[int, ...],
        blocks: Iterable[np.ndarray],
    ) -> np.ndarray:
        """Write an array block by block and map it. A builder reads its earlier arrays in order: their pages go back meanwhile."""
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
            "fortran_order": False,
            "shape": shape,
        }

        def content() -> Iterable[np.ndarray]:
            for block in blocks:
                yield np.ascontiguousarray(block, dtype)
                for file in self.mapped:
                    file.release()

        self._write(f"{name}.npy", content(), header)
        file = MappedFile(self.path(f"{name}.npy"))
        self.mapped.append(file)
        return file.npy()

    def _write(
        self, name: str, blocks: Iterable[Any], header: dict[str, Any] | None = None
    ) -> None:
        """A file that appears when it is whole."""
        path = self.path(name)
        aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(aside, "wb") as file:
                if header:
                    np.lib.format.write_array_header_1_0(file, header)
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def _remove_abandoned(self) -> None:
        for aside in self.folder.glob(f"{self.base}-*.tmp"):
            with suppress(OSError):  # another builder may be removing it
                if time.time() - aside.stat().st_mtime > ABANDONED:
                    aside.unlink()


def provide(
    cache: IndexCache,
    prefix: str,
    kind: str,
    split: str,
    description: dict[str, Any],
    names: tuple[str, ...],
    size: int,
    build: Build,
    comm: Comm | None = None,
) -> Index:
    """The arrays `names`, of `size` bytes together, which `build` makes on rank 0 unless they are there already. Collective.

    prefix: of the data, next to which the files are by default. Raises ValueError on every rank when they cannot be written.
    """
    small = size <= cache.in_memory
    if small and cache.path is None:
        return on_root(comm, lambda: _in_memory(build))
    files = _Files(cache.folder(prefix, kind), kind, split, description)
    reason = on_root(comm, lambda: _ensure(files, names, build))
    if reason and small:
        if comm is None or comm.rank == 0:
            print(
                f"note: --data-cache-path {cache.path}: {reason}: the index of the {split} data is kept in memory",
                flush=True,
            )
        return on_root(comm, lambda: _in_memory(build))
    check = partial(_require, prefix, size)
    check(reason)

    def open_or_build() -> Index:
        check(_ensure(files, names, build))
        return files.open(names)

    return open_or_build() if comm is None else agree(comm, open_or_build)


def _require(prefix: str, size: int, reason: str | None) -> None:
    if reason:
        raise ValueError(
            f"the index of {prefix}, {size / 2**20:.0f} MiB, cannot be written ({reason}): pass another folder with "
            "--data-cache-path"
        )


def _in_memory(build: Build) -> Index:
    arrays: dict[str, np.ndarray] = {}

    def store(
        name: str, dtype: np.dtype | type, shape: tuple[int, ...], blocks: Iterable[np.ndarray]
    ) -> np.ndarray:
        parts = [np.asarray(block, dtype) for block in blocks]
        arrays[name] = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(shape)
        return arrays[name]

    build(store)
    return Index(arrays)


def _ensure(files: _Files, names: tuple[str, ...], build: Build) -> str | None:
    """Build what is not there, or say why it cannot be written."""
    try:
        files.open(names)
    except (OSError, ValueError):
        try:
            files.build(build)
        except OSError as error:
            return describe(error)
    return None
