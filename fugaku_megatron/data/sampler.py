"""Samples of a data-parallel rank, and loading them in the background.

Micro-batches stay numpy arrays: torch in the prefetching thread would start more OpenMP threads.
Shapes: s = sequence length, b = micro-batch size.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

import numpy as np
import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from .dataset import Dataset
from .marks import TokenCounts

T = TypeVar("T")
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


_CPUS = os.sched_getaffinity(
    0
)  # the mask of the process before its main thread is pinned: a thread inherits its creator's mask


class Prefetcher(Generic[T]):
    """Iterator over `source` that loads up to `depth` items ahead in a thread.

    `next` raises the source's exception in place of the item. `close` (or leaving `with`) stops the
    thread after the current item.
    """

    def __init__(self, source: Iterable[T], depth: int = 2):
        assert depth >= 1
        self._source = iter(source)
        self._room = threading.Semaphore(depth)
        self._ready: SimpleQueue[Future[T]] = SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="data-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        os.sched_setaffinity(0, _CPUS)
        ended = False
        while not ended:
            self._room.acquire()
            if self._closed:
                return
            item: Future[T] = Future()
            try:
                item.set_result(next(self._source))
            except BaseException as error:  # StopIteration, or the caller's to handle
                item.set_exception(error)
                ended = True
            self._ready.put(item)

    def __iter__(self) -> Prefetcher[T]:
        return self

    def __next__(self) -> T:
        if self._closed:
            raise ValueError("this Prefetcher was closed; make a new one to go on")
        item = self._ready.get()
        if item.exception() is None:
            self._room.release()
        else:
            self._ready.put(item)  # for the next call
        return item.result()

    def close(self) -> None:
        self._closed = True
        self._room.release()
        self._thread.join()

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


MAX_NODES = 7000  # that open one file; Fugaku's documentation asks for staging above it


@dataclass(frozen=True)
class ReaderGroup:
    """Ranks served by one reader, the first. dp_ranks: data-parallel rank of each."""

    comm: Comm
    dp_ranks: tuple[int, ...]

    @property
    def reads(self) -> bool:
        return self.comm.rank == 0


def build_reader_group(
    world: Comm, nodes: Nodes, dp_rank: int, needs_data: bool
) -> ReaderGroup | None:
    """Return this rank's reader group, None if it needs no data. Collective over `world`."""
    share = -(-nodes.count // MAX_NODES)  # nodes to a reader
    comm = world.split(nodes.number // share if needs_data else nodes.count, world.rank)
    return ReaderGroup(comm, tuple(comm.all_gather_object(dp_rank))) if needs_data else None


class ReaderBatches:
    """Iterator over this rank's micro-batches; `begin` makes the reader send an iteration's, as
    int32.

    dataset: on the reader
    size: global batch size at a sample
    work: token counts of this rank's marked samples
    """

    work: TokenCounts

    def __init__(
        self,
        readers: ReaderGroup,
        dataset: Dataset | None,
        consumed: int,
        size: BatchSizes,
        micro_batch_size: int,
        dp_size: int,
        samples: StepSamples = consecutive,
    ) -> None:
        self.readers = readers
        self.micro_batch_size = micro_batch_size
        self.dp_size = dp_size
        self._reader: Prefetcher[list[np.ndarray]] | None = None
        if readers.reads:
            assert dataset is not None, "the reader has the dataset"
            self._reader = Prefetcher(
                self._iterations(dataset, global_batches(dataset, consumed, size, samples)), depth=1
            )
        self._ready: Iterator[np.ndarray] = iter(())

    def _iterations(
        self, dataset: Dataset, batches: Iterator[Sequence[int]]
    ) -> Iterator[list[np.ndarray]]:
        for batch in batches:
            parts: dict[int, np.ndarray] = {}
            for dp_rank in set(self.readers.dp_ranks):
                fetched = own_micro_batches(
                    dataset, batch, self.micro_batch_size, dp_rank, self.dp_size
                )
                parts[dp_rank] = np.stack([each.astype(np.int32) for each in fetched])
            yield [parts[dp_rank] for dp_rank in self.readers.dp_ranks]

    def begin(self) -> None:
        """Send or receive an iteration's micro-batches. Collective; only the reader raises its
        error.
        """
        part = _scatter(self.readers.comm, next(self._reader) if self._reader else None)
        if part.ndim == 4:
            self.work = TokenCounts.of(part)
        self._ready = (samples.astype(np.int64) for samples in part)

    def __iter__(self) -> ReaderBatches:
        return self

    def __next__(self) -> np.ndarray:
        return next(self._ready)

    def close(self) -> None:
        if self._reader:
            self._reader.close()


def _scatter(comm: Comm, parts: Sequence[np.ndarray] | None) -> np.ndarray:
    if parts is None:
        shape = comm.recv(torch.empty(4, dtype=torch.int64), 0).tolist()
        shape = [size for size in shape if size]
        return comm.recv(torch.empty(shape, dtype=torch.int32), 0).numpy()
    for rank in range(1, comm.size):
        comm.send(torch.tensor((0,) * (4 - parts[rank].ndim) + parts[rank].shape), rank)
        comm.send(torch.from_numpy(parts[rank]), rank)
    return parts[0]
