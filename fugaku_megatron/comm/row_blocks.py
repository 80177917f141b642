"""Rows of a sequence that tensor-parallel ranks exchange block by block, overlapped with the matmuls that read or make them.

    gathering = blocks.gather(part)                       each rank sends its part of the rows to all others
    for rows in gathering:                                blocks as they arrive, this rank's own first
        multiply(gathering.rows[rows], ...)
    whole = gathering.wait()

    total = blocks.sum(rows, width, dtype)                each rank computes all rows of a partial sum
    for rows, block in total:                             the blocks of others first; each is sent while the next is computed
        multiply(..., out=block)
    part = total.wait()                                   this rank's part of the rows, summed over ranks

The bytes are those of an all_gather and a reduce_scatter. Here each two ranks exchange them as messages. Sums are formed in FP32 in
rank order and rounded once. Ranks start gatherings and sums in one order. Source of the idea: Wang et al. 2023, "Overlap
Communication with Dependent Computation via Decomposition" (ASPLOS). Left out: the matmuls (`nn.overlapped_ops`). Legend: t ranks,
n rows (s b) of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import Comm, Handle

GATHER, SUM = range(2)  # tags, because messages of a gathering and of a sum are sent at the same time


@dataclass(frozen=True)
class RowBlocks:
    """How the ranks of `comm` exchange rows, each rank's part in `count` blocks. kernels: the library with sum_rows."""

    comm: Comm
    kernels: Any
    count: int

    def gather(self, part: Tensor) -> Gathering:
        """Start to gather part (s / t, b, h) of each rank."""
        return Gathering(self, part)

    def sum(self, rows: int, width: int, dtype: torch.dtype) -> Summing:
        """Start to sum (rows, width) over ranks."""
        return Summing(self, rows, width, dtype)


def _cut(rows: int, count: int) -> list[slice]:
    """The rows of a part in so many blocks, or in blocks of one row."""
    count = min(rows, count)
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(*bounds) for bounds in zip(ends, ends[1:])]


def _others(rank: int, ranks: int, step: int) -> Iterator[int]:
    """All other ranks in the order of their distance, upwards or downwards, so that no two ranks send to the same one at once."""
    return ((rank + step * distance) % ranks for distance in range(1, ranks))


class Gathering:
    """A gathering under way. rows: (n, h), of which the blocks that have been iterated over are there."""

    def __init__(self, blocks: RowBlocks, part: Tensor) -> None:
        comm, part = blocks.comm, part.detach().contiguous()
        self._whole = part.new_empty(part.shape[0] * comm.size, *part.shape[1:])
        self.rows = self._whole.view(-1, part.shape[-1])
        own = part.view(-1, part.shape[-1])
        self._parts, self._rank = self.rows.view(comm.size, *own.shape), comm.rank
        self._parts[comm.rank].copy_(own)
        cut = _cut(len(own), blocks.count)
        self._coming = [(rank, block, comm.irecv(self._parts[rank, block], rank, GATHER))
                        for rank in _others(comm.rank, comm.size, -1) for block in cut]
        self._sent = [comm.isend(own[block], rank, GATHER) for rank in _others(comm.rank, comm.size, 1) for block in cut]

    def __iter__(self) -> Iterator[slice]:
        """Rows that are there: this rank's part, and each block when it has come."""
        length = self._parts.shape[1]
        yield slice(self._rank * length, (self._rank + 1) * length)
        for rank, block, handle in self._coming:
            handle.wait()
            yield slice(rank * length + block.start, rank * length + block.stop)

    def wait(self) -> Tensor:
        """The whole (s, b, h), when all blocks have come and gone."""
        for handle in (*(handle for _, _, handle in self._coming), *self._sent):
            handle.wait()
        return self._whole


class Summing:
    """A sum under way, whose blocks are made by who iterates over it."""

    def __init__(self, blocks: RowBlocks, rows: int, width: int, dtype: torch.dtype) -> None:
        comm, self._kernels = blocks.comm, blocks.kernels
        assert rows % comm.size == 0, f"{rows} rows over {comm.size} ranks"
        self._comm, self._length = comm, rows // comm.size
        self._received = torch.empty(comm.size, self._length, width, dtype=dtype)  # this rank's part, as each rank has it
        self._blocks = _cut(self._length, blocks.count)
        self._coming = [comm.irecv(self._received[rank, block], rank, SUM)
                        for rank in _others(comm.rank, comm.size, -1) for block in self._blocks]
        self._sent: list[Handle] = []

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, memory (rows, width) for them) of each block of others, and at last of this rank's part (n / t, width)."""
        comm, length = self._comm, self._length
        for rank in _others(comm.rank, comm.size, 1):
            for block in self._blocks:
                made = self._received.new_empty(block.stop - block.start, self._received.shape[-1])
                yield slice(rank * length + block.start, rank * length + block.stop), made
                self._sent.append(comm.isend(made, rank, SUM))
        yield slice(comm.rank * length, (comm.rank + 1) * length), self._received[comm.rank]

    def wait(self) -> Tensor:
        """This rank's part of the sum (n / t, width)."""
        for handle in self._coming:
            handle.wait()
        part = torch.empty_like(self._received[0])
        self._kernels.sum_rows(self._received.view(self._comm.size, -1), part.view(-1))
        for handle in self._sent:
            handle.wait()
        return part
