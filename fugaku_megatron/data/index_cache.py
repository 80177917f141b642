"""Index arrays that fix a data set's sample order: documents, samples, shuffle, blend.

Rules and random stream are Megatron-core's (gpt_dataset.py, helpers.cpp). One process builds the
arrays blockwise and every reader maps them; node-local data is indexed on its node.

    PREFIX/cache/GPTDataset_indices/<MD5>-GPTDataset-train-description.txt
    PREFIX/cache/GPTDataset_indices/<MD5>-GPTDataset-train-document_index.npy
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..comm.agreement import agree, describe, on_root
from ..text.named_files import JsonObject
from .files import MappedFile

if TYPE_CHECKING:
    from ..comm.base import Comm

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
    if separate_last:
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
    if num_first < total:
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


# The arrays in files ------------------------------------------------------------------------------------------------------------

IN_MEMORY = 64 << 20  # bytes of an index that need no file
ABANDONED = 3600.0  # s after which an unfinished file belongs to a builder that was killed


class ArrayBlocks(NamedTuple):
    name: str
    dtype: np.dtype[Any] | type
    shape: tuple[int, ...]
    blocks: Iterable[np.ndarray]


Store = Callable[[ArrayBlocks], np.ndarray]  # returns the stored array
Build = Callable[[Store], None]


class IndexRequest(NamedTuple):
    """Index that a data set needs.

    prefix: data next to which the files are by default
    size: bytes in all arrays
    """

    prefix: str
    kind: str
    split: str
    description: JsonObject
    arrays: tuple[str, ...]
    size: int


@dataclass(frozen=True)
class IndexCache:
    """Index location. path: --data-cache-path; None: next to the data. in_memory: bytes kept
    without a file.
    """

    path: str | None = None
    in_memory: int = IN_MEMORY

    def folder(self, request: IndexRequest) -> Path:
        if self.path:
            return Path(self.path)
        return Path(request.prefix) / "cache" / f"{request.kind}_indices"


@dataclass(frozen=True)
class Index:
    arrays: dict[str, np.ndarray]
    files: tuple[MappedFile, ...] = ()

    def release(self) -> None:
        for file in self.files:
            file.release()

    def check(self) -> None:
        for file in self.files:
            file.check()


class _Files:
    def __init__(self, folder: Path, request: IndexRequest) -> None:
        self.folder = folder
        self.arrays = request.arrays
        self.text = json.dumps(request.description, indent=4)
        digest = hashlib.md5(self.text.encode(), usedforsecurity=False).hexdigest()
        self.base = f"{digest}-{request.kind}-{request.split}"
        self.mapped: list[MappedFile] = []

    def path(self, name: str) -> Path:
        return self.folder / f"{self.base}-{name}"

    def open(self) -> Index:
        if self.path("description.txt").read_text() != self.text:
            raise ValueError(f"{self.path('description.txt')} describes another index")
        files = {name: MappedFile(self.path(f"{name}.npy")) for name in self.arrays}
        return Index({name: file.array for name, file in files.items()}, tuple(files.values()))

    def build(self, build: Build) -> None:
        """Write all arrays, then the description, which validates them. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for aside in self.folder.glob(f"{self.base}-*.tmp"):
            with suppress(OSError):  # another builder may be removing it
                if time.time() - aside.stat().st_mtime > ABANDONED:
                    aside.unlink()
        build(self.store)
        self._write("description.txt", [self.text.encode()])

    def store(self, array: ArrayBlocks) -> np.ndarray:
        header = {
            "descr": np.lib.format.dtype_to_descr(np.dtype(array.dtype)),
            "fortran_order": False,
            "shape": array.shape,
        }

        def content() -> Iterable[np.ndarray]:
            for block in array.blocks:
                yield np.ascontiguousarray(block, array.dtype)
                for file in self.mapped:
                    file.release()

        self._write(f"{array.name}.npy", content(), header)
        file = MappedFile(self.path(f"{array.name}.npy"))
        self.mapped.append(file)
        return file.array

    def _write(self, name: str, blocks: Iterable[Any], header: JsonObject | None = None) -> None:
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


def provide(
    cache: IndexCache | None, request: IndexRequest, build: Build, comm: Comm | None = None
) -> Index:
    """Return an index, built by `build` on rank 0 unless cached. Collective.

    Raises ValueError if its files cannot be written.
    """
    cache = cache or IndexCache()
    small = request.size <= cache.in_memory
    if small and cache.path is None:
        return on_root(comm, lambda: _in_memory(build))
    files = _Files(cache.folder(request), request)
    reason = on_root(comm, lambda: _ensure(files, build))
    if reason and small:
        if comm is None or comm.rank == 0:
            print(
                f"note: --data-cache-path {cache.path}: {reason}: the index of the {request.split} data is kept in memory",
                flush=True,
            )
        return on_root(comm, lambda: _in_memory(build))

    def check(reason: str | None) -> None:
        if reason:
            raise ValueError(
                f"the index of {request.prefix}, {request.size / 2**20:.0f} MiB, cannot be written ({reason}): pass "
                "another folder with --data-cache-path"
            )

    def open_or_build() -> Index:
        check(_ensure(files, build))
        return files.open()

    check(reason)
    return open_or_build() if comm is None else agree(comm, open_or_build)


def _in_memory(build: Build) -> Index:
    arrays: dict[str, np.ndarray] = {}

    def store(array: ArrayBlocks) -> np.ndarray:
        parts = [np.asarray(block, array.dtype) for block in array.blocks]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        arrays[array.name] = whole.reshape(array.shape)
        return arrays[array.name]

    build(store)
    return Index(arrays)


def _ensure(files: _Files, build: Build) -> str | None:
    try:
        files.open()
    except (OSError, ValueError):
        try:
            files.build(build)
        except OSError as error:
            return describe(error)
    return None
