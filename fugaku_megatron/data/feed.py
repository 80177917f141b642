"""One rank reads the data for all ranks of its node that need some, and for other nodes where there are more than MAX_NODES.

A file that thousands of nodes open at once brings a parallel file system down. The reader fetches the micro-batches of an
iteration for each rank of its group, ahead in a thread, and hands them out when the iteration begins: the ranks of a group may be
of different pipeline stages, which could not wait for each other later. Left out: ranks that get tokens from tensor-parallel
neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..comm.base import Comm
from ..comm.objects import scatter_object
from ..comm.topology import Nodes
from .dataset import Dataset
from .sampler import Prefetcher, consecutive, fetch, first_sample, global_batches

Batch = tuple[Tensor, Tensor]  # tokens and labels, int64 (s, b) each
MAX_NODES = 7000  # that open one file; Fugaku's documentation asks for staging above it


@dataclass(frozen=True)
class Feed:
    """The ranks that one reader serves, of which it is the first. dp_ranks: the data-parallel rank of each."""

    comm: Comm
    dp_ranks: tuple[int, ...]

    @property
    def reads(self) -> bool:
        """Whether this rank opens the data."""
        return self.comm.rank == 0


def build_feed(world: Comm, nodes: Nodes, dp_rank: int, needs_data: bool) -> Feed | None:
    """The feed of this rank, None where it needs no data. Collective over `world`."""
    share = -(-nodes.count // MAX_NODES)  # nodes to a reader
    comm = world.split(nodes.number // share if needs_data else nodes.count, world.rank)
    return Feed(comm, tuple(comm.all_gather_object(dp_rank))) if needs_data else None


class Handout:
    """The micro-batches of this rank, in order; the reader hands out those of an iteration when `begin` is called.

    dataset: on the reader. Iterations begin at sample `consumed`; `size` gives the global batch size of the one that begins at a
    sample, `samples` the numbers of its samples. The samples of one iteration go to a rank as int32.
    """

    def __init__(self, feed: Feed, dataset: Dataset | None, consumed: int, size: Callable[[int], int], micro_batch_size: int,
                 dp_size: int, samples: Callable[[int, int], Sequence[int]] = consecutive) -> None:
        self.feed, self.micro_batch_size, self.dp_size = feed, micro_batch_size, dp_size
        batches = global_batches(dataset, consumed, size, samples)
        self._reader = Prefetcher(self._iterations(dataset, batches), depth=1) if feed.reads else None
        self._ready: Iterator[Batch] = iter(())

    def _iterations(self, dataset: Dataset, batches: Iterator[Sequence[int]]) -> Iterator[list[np.ndarray]]:
        """For every iteration, the micro-batches of each rank of the feed, (micro-batches, 2, s, b) int32; in numpy as `fetch`."""
        for batch in batches:
            count = len(batch) // (self.micro_batch_size * self.dp_size)
            parts: dict[int, np.ndarray] = {}
            for dp_rank in set(self.feed.dp_ranks):
                firsts = (first_sample(0, m, self.micro_batch_size, dp_rank, self.dp_size) for m in range(count))
                pairs = (fetch(dataset, batch[first : first + self.micro_batch_size]) for first in firsts)
                parts[dp_rank] = np.stack([np.stack([part.numpy() for part in pair]).astype(np.int32) for pair in pairs])
            yield [parts[dp_rank] for dp_rank in self.feed.dp_ranks]

    def begin(self) -> None:
        """Before each iteration. Collective over the feed. An error of the reader is raised by the reader."""
        part = scatter_object(self.feed.comm, next(self._reader) if self._reader else None)
        self._ready = (tuple(pair.long()) for pair in torch.from_numpy(part))

    def __iter__(self) -> Handout:
        return self

    def __next__(self) -> Batch:
        """The next tokens and labels of the iteration, (s, b) each."""
        return next(self._ready)

    def close(self) -> None:
        """Stop reading ahead."""
        if self._reader:
            self._reader.close()
