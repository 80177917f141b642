"""Collectives inside a node: ranks sum in shared memory with the SIMD kernels.

Every rank has a segment of an MPI shared-memory window, in two halves used alternately. A collective runs in chunks that fit the
second-level cache: each rank copies its chunk into its half and raises a flag; after all flags, it sums its slice over all
segments and raises a second flag; then it copies the other slices. Blocking collectives run on the caller's threads,
nonblocking ones on the engine's thread. Float64, integers, maxima and broadcasts remain MPI's.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..start.environment import SHARED_MEMORY
from .base import DONE, SUMMED_DTYPES, Comm, Handle, SoloComm, rows
from .engine import PATIENCE, Steps
from .grid import Groups
from .mpi import MPIComm
from .two_level import TwoLevelComm, in_stages, split_levels

HALF_BYTES = 2**20  # a segment has two halves
LINE = 256  # bytes between two flags: the A64FX's cache line
FLAGS = 2  # per rank: chunk written, slice summed
HEADER = 4096  # bytes for the flags at the beginning of a segment
SEGMENT_BYTES = HEADER + 2 * HALF_BYTES


def share_groups(groups: Groups, kernels: Any, node: int | None = None) -> Groups:
    names = ("tp", "dp", "embedding", "ep", "edp", "cp")
    shared = {name: share_node(getattr(groups, name), kernels, node) for name in names}
    return replace(groups, **shared, etp=shared["tp"] if groups.etp is groups.tp else groups.etp)


def share_node(comm: Comm, kernels: Any, node: int | None = None) -> Comm:
    """Return `comm` with sums and gathers in shared memory, at two levels if its ranks are on
    several nodes. Collective.

    MPI does everything if a node has one rank, if nodes have different numbers of ranks, or if
    shared memory is too small; BF16 and FP16 sums then run in stages
    (`two_level.in_stages`). Communicators without MPI stay unchanged.
    """
    if comm.size == 1 or not isinstance(comm, MPIComm):
        return comm
    local = comm.split_node() if node is None else comm.split(node, comm.rank)
    conditions = torch.tensor([local.size > 1 and _fits(local.size), local.size == comm.size])
    shares, is_one_node = comm.all_reduce(conditions, "min").tolist()
    if shares and is_one_node:
        return NodeComm(local, kernels)
    levels = split_levels(comm, local) if shares else None
    if levels is None:
        return in_stages(comm, comm.engine)
    between = in_stages(levels.between, comm.engine)
    levels = replace(levels, inside=NodeComm(local, kernels), between=between)
    return TwoLevelComm(comm, levels, comm.engine)


def _fits(ranks: int) -> bool:
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > 2 * ranks * SEGMENT_BYTES
    except OSError:
        return False


class _Window:
    """Shared memory of p ranks: `flags`, FLAGS x (p, LINE / 8) int64, and `halves`, 2 x (p, HALF_BYTES) bytes."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        size = comm.Get_size()
        self._window = mpi.Win.Allocate_shared(SEGMENT_BYTES, 1, mpi.INFO_NULL, comm)
        address = self._window.Shared_query(0)[0].address
        memory = np.frombuffer(
            (ctypes.c_uint8 * (size * SEGMENT_BYTES)).from_address(address), np.uint8
        )
        whole = torch.from_numpy(memory).view(size, SEGMENT_BYTES)
        self.flags = [whole[:, i * LINE : (i + 1) * LINE].view(torch.int64) for i in range(FLAGS)]
        self.halves = [
            whole[:, HEADER + i * HALF_BYTES : HEADER + (i + 1) * HALF_BYTES] for i in range(2)
        ]
        whole[comm.Get_rank()] = 0  # first touch: allocate in this rank's NUMA domain
        comm.Barrier()

    def free(self) -> None:
        self._window.Free()


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _window(sizes: Sequence[int], start: int, end: int) -> list[slice]:
    begins = accumulate(sizes, initial=0)
    return [
        slice(min(max(start - begin, 0), size), min(max(end - begin, 0), size))
        for begin, size in zip(begins, sizes)
    ]


Ready = Callable[..., bool]  # waits at most the given seconds; True if the step is complete


class _WithoutMPI(Iterator[Ready]):
    def __init__(self, steps: Iterator[Ready]) -> None:
        self._steps = steps

    def __next__(self) -> Ready:
        return next(self._steps)


class NodeComm(MPIComm):
    """An MPIComm whose ranks share memory. kernels: library with sum_rows and flags (`host.kernels`)"""

    inside_node = True

    def __init__(self, comm: MPIComm, kernels: Any) -> None:
        super().__init__(comm.mpi, comm.mpi_comm, comm.engine)
        self._kernels = kernels
        self._window = comm.engine.call(lambda: _Window(comm.mpi, comm.mpi_comm))
        self._chunks = 0
        self._last: Handle = DONE
        self._blocks = False  # the caller of the collective waits for it

    def free(self) -> None:
        """Free shared memory and communicator. Collective."""
        self.engine.call(self._window.free)
        super().free()

    # Blocking collectives run on the caller's threads, nonblocking ones on the engine's -------------------------------------------

    def _wait(self, start: Callable[..., Handle], output: Tensor, *operands: Any) -> Tensor:
        self._blocks = self._last.done()
        try:
            return super()._wait(start, output, *operands)
        finally:
            self._blocks = False

    def _collective(self, steps: Steps, *tensors: Tensor) -> Handle:
        if not (self._blocks and isinstance(steps, _WithoutMPI)):
            self._last = super()._collective(steps, *tensors)
            return self._last
        for ready in steps:
            if not ready(PATIENCE):
                with self.engine.waiting():
                    while not ready(PATIENCE):
                        if self.engine.leaves:
                            raise RuntimeError("the process ends before its collective")
        return DONE

    # Steps in shared memory, or MPI's ---------------------------------------------------------------------------------------------

    def _all_reduce(self, flat: Tensor, op: str) -> Steps:
        if op == "sum" and flat.dtype in SUMMED_DTYPES:
            return _WithoutMPI(self._sum(flat))
        return super()._all_reduce(flat, op)

    def _reduce_scatter(self, output: Tensor, parts: Tensor) -> Steps:
        if parts.dtype in SUMMED_DTYPES:
            return _WithoutMPI(self._sum_parts(output, parts))
        return super()._reduce_scatter(output, parts)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        return _WithoutMPI(self._exchange(rows(output, tensor, self.size), tensor.view(-1)))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Steps:
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        received_bytes = [rows * width for rows in received]
        sent_bytes = [rows * width for rows in sent]
        return _WithoutMPI(
            self._exchange_rows(_bytes(output), _bytes(tensor), received_bytes, sent_bytes)
        )

    def _half(self, dtype: torch.dtype) -> tuple[Tensor, int]:
        self._chunks += 1
        return self._window.halves[self._chunks % 2].view(dtype), self._chunks

    def _flag(self, which: int, number: int) -> Ready:
        flags = self._window.flags[which]
        self._kernels.set_flag(flags, self.rank, number)
        return lambda seconds=0.0: self._kernels.wait_for_flags(flags, number, seconds)

    def _sum(self, flat: Tensor) -> Iterator[Ready]:
        if self.size == 2:  # summing everything is as fast as copying the other slice
            yield from self._sum_two(flat, flat, flat)
            return
        for chunk in flat.split(HALF_BYTES // flat.element_size()):
            half, number = self._half(flat.dtype)
            copies = half[:, : chunk.numel()]  # (p, elements of the chunk)
            copies[self.rank].copy_(chunk)
            yield self._flag(0, number)
            slices = copies.tensor_split(self.size, dim=1)
            self._kernels.sum_rows(slices[self.rank], slices[self.rank][self.rank])
            yield self._flag(1, number)
            for rank, own in enumerate(chunk.tensor_split(self.size)):
                own.copy_(slices[rank][rank])

    def _sum_parts(self, output: Tensor, parts: Tensor) -> Iterator[Ready]:
        if self.size == 2:
            yield from self._sum_two(output, parts[self.rank], parts[1 - self.rank])
            return
        step = HALF_BYTES // (parts.element_size() * self.size)
        for start in range(0, output.numel(), step):
            half, number = self._half(parts.dtype)
            sent = parts[:, start : start + step]  # (p, elements of the chunk)
            width = sent.shape[1]
            half[self.rank, : self.size * width].view(self.size, width).copy_(sent)
            yield self._flag(0, number)
            terms = half[:, self.rank * width : (self.rank + 1) * width]
            self._kernels.sum_rows(terms, output[start : start + step])

    def _sum_two(self, output: Tensor, own: Tensor, sent: Tensor) -> Iterator[Ready]:
        """Add the other rank's elements: a sum of two has no order."""
        step = HALF_BYTES // own.element_size()
        for start in range(0, output.numel(), step):
            half, number = self._half(own.dtype)
            chunk = own[start : start + step]
            half[self.rank, : chunk.numel()].copy_(sent[start : start + step])
            yield self._flag(0, number)
            torch.add(chunk, half[1 - self.rank, : chunk.numel()], out=output[start : start + step])

    def _exchange_rows(
        self, output: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Iterator[Ready]:
        """Exchange bytes; a chunk begins with p + 1 numbers: its bytes for each rank and the remaining bytes."""
        head = 8 * (self.size + 1)
        segments = own.split(list(sent))
        offsets = list(accumulate(received, initial=0))[:-1]
        for start in count(0, HALF_BYTES - head):
            half, number = self._half(torch.uint8)
            cut = _window(sent, start, start + HALF_BYTES - head)
            sizes = [each.stop - each.start for each in cut]
            remaining = max(0, sum(sent) - start - HALF_BYTES + head)
            half[self.rank, :head].view(torch.int64).copy_(torch.tensor([*sizes, remaining]))
            chunk = [segment[each] for segment, each in zip(segments, cut, strict=True)]
            torch.cat(chunk, out=half[self.rank, head : head + sum(sizes)])
            yield self._flag(0, number)
            heads = half[:, :head].clone().view(torch.int64)
            for rank, theirs in enumerate(heads.tolist()):
                begin = head + sum(theirs[: self.rank])
                length = theirs[self.rank]
                target = output[offsets[rank] : offsets[rank] + length]
                target.copy_(half[rank, begin : begin + length])
                offsets[rank] += length
            if not heads[:, -1].any():
                return

    def _exchange(self, output: Tensor, own: Tensor) -> Iterator[Ready]:
        inside = own.numel() and own.data_ptr() == output[self.rank].data_ptr()
        step = HALF_BYTES // own.element_size()
        for start in range(0, own.numel(), step):
            chunk = own[start : start + step]
            half, number = self._half(own.dtype)
            half[self.rank, : chunk.numel()].copy_(chunk)
            yield self._flag(0, number)
            for rank in range(self.size):
                if rank != self.rank or not inside:
                    output[rank, start : start + step].copy_(half[rank, : chunk.numel()])


def _anonymous_file(name: str, nbytes: int) -> int:
    file = os.memfd_create(name)
    os.truncate(file, nbytes)
    return file


def _opened(stack: contextlib.ExitStack, open_file: Callable[[], int | None]) -> int | None:
    with contextlib.suppress(OSError):
        if (file := open_file()) is not None:
            stack.callback(os.close, file)
            return file
    return None


class NodeTensor:
    """A zero-initialised tensor (n,) with equal values on all ranks of `comm`, one copy for a node. Collective.

    A node's ranks map one anonymous file (memfd_create), which needs no space in /dev/shm. Ranks have separate copies if they
    cannot see each other's processes, as between containers, or if `comm` has no processes.

    sharers: ranks with this copy
    """

    def __init__(self, comm: Comm, n: int, dtype: torch.dtype) -> None:
        split_node = getattr(comm, "split_node", None) if n else None
        self._node: Comm = split_node() if split_node else SoloComm()
        memory = self._map(n * dtype.itemsize) if self._node.size > 1 else None
        if memory is None:
            self._node = SoloComm()
            self.values = torch.zeros(n, dtype=dtype)
        else:
            self.values = torch.frombuffer(memory, dtype=dtype)
            # First touch: all ranks read the tensor, so its pages are distributed over their NUMA domains.
            self.values.tensor_split(self.sharers)[self._node.rank].zero_()
            self._node.barrier()
        self.writes = self._node.rank == 0
        self._writers = comm.split(int(not self.writes), comm.rank) if split_node else comm

    @property
    def sharers(self) -> int:
        return self._node.size

    def _map(self, nbytes: int) -> mmap.mmap | None:
        """Map the memory of the node's first rank; None on all ranks if one fails."""
        name = uuid.uuid4().hex
        with contextlib.ExitStack() as stack:
            file = None
            if self._node.rank == 0:
                file = _opened(stack, lambda: _anonymous_file(name, nbytes))
            name, path = self._node.broadcast_object((name, f"/proc/{os.getpid()}/fd/{file}"))
            if self._node.rank:
                file = _opened(
                    stack, lambda: os.open(path, os.O_RDWR) if name in os.readlink(path) else None
                )
            memory = None if file is None else mmap.mmap(file, nbytes)
            mapped = self._node.all_reduce(torch.tensor([int(memory is not None)]), "min")
            return memory if mapped.item() else None

    def written(self) -> None:
        """Wait until the node's writer has written. Collective in the node."""
        self._node.barrier()

    def broadcast(self) -> None:
        """Broadcast the first rank's values. Collective."""
        if self.writes:
            self._writers.broadcast(self.values)
        self._node.barrier()
