"""The communication of tensor-parallel layers: Megatron's mappings as autograd functions, and rows exchanged block by block.

    copy_to                  forward identity         backward all-reduce
    reduce_from              forward all-reduce       backward identity
    gather_from              forward all-gather       backward own part        (last dimension)
    gather_from_sequence     forward all-gather       backward reduce-scatter  (first dimension)
    reduce_scatter_to_seq.   forward reduce-scatter   backward all-gather      (first dimension)

`comm` is the tensor parallel communicator of t ranks; size 1 returns the input itself. Sources: Shoeybi et al. 2019
(arXiv:1909.08053), the conjugate operators f and g of figure 3; for the last two, sequence parallelism, Korthikanti et al. 2022
(arXiv:2205.05198), figure 5. Operations that gather their input themselves, so that they keep this rank's part of it only, call
`gather_sequence` and `reduce_scatter_sequence` in their own forward and backward. `RowBlocks` overlaps the exchange with the
matmuls that read or make the rows. Left out: second derivatives, the matmuls (`nn.overlapped_ops`).

Shapes: s sequence, b micro-batch, h hidden, t tensor parallel size, n rows (s b) of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .base import Comm, Handle

GATHER, SUM = range(
    2
)  # tags, because messages of a gathering and of a sum are sent at the same time


def _all_reduced(tensor: Tensor, comm: Comm) -> Tensor:
    # A copy, because autograd may hand one gradient tensor to several branches, or keep an output for its backward.
    return comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))


def _gathered(tensor: Tensor, comm: Comm) -> Tensor:
    parts = tensor.new_empty((comm.size, *tensor.shape))  # (t, s, b, h / t)
    comm.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts.unbind(0), dim=-1)  # (s, b, h)


def _own_part(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.detach().chunk(comm.size, dim=-1)[comm.rank].contiguous()  # (s, b, h / t)


def gather_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """(s / t, b, h) -> (s, b, h): the parts of all ranks, in a new tensor without gradient. comm None: `tensor` itself.

    The sequence is the first dimension, so a rank's part is one block of the result.
    """
    if comm is None:
        return tensor
    whole = tensor.new_empty(tensor.shape[0] * comm.size, *tensor.shape[1:])
    return comm.all_gather(whole, tensor.detach().contiguous())


def reduce_scatter_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """(s, b, h) -> (s / t, b, h): this rank's part of the sum over ranks, without gradient. comm None: `tensor` itself."""
    if comm is None:
        return tensor
    return comm.reduce_scatter(
        tensor.new_empty(_part_shape(tensor, comm)), tensor.detach().contiguous()
    )


def _part_shape(tensor: Tensor, comm: Comm) -> tuple[int, ...]:
    length = tensor.shape[0]
    assert length % comm.size == 0, f"first dimension {length} over {comm.size} ranks"
    return length // comm.size, *tensor.shape[1:]


class _Mapping(Function):
    """forward(tensor, comm), and backward(grad, comm) on the gradient."""

    @staticmethod
    def forward(ctx, tensor, comm, forward, backward):
        ctx.comm = comm
        ctx.other_way = backward
        return forward(tensor, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.other_way(grad, ctx.comm), None, None, None


class _SumInPlace(Function):
    @staticmethod
    def forward(ctx, tensor, comm):
        ctx.mark_dirty(tensor)  # autograd then refuses a backward that had saved the partial sum
        return comm.all_reduce(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _same(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.view_as(tensor)


def _unread(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.new_empty(1).expand(_part_shape(tensor, comm))


def _mapped(
    tensor: Tensor, comm: Comm, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Tensor:
    return tensor if comm.size == 1 else _Mapping.apply(tensor, comm, forward, backward)


def copy_to_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """Enter a column-parallel region: identity; gradients are summed over `comm`. Any shape."""
    return _mapped(tensor, comm, _same, _all_reduced)


def reduce_from_tensor_parallel(tensor: Tensor, comm: Comm, inplace: bool = False) -> Tensor:
    """Leave a row-parallel region: the sum over `comm`; gradients pass unchanged. Any shape.

    `inplace` saves the copy by overwriting `tensor` (contiguous, not a leaf): for an output nobody else reads. If an
    earlier operation had saved it, its backward raises RuntimeError.
    """
    if inplace and comm.size > 1:
        return _SumInPlace.apply(tensor, comm)
    return _mapped(tensor, comm, _all_reduced, _same)


def gather_from_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s, b, h / t) -> (s, b, h): concatenate the last dimension in rank order; gradients are cut to the own part."""
    return _mapped(tensor, comm, _gathered, _own_part)


def gather_from_sequence_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """(s / t, b, h) -> (s, b, h): enter a region of whole sequences; gradients are summed, each rank keeping its part."""
    return _mapped(tensor, comm, gather_sequence, reduce_scatter_sequence)


def reduce_scatter_to_sequence_parallel(
    tensor: Tensor, comm: Comm, needs_values: bool = True
) -> Tensor:
    """(s, b, h) -> (s / t, b, h): leave a row-parallel region with this rank's part of the sum; gradients are gathered.

    needs_values: False leaves the sum out, where backward will follow and nobody reads the result; its values may be anything then.
    """
    return _mapped(
        tensor, comm, reduce_scatter_sequence if needs_values else _unread, gather_sequence
    )


@dataclass(frozen=True)
class RowBlocks:
    """How the ranks of `comm` exchange rows, each rank's part in `count` blocks. kernels: the library with sum_rows.

        gathering = blocks.gather(part)                       each rank sends its part of the rows to all others
        for rows in gathering:                                blocks as they arrive, this rank's own first
            multiply(gathering.rows[rows], ...)
        whole = gathering.wait()

        total = blocks.sum(rows, width, dtype)                each rank computes all rows of a partial sum
        for rows, block in total:                             the blocks of others first; each is sent while the next is computed
            multiply(..., out=block)
        part = total.wait()                                   this rank's part of the rows, summed over ranks

    The bytes are those of an all_gather and a reduce_scatter. Sums are formed in FP32 in rank order and rounded once. Ranks start
    gatherings and sums in one order. Source of the idea: Wang et al. 2023, "Overlap Communication with Dependent Computation via
    Decomposition" (ASPLOS).
    """

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
        comm = blocks.comm
        part = part.detach().contiguous()
        self._whole = part.new_empty(part.shape[0] * comm.size, *part.shape[1:])
        self.rows = self._whole.view(-1, part.shape[-1])
        own = part.view(-1, part.shape[-1])
        self._parts = self.rows.view(comm.size, *own.shape)
        self._rank = comm.rank
        self._parts[comm.rank].copy_(own)
        cut = _cut(len(own), blocks.count)
        self._coming = [
            (rank, block, comm.irecv(self._parts[rank, block], rank, GATHER))
            for rank in _others(comm.rank, comm.size, -1)
            for block in cut
        ]
        self._sent = [
            comm.isend(own[block], rank, GATHER)
            for rank in _others(comm.rank, comm.size, 1)
            for block in cut
        ]

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
        comm = blocks.comm
        self._kernels = blocks.kernels
        assert rows % comm.size == 0, f"{rows} rows over {comm.size} ranks"
        self._comm = comm
        self._length = rows // comm.size
        self._received = torch.empty(
            comm.size, self._length, width, dtype=dtype
        )  # this rank's part, as each rank has it
        self._blocks = _cut(self._length, blocks.count)
        self._coming = [
            comm.irecv(self._received[rank, block], rank, SUM)
            for rank in _others(comm.rank, comm.size, -1)
            for block in self._blocks
        ]
        self._sent: list[Handle] = []

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, memory (rows, width) for them) of each block of others, and at last of this rank's part (n / t, width)."""
        comm = self._comm
        length = self._length
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
