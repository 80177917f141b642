"""Collectives inside a node: ranks add each other's numbers in memory that they share, by the SIMD kernels.

    share_node(comm, kernels)       comm with such sums and gathers; over several nodes those are one of two levels (two_level.py)
    share_groups(groups, kernels)   the same for a grid's groups
    NodeTensor(comm, n, dtype)      a tensor that all ranks of comm hold, one copy for the ranks of a node

Every rank has a segment of one MPI shared-memory window, in two halves that are used in turn. A collective goes chunk by chunk:
each rank copies its chunk into its half and raises a flag; when all flags are up, each adds up its part of the chunk over all
segments and raises a second flag; when all of those are up, it takes the parts of the others. Chunks fit the second-level cache, so
that main memory moves only the tensors themselves, and each segment is in the memory of its rank's NUMA domain. Nothing here calls
MPI once the window exists: who waits for a blocking collective does its work, on all of its threads; a nonblocking one is done by
the engine's thread.

Left out: float64 and integers, maxima and broadcasts, which stay MPI's. Legend: p ranks, n elements per rank.
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

from .base import DONE, SUMMED_DTYPES, Comm, Handle, SoloComm, check, check_exchange, rows
from .engine import PATIENCE, Steps
from .grid import Groups
from .mpi import MPIComm
from .two_level import TwoLevelComm, in_stages, split_levels

HALF_BYTES = 2**20  # of a segment, which has two
LINE = 256  # bytes between two flags: the A64FX's cache line
FLAGS = 2  # of a rank: its chunk is there, its part of the sum is there
HEADER = 4096  # bytes of a segment before its halves, for the flags
SEGMENT_BYTES = HEADER + 2 * HALF_BYTES
SHARED_MEMORY = "/dev/shm"  # where the MPI libraries have it


def share_groups(groups: Groups, kernels: Any, node: int | None = None) -> Groups:
    """The groups that sum tensors, as `share_node` has them. Collective."""
    names = ("tp", "dp", "embedding", "ep", "edp", "cp")
    shared = {name: share_node(getattr(groups, name), kernels, node) for name in names}
    return replace(groups, **shared, etp=shared["tp"] if groups.etp is groups.tp else groups.etp)


def share_node(comm: Comm, kernels: Any, node: int | None = None) -> Comm:
    """`comm` with sums and gathers in the memory that its ranks share, at two levels if they are on several nodes. Collective.

    MPI does all of it if a node has one rank, if nodes have different numbers of ranks, and if a system has too little shared
    memory (containers often have 64 MiB). MPI's own BF16 and FP16 sums are done in stages (`two_level.in_stages`). Another
    implementation is returned unchanged. node: a number that the ranks of a node have in common; by default MPI finds them.
    """
    if comm.size == 1 or not isinstance(comm, MPIComm):
        return comm
    local = comm.split_node() if node is None else comm.split(node, comm.rank)
    shares, whole = comm.all_reduce(
        torch.tensor([local.size > 1 and _fits(local.size), local.size == comm.size]), "min"
    ).tolist()
    if shares and whole:
        return NodeComm(local, kernels)
    levels = split_levels(comm, local) if shares else None
    if levels is None:
        return in_stages(comm, comm.engine)
    between = in_stages(levels.between, comm.engine)
    return TwoLevelComm(
        comm, replace(levels, inside=NodeComm(local, kernels), between=between), comm.engine
    )


def _fits(ranks: int) -> bool:
    """Whether this system has the shared memory of so many ranks; not where nothing says how much it has."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free > 2 * ranks * SEGMENT_BYTES
    except OSError:
        return False


class _Window:
    """Memory of p ranks: `flags` (FLAGS, p, LINE / 8) int64 and `halves`, bytes (p, HALF_BYTES) each."""

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
        whole[comm.Get_rank()] = (
            0  # the first touch decides on which NUMA domain a page is: that of the rank that writes it
        )
        comm.Barrier()


def _bytes(rows: Tensor) -> Tensor:
    return rows.view(-1).view(torch.uint8)


def _window(sizes: Sequence[int], start: int, end: int) -> list[slice]:
    """Of parts of these sizes, one after another: what lies in [start, end) of the whole, counted from the start of each part."""
    begins = accumulate(sizes, initial=0)
    return [
        slice(min(max(start - begin, 0), size), min(max(end - begin, 0), size))
        for begin, size in zip(begins, sizes)
    ]


Ready = Callable[..., bool]  # returns, after at most so many seconds, whether a step is complete


class _WithoutMPI(Iterator[Ready]):
    """Steps that any thread may go through."""

    def __init__(self, steps: Iterator[Ready]) -> None:
        self._steps = steps

    def __next__(self) -> Ready:
        return next(self._steps)


class NodeComm(MPIComm):
    """An MPIComm whose ranks share memory. kernels: the library with sum_rows and the flags (`host.kernels`)."""

    inside_node = True

    def __init__(self, comm: MPIComm, kernels: Any) -> None:
        super().__init__(comm.mpi, comm.mpi_comm, comm.engine)
        self._kernels = kernels
        self._window = comm.engine.call(lambda: _Window(comm.mpi, comm.mpi_comm))
        self._chunks = 0
        self._last: Handle = DONE

    # Blocking verbs, by the caller's threads; nonblocking ones are the engine's ---------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        """Reduce `tensor` (any shape) in place."""
        self._now(self._all_reduce(check(tensor).detach().view(-1), op), tensor)
        return tensor

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Sum `tensor` (p * n,) over ranks, this rank's part into `output` (n,)."""
        self._now(
            self._reduce_scatter(output.detach().view(-1), rows(tensor, output, self.size)),
            output,
            tensor,
        )
        return output

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        """Every rank's `tensor` (n,) in rank order into `output` (p * n,)."""
        self._now(self._all_gather(output.detach(), tensor.detach()), output, tensor)
        return output

    def all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Tensor:
        """Rows of `tensor` (n, ...) to every rank, and theirs into `output` (m, ...)."""
        check_exchange(output, tensor, received, sent, self.size)
        self._now(
            self._all_to_all(output.detach(), tensor.detach(), received, sent), output, tensor
        )
        return output

    def _collective(self, steps: Steps, *tensors: Tensor) -> Handle:
        self._last = super()._collective(steps, *tensors)
        return self._last

    def _now(self, steps: Steps, *tensors: Tensor) -> None:
        """Steps without MPI by the caller, unless the engine still has an earlier collective of this communicator to do."""
        if not (isinstance(steps, _WithoutMPI) and self._last.done()):
            self._collective(steps, *tensors).wait()
            return
        for ready in steps:
            if not ready(PATIENCE):
                with self.engine.waiting():
                    while not ready(PATIENCE):
                        pass

    # Steps: in shared memory where it serves, MPI's elsewhere ---------------------------------------------------------------------

    def _all_reduce(self, flat: Tensor, op: str) -> Steps:
        shares = op == "sum" and flat.dtype in SUMMED_DTYPES
        return _WithoutMPI(self._sum(flat)) if shares else super()._all_reduce(flat, op)

    def _reduce_scatter(self, output: Tensor, parts: Tensor) -> Steps:
        shares = parts.dtype in SUMMED_DTYPES
        return (
            _WithoutMPI(self._sum_parts(output, parts))
            if shares
            else super()._reduce_scatter(output, parts)
        )

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        return _WithoutMPI(self._exchange(rows(output, tensor, self.size), tensor.view(-1)))

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Steps:
        width = math.prod(tensor.shape[1:]) * tensor.element_size()
        arriving, leaving = ([count * width for count in counts] for counts in (received, sent))
        return _WithoutMPI(self._exchange_rows(_bytes(output), _bytes(tensor), arriving, leaving))

    def _half(self, dtype: torch.dtype) -> tuple[Tensor, int]:
        """All ranks' segments (p, elements of a half) for the next chunk, and the chunk's number."""
        self._chunks += 1
        return self._window.halves[self._chunks % 2].view(dtype), self._chunks

    def _flag(self, which: int, number: int) -> Ready:
        """Raise this rank's flag; the result returns, after at most so many seconds, whether all are up."""
        flags = self._window.flags[which]
        self._kernels.set_flag(flags, self.rank, number)
        return lambda seconds=0.0: self._kernels.wait_for_flags(flags, number, seconds)

    def _sum(self, flat: Tensor) -> Iterator[Ready]:
        if self.size == 2:  # adding up everything takes no longer than passing the halves on
            yield from self._sum_two(flat, flat, flat)
            return
        for chunk in flat.split(HALF_BYTES // flat.element_size()):
            half, number = self._half(flat.dtype)
            shown = half[:, : chunk.numel()]  # (p, elements of the chunk)
            shown[self.rank].copy_(chunk)
            yield self._flag(0, number)
            parts = shown.tensor_split(self.size, dim=1)
            self._kernels.sum_rows(parts[self.rank], parts[self.rank][self.rank])
            yield self._flag(1, number)
            for rank, (own, part) in enumerate(
                zip(chunk.tensor_split(self.size), parts, strict=True)
            ):
                own.copy_(part[rank])

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
            self._kernels.sum_rows(
                half[:, self.rank * width : (self.rank + 1) * width], output[start : start + step]
            )

    def _sum_two(self, output: Tensor, own: Tensor, sent: Tensor) -> Iterator[Ready]:
        """Of two ranks each adds what the other shows it to its own, which stays where it is: a sum of two has no order."""
        for start in range(0, output.numel(), step := HALF_BYTES // own.element_size()):
            half, number = self._half(own.dtype)
            chunk = own[start : start + step]
            half[self.rank, : chunk.numel()].copy_(sent[start : start + step])
            yield self._flag(0, number)
            torch.add(chunk, half[1 - self.rank, : chunk.numel()], out=output[start : start + step])

    def _exchange_rows(
        self, output: Tensor, own: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Iterator[Ready]:
        """Bytes for every rank, each chunk after the (p + 1) numbers of its bytes for each of them and of those that follow it."""
        head = 8 * (self.size + 1)
        parts = own.split(list(sent))
        places = list(accumulate(received, initial=0))[:-1]
        for start in count(0, HALF_BYTES - head):
            half, number = self._half(torch.uint8)
            cut = _window(sent, start, start + HALF_BYTES - head)
            sizes = [part.stop - part.start for part in cut]
            half[self.rank, :head].view(torch.int64).copy_(
                torch.tensor([*sizes, max(0, sum(sent) - start - HALF_BYTES + head)])
            )
            torch.cat(
                [part[at] for part, at in zip(parts, cut, strict=True)],
                out=half[self.rank, head : head + sum(sizes)],
            )
            yield self._flag(0, number)
            heads = half[:, :head].clone().view(torch.int64)
            for rank, theirs in enumerate(heads.tolist()):
                begin = head + sum(theirs[: self.rank])
                length = theirs[self.rank]
                output[places[rank] : places[rank] + length].copy_(
                    half[rank, begin : begin + length]
                )
                places[rank] += length
            if not heads[:, -1].any():
                return

    def _exchange(self, output: Tensor, own: Tensor) -> Iterator[Ready]:
        inside = own.numel() and own.data_ptr() == output[self.rank].data_ptr()
        for start in range(0, own.numel(), step := HALF_BYTES // own.element_size()):
            chunk = own[start : start + step]
            half, number = self._half(own.dtype)
            half[self.rank, : chunk.numel()].copy_(chunk)
            yield self._flag(0, number)
            for rank in range(self.size):
                if rank != self.rank or not inside:
                    output[rank, start : start + step].copy_(half[rank, : chunk.numel()])


def _anonymous_file(name: str, nbytes: int) -> int:
    """A file of zeros that is in no folder."""
    file = os.memfd_create(name)
    os.truncate(file, nbytes)
    return file


def _opened(stack: contextlib.ExitStack, open_file: Callable[[], int | None]) -> int | None:
    """A file that is closed with `stack`, None where it cannot be opened."""
    with contextlib.suppress(OSError):
        if (file := open_file()) is not None:
            stack.callback(os.close, file)
            return file
    return None


class NodeTensor:
    """A tensor (n,) that all ranks of `comm` hold alike: one copy for the ranks of a node. Zeros at first. Collective.

    The ranks of a node map one anonymous file (memfd_create), which needs no space in /dev/shm and is gone with the last of them.
    Every rank has a copy of its own where they cannot, as in containers that do not see each other's processes, and under a `comm`
    without processes. writes: whether this rank writes it, as one rank of a node does. sharers: the ranks that have this copy.
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
            # The first touch decides on which NUMA domain a page is: ranks read all of it, so each takes a part.
            self.values.tensor_split(self.sharers)[self._node.rank].zero_()
            self._node.barrier()
        self.writes = self._node.rank == 0
        self._writers = comm.split(int(not self.writes), comm.rank) if split_node else comm

    @property
    def sharers(self) -> int:
        return self._node.size

    def _map(self, nbytes: int) -> mmap.mmap | None:
        """The memory of the node's first rank, or None on all of its ranks."""
        name = uuid.uuid4().hex
        with contextlib.ExitStack() as stack:
            file = (
                _opened(stack, lambda: _anonymous_file(name, nbytes))
                if self._node.rank == 0
                else None
            )
            name, path = self._node.broadcast_object((name, f"/proc/{os.getpid()}/fd/{file}"))
            if self._node.rank:
                file = _opened(
                    stack, lambda: os.open(path, os.O_RDWR) if name in os.readlink(path) else None
                )
            memory = None if file is None else mmap.mmap(file, nbytes)
            return (
                memory
                if self._node.all_reduce(torch.tensor([int(memory is not None)]), "min").item()
                else None
            )

    def written(self) -> None:
        """To be called after the ranks that write have written, before others read. Collective in the node."""
        self._node.barrier()

    def spread(self) -> None:
        """Give what the first rank of `comm` has written to all others. Collective."""
        if self.writes:
            self._writers.broadcast(self.values)
        self._node.barrier()
