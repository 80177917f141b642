"""Ranks that get their micro-batches from one reading rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..comm.agreement import Nodes
from ..comm.base import Comm
from .dataset import Dataset
from .prefetcher import Prefetcher
from .sampler import BatchSizes, StepSamples, consecutive, global_batches, own_micro_batches

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
    samples: this rank's samples of the iteration, as from `micro_batches`
    """

    samples: np.ndarray

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
        self.samples = _scatter(self.readers.comm, next(self._reader) if self._reader else None)
        self._ready = (samples.astype(np.int64) for samples in self.samples)

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
