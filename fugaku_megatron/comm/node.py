"""Collectives inside a node: ranks add each other's numbers in memory that they share, by the SIMD kernels.

    share_node(comm, kernels)       comm with such sums and gathers where all its ranks are on one node; else comm itself
    share_groups(groups, kernels)   the same for a grid's groups

Every rank has a segment of one MPI shared-memory window, in two halves that are used in turn. A collective goes chunk by chunk:
each rank copies its chunk into its half and raises a flag; when all flags are up, each adds up its part of the chunk over all
segments and raises a second flag; when all of those are up, it takes the parts of the others. Chunks fit the second-level cache, so
that main memory moves only the tensors themselves. Nothing here calls MPI once the window exists: who waits for a blocking
collective does its work, on all of its threads; a nonblocking one is done by the engine's thread.

Left out: float64 and integers, maxima and broadcasts, which stay MPI's. Legend: p ranks, n elements per rank.
Test: pytest tests/mpi/test_mpi_comm.py
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import DONE, Comm, Handle
from .engine import Steps
from .grid import Groups
from .mpi import MPIComm
from .tensors import check, rows

HALF_BYTES = 2**20  # of a segment, which has two
LINE = 256  # bytes between two flags: the A64FX's cache line
FLAGS = 2  # of a rank: its chunk is there, its part of the sum is there
HEADER = 4096  # bytes of a segment before its halves, for the flags
SEGMENT_BYTES = HEADER + 2 * HALF_BYTES
SHARED_MEMORY = "/dev/shm"  # where the MPI libraries have it
PATIENCE = 0.1  # s of waiting before signals are looked at
SHARED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def share_node(comm: Comm, kernels: Any) -> Comm:
    """`comm` with collectives in shared memory where its ranks are on one node and more than one; else `comm`. Collective.

    Also `comm` itself where it is not MPI's, or where the system has too little shared memory (containers often have 64 MiB).
    """
    if comm.size == 1 or not isinstance(comm, MPIComm):
        return comm
    local = comm.split_node()
    fits = local.size == comm.size and shutil.disk_usage(SHARED_MEMORY).free > 2 * comm.size * SEGMENT_BYTES
    if not comm.all_reduce(torch.tensor(int(fits)), "min"):
        return comm
    return NodeComm(comm, kernels)


def share_groups(groups: Groups, kernels: Any) -> Groups:
    """The groups that sum tensors, as `share_node` has them. Collective."""
    return replace(groups, **{name: share_node(getattr(groups, name), kernels) for name in ("tp", "dp", "embedding")})


class _Window:
    """Memory of p ranks: `flags` (FLAGS, p, LINE / 8) int64 and `halves`, bytes (p, HALF_BYTES) each."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        size = comm.Get_size()
        self._window = mpi.Win.Allocate_shared(SEGMENT_BYTES, 1, mpi.INFO_NULL, comm)
        address = self._window.Shared_query(0)[0].address
        memory = np.frombuffer((ctypes.c_uint8 * (size * SEGMENT_BYTES)).from_address(address), np.uint8)
        whole = torch.from_numpy(memory).view(size, SEGMENT_BYTES)
        self.flags = [whole[:, i * LINE : (i + 1) * LINE].view(torch.int64) for i in range(FLAGS)]
        self.halves = [whole[:, HEADER + i * HALF_BYTES : HEADER + (i + 1) * HALF_BYTES] for i in range(2)]
        whole[comm.Get_rank(), :HEADER] = 0
        comm.Barrier()


class NodeComm(MPIComm):
    """An MPIComm whose ranks share memory. kernels: the library with sum_rows and the flags (`host.kernels`)."""

    def __init__(self, comm: MPIComm, kernels: Any) -> None:
        super().__init__(comm.mpi, comm.mpi_comm, comm.engine)
        self._kernels = kernels
        self._window = comm.engine.call(lambda: _Window(comm.mpi, comm.mpi_comm))
        self._chunks = 0
        self._last: Handle = DONE

    # The verbs: shared memory where it serves, MPI elsewhere ---------------------------------------------------------------------

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """Start an all_reduce of `tensor` (any shape) in place."""
        if op != "sum" or check(tensor).dtype not in SHARED_DTYPES:
            return super().iall_reduce(tensor, op)
        return self._behind(self._sum(tensor.detach().view(-1)), tensor)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` (any shape) in place."""
        if op != "sum" or check(tensor).dtype not in SHARED_DTYPES:
            return super().all_reduce(tensor, op)
        self._now(self._sum(tensor.detach().view(-1)), tensor)
        return tensor

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start a reduce_scatter of `tensor` (p * n,) into `output` (n,)."""
        if tensor.dtype not in SHARED_DTYPES:
            return super().ireduce_scatter(output, tensor)
        parts = rows(tensor, output, self.size)
        return self._behind(self._sum_parts(output.detach().view(-1), parts), output, tensor)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` (p * n,) over ranks, this rank's part into `output` (n,)."""
        if tensor.dtype not in SHARED_DTYPES:
            return super().reduce_scatter(output, tensor)
        self._now(self._sum_parts(output.detach().view(-1), rows(tensor, output, self.size)), output, tensor)
        return output

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start an all_gather of `tensor` (n,) into `output` (p * n,)."""
        return self._behind(self._exchange(rows(output, tensor, self.size), tensor.detach().view(-1)), output, tensor)

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` (n,) in rank order into `output` (p * n,)."""
        self._now(self._exchange(rows(output, tensor, self.size), tensor.detach().view(-1)), output, tensor)
        return output

    def _behind(self, steps: Steps, *tensors: Tensor) -> Handle:
        self._last = self._collective(steps, *tensors)
        return self._last

    def _now(self, steps: Steps, *tensors: Tensor) -> None:
        """Done by the caller, unless the engine still has an earlier collective of this communicator to do."""
        if not self._last.done():
            self._behind(steps, *tensors).wait()
            return
        for ready in steps:
            while not ready(PATIENCE):
                pass

    # Steps ------------------------------------------------------------------------------------------------------------------------

    def _half(self, dtype: torch.dtype) -> tuple[Tensor, int]:
        """All ranks' segments (p, elements of a half) for the next chunk, and the chunk's number."""
        self._chunks += 1
        return self._window.halves[self._chunks % 2].view(dtype), self._chunks

    def _flag(self, which: int, number: int) -> Callable[..., bool]:
        """Raise this rank's flag; the result tells, after so many seconds at most, whether all are up."""
        flags = self._window.flags[which]
        self._kernels.set_flag(flags, self.rank, number)
        return lambda seconds=0.0: self._kernels.wait_for_flags(flags, number, seconds)

    def _sum(self, flat: Tensor) -> Steps:
        for chunk in flat.split(HALF_BYTES // flat.element_size()):
            half, number = self._half(flat.dtype)
            shown = half[:, : chunk.numel()]  # (p, elements of the chunk)
            shown[self.rank].copy_(chunk)
            yield self._flag(0, number)
            if self.size == 2:  # adding up everything takes no longer than passing the halves on
                self._kernels.sum_rows(shown, chunk)
                continue
            parts = shown.tensor_split(self.size, dim=1)
            self._kernels.sum_rows(parts[self.rank], parts[self.rank][self.rank])
            yield self._flag(1, number)
            for rank, (own, part) in enumerate(zip(chunk.tensor_split(self.size), parts, strict=True)):
                own.copy_(part[rank])

    def _sum_parts(self, output: Tensor, parts: Tensor) -> Steps:
        step = HALF_BYTES // (parts.element_size() * self.size)
        for start in range(0, output.numel(), step):
            half, number = self._half(parts.dtype)
            sent = parts[:, start : start + step]  # (p, elements of the chunk)
            width = sent.shape[1]
            half[self.rank, : self.size * width].view(self.size, width).copy_(sent)
            yield self._flag(0, number)
            self._kernels.sum_rows(half[:, self.rank * width : (self.rank + 1) * width], output[start : start + step])

    def _exchange(self, output: Tensor, own: Tensor) -> Steps:
        inside = own.numel() and own.data_ptr() == output[self.rank].data_ptr()
        for start in range(0, own.numel(), step := HALF_BYTES // own.element_size()):
            chunk = own[start : start + step]
            half, number = self._half(own.dtype)
            half[self.rank, : chunk.numel()].copy_(chunk)
            yield self._flag(0, number)
            for rank in range(self.size):
                if rank != self.rank or not inside:
                    output[rank, start : start + step].copy_(half[rank, : chunk.numel()])
