"""Tensor- and sequence-parallel communication as autograd functions, and row exchanges overlapped with matmuls.

The names and conjugate pairs are Megatron-LM's mappings: Shoeybi et al. 2019 (arXiv:1909.08053), figure 3;
Korthikanti et al. 2022 (arXiv:2205.05198), figure 5. Second derivatives are not supported.

Shapes: s sequence, b micro-batch, h hidden, t tensor-parallel size, n = s b rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .base import Comm, Handle

GATHER_TAG = 0
SUM_TAG = 1  # a gathering and a sum may be in progress at the same time

Result = TypeVar("Result")
Gradients = tuple[Tensor | None, ...]  # of forward's arguments


class Function(torch.autograd.Function, Generic[Result]):
    """Torch's autograd function with a typed result: `class Scale(Function[Tensor])`."""

    if TYPE_CHECKING:

        @classmethod
        def apply(cls, *args: Any) -> Result: ...


def _all_reduced(tensor: Tensor, comm: Comm) -> Tensor:
    # A copy: autograd may pass one gradient tensor to several branches, or save an output.
    return comm.all_reduce(tensor.detach().clone(memory_format=torch.contiguous_format))


def _gathered(tensor: Tensor, comm: Comm) -> Tensor:
    shards = tensor.new_empty((comm.size, *tensor.shape))  # (t, s, b, h / t)
    comm.all_gather(shards, tensor.detach().contiguous())
    return torch.cat(shards.unbind(0), dim=-1)  # (s, b, h)


def _own_shard(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.detach().chunk(comm.size, dim=-1)[comm.rank].contiguous()  # (s, b, h / t)


def gather_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """All-gather the first dimension without gradient: (s / t, b, h) -> (s, b, h)."""
    if comm is None:
        return tensor
    whole = tensor.new_empty(tensor.shape[0] * comm.size, *tensor.shape[1:])
    return comm.all_gather(whole, tensor.detach().contiguous())


def reduce_scatter_sequence(tensor: Tensor, comm: Comm | None) -> Tensor:
    """Reduce-scatter the first dimension without gradient: (s, b, h) -> (s / t, b, h)."""
    if comm is None:
        return tensor
    shard = tensor.new_empty(_shard_shape(tensor, comm))
    return comm.reduce_scatter(shard, tensor.detach().contiguous())


def _shard_shape(tensor: Tensor, comm: Comm) -> tuple[int, ...]:
    length = tensor.shape[0]
    assert length % comm.size == 0, f"first dimension {length} over {comm.size} ranks"
    return length // comm.size, *tensor.shape[1:]


class _Saving(Function[Any]):
    @staticmethod
    def forward(
        ctx: Any, forward: Callable[[], Any], backward: Callable[..., Any], *tensors: Tensor
    ) -> Any:
        result, saved = forward()
        ctx.save_for_backward(*saved)
        ctx.gradients = backward
        ctx.others = len(tensors)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Gradients:
        found = ctx.gradients(*grads, *ctx.saved_tensors)
        own = (found,) if isinstance(found, Tensor) else found
        return None, None, *own, *(None for _ in range(ctx.others - len(own)))


Saved = tuple[Tensor | None, ...]
SavedResult = tuple[Tensor, Saved]


def apply_saving(
    forward: Callable[[], tuple[Result, Saved]],
    backward: Callable[..., Any],
    *tensors: Tensor | None,
) -> Result:
    """Return forward's result, with gradients of the first of `tensors`, in order; the others only make
    the result need a backward.

    Tensors that backward reads are saved, and not read from an enclosing function: autograd then frees them after use.

    forward: computes the result, a tensor or a tuple, and the saved tensors
    backward: computes gradients of tensors from the result's gradients and the saved tensors
    """
    result: Result = _Saving.apply(forward, backward, *tensors)
    return result


def apply_conjugates(
    forward: Callable[..., Result], backward: Callable[..., Any], *tensors: Tensor
) -> Result:
    """Return forward(*tensors), a tensor or a tuple; its backward is backward(*gradients)."""
    return apply_saving(lambda: (forward(*tensors), ()), backward, *tensors)


def _identity(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.view_as(tensor)


def _unread(tensor: Tensor, comm: Comm) -> Tensor:
    return tensor.new_empty(1).expand(_shard_shape(tensor, comm))


def _mapped(
    tensor: Tensor, comm: Comm, forward: Callable[..., Tensor], backward: Callable[..., Tensor]
) -> Tensor:
    if comm.size == 1:
        return tensor
    return apply_conjugates(partial(forward, comm=comm), partial(backward, comm=comm), tensor)


def copy_to_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """Enter a column-parallel region: identity forward, all-reduce backward."""
    return _mapped(tensor, comm, _identity, _all_reduced)


def reduce_from_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """Leave a row-parallel region: all-reduce forward, identity backward."""
    return _mapped(tensor, comm, _all_reduced, _identity)


def gather_from_tensor_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """All-gather the last dimension, (s, b, h / t) -> (s, b, h); backward slices."""
    return _mapped(tensor, comm, _gathered, _own_shard)


def gather_from_sequence_parallel(tensor: Tensor, comm: Comm) -> Tensor:
    """All-gather the sequence, (s / t, b, h) -> (s, b, h); backward reduce-scatters."""
    return _mapped(tensor, comm, gather_sequence, reduce_scatter_sequence)


def reduce_scatter_to_sequence_parallel(
    tensor: Tensor, comm: Comm, needs_values: bool = True
) -> Tensor:
    """Reduce-scatter the sequence, (s, b, h) -> (s / t, b, h); backward all-gathers.

    needs_values: False returns arbitrary values, for a recomputed forward whose output nobody reads
    """
    forward = reduce_scatter_sequence if needs_values else _unread
    return _mapped(tensor, comm, forward, gather_sequence)


@dataclass(frozen=True)
class RowBlocks:
    """An exchange of rows in `count` blocks a rank, overlapped with matmuls.

    Sums are formed in FP32 in rank order and rounded once. Ranks start exchanges in one order.
    Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition"
    (ASPLOS).
    """

    comm: Comm
    kernels: Any
    count: int


def _cut(rows: int, count: int) -> list[slice]:
    count = min(rows, count)
    ends = [rows * i // count for i in range(count + 1)]
    return [slice(*bounds) for bounds in zip(ends, ends[1:])]


def _others(rank: int, ranks: int, step: int) -> Iterator[int]:
    """Iterate over the other ranks by distance: no two ranks send to one rank at once."""
    return ((rank + step * distance) % ranks for distance in range(1, ranks))


class Gathering:
    """Iteration over a gathering's blocks, this rank's first. rows: (n, h), valid in earlier blocks."""

    def __init__(self, blocks: RowBlocks, shard: Tensor) -> None:
        comm = blocks.comm
        shard = shard.detach().contiguous()
        self._whole = shard.new_empty(shard.shape[0] * comm.size, *shard.shape[1:])
        self.rows = self._whole.view(-1, shard.shape[-1])
        own = shard.view(-1, shard.shape[-1])
        self._shards = self.rows.view(comm.size, *own.shape)
        self._rank = comm.rank
        self._shards[comm.rank].copy_(own)
        cut = _cut(len(own), blocks.count)
        self._receives = [
            (rank, block, comm.irecv(self._shards[rank, block], rank, GATHER_TAG))
            for rank in _others(comm.rank, comm.size, -1)
            for block in cut
        ]
        self._sends = [
            comm.isend(own[block], rank, GATHER_TAG)
            for rank in _others(comm.rank, comm.size, 1)
            for block in cut
        ]

    def __iter__(self) -> Iterator[slice]:
        length = self._shards.shape[1]
        yield slice(self._rank * length, (self._rank + 1) * length)
        for rank, block, handle in self._receives:
            handle.wait()
            yield slice(rank * length + block.start, rank * length + block.stop)

    def wait(self) -> Tensor:
        for _, _, handle in self._receives:
            handle.wait()
        for handle in self._sends:
            handle.wait()
        return self._whole


class Summing:
    """Iteration over blocks of a reduce-scatter; the caller fills each yielded output, which is then sent.

    rows: of all ranks together
    """

    def __init__(self, blocks: RowBlocks, rows: int, width: int, dtype: torch.dtype) -> None:
        comm = blocks.comm
        self._kernels = blocks.kernels
        assert rows % comm.size == 0, f"{rows} rows over {comm.size} ranks"
        self._comm = comm
        self._length = rows // comm.size
        # This rank's rows, one term from each rank.
        self._terms = torch.empty(comm.size, self._length, width, dtype=dtype)
        self._blocks = _cut(self._length, blocks.count)
        self._receives = [
            comm.irecv(self._terms[rank, block], rank, SUM_TAG)
            for rank in _others(comm.rank, comm.size, -1)
            for block in self._blocks
        ]
        self._sends: list[Handle] = []

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over (rows, output (rows, width)), this rank's rows (n / t, width) last."""
        comm = self._comm
        length = self._length
        for rank in _others(comm.rank, comm.size, 1):
            for block in self._blocks:
                term = self._terms.new_empty(block.stop - block.start, self._terms.shape[-1])
                yield slice(rank * length + block.start, rank * length + block.stop), term
                self._sends.append(comm.isend(term, rank, SUM_TAG))
        yield slice(comm.rank * length, (comm.rank + 1) * length), self._terms[comm.rank]

    def wait(self) -> Tensor:
        for handle in self._receives:
            handle.wait()
        total = torch.empty_like(self._terms[0])
        self._kernels.sum_rows(self._terms.view(self._comm.size, -1), total.view(-1))
        for handle in self._sends:
            handle.wait()
        return total
