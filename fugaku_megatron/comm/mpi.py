"""The communicator of real jobs, on mpi4py's buffer calls: no pickling and no copies of tensors.

This is the only file that imports mpi4py, and it does so inside functions: importing this module needs no MPI.
MPI has no BF16 or FP16. Data of these types travels as 16-bit integers. Their sum is an all-to-all of the parts followed by a
local sum in FP32, in rank order and rounded once; all_reduce then gathers the results. Their maximum and minimum are formed in
FP32. MPI counts are C ints: larger tensors travel in pieces of MAX_COUNT elements.
Left out: starting and ending a job (launch.py), groups (grid.py), progress threads.

Shapes: p ranks, n elements per rank.
Test: pytest tests/mpi
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import Handle
from .tensors import HALF, OPS, check, rank_order_sum, rows

MAX_COUNT = 2**30  # elements per call: below 2^31 - 1, the largest C int
# Elements of a sum per call, and the minimum of them for each rank. An MPI sums in temporary memory as large as its message, and
# malloc requests large blocks from the system each time: 475 MB between two ranks take 0.18 s in one call, 0.05 s in 29.
SUMMED, SUMMED_PER_RANK = 2**22, 2**16
STAGE = 2**25  # elements received at once for a BF16/FP16 sum: limits its extra memory to 64 MiB
SMALL = 2**15  # up to so many elements a BF16/FP16 all_reduce gathers everything in one call: latency matters, not bytes


def mpi_world() -> MPIComm:
    """MPI_COMM_WORLD, after requesting MPI_THREAD_MULTIPLE. ImportError or RuntimeError when there is no MPI."""
    if int(os.environ.get("MPI_LOCALNRANKS", 1)) > len(os.sched_getaffinity(0)):
        # More ranks than cores: MPICH's waiting ranks must yield the core (measured: 8 ranks on 2 cores, 3 times faster).
        # Open MPI's launcher does this by itself.
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    import mpi4py

    mpi4py.rc.thread_level = "multiple"
    from mpi4py import MPI

    return MPIComm(MPI.COMM_WORLD)


def _buffer(tensor: Tensor) -> np.ndarray:
    """The tensor's memory as a flat array of a type that MPI has."""
    flat = check(tensor).detach().view(-1)
    if flat.dtype in HALF:
        flat = flat.view(torch.int16)
    return (flat.view(torch.uint8) if flat.dtype == torch.bool else flat).numpy()


def _pieces(flat: np.ndarray, limit: int = MAX_COUNT) -> Iterator[np.ndarray]:
    """Consecutive parts of `flat`, none longer than `limit` and MAX_COUNT elements."""
    size = min(MAX_COUNT, limit)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


def _overlap(a: Tensor, b: Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


class _Requests:
    """The handle of started operations; holds the tensor, whose memory MPI is using."""

    def __init__(self, requests: list[Any], tensor: Tensor) -> None:
        self._requests, self._tensor = requests, tensor

    def wait(self) -> None:
        for request in self._requests:
            request.Wait()
        self._tensor = None


class MPIComm:
    """An mpi4py communicator as a `comm.base.Comm`. MPI's errors are raised as mpi4py.MPI.Exception."""

    def __init__(self, mpi_comm: Any) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, mpi_comm
        self.rank, self.size = mpi_comm.Get_rank(), mpi_comm.Get_size()

    @property
    def thread_level(self) -> str:
        """What MPI_Init_thread provided: "single", "funneled", "serialized" or "multiple"."""
        names = ("single", "funneled", "serialized", "multiple")
        return {getattr(self._mpi, f"THREAD_{name.upper()}"): name for name in names}[self._mpi.Query_thread()]

    @property
    def library(self) -> str:
        """Name and version of the MPI library, for the log."""
        return " ".join(self._mpi.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0").split())

    def _op(self, op: str, dtype: torch.dtype) -> Any:
        assert op in OPS, op
        name = "max" if dtype == torch.bool and op == "sum" else op  # a logical or on bytes 0 and 1
        return getattr(self._mpi, name.upper())

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        check(tensor)
        mpi_op = self._op(op, tensor.dtype)
        if self.size == 1:
            return tensor
        if tensor.dtype in HALF:
            return self._half_sum(tensor) if op == "sum" else self._through_fp32(tensor, op)
        for piece in _pieces(_buffer(tensor), max(SUMMED, SUMMED_PER_RANK * self.size)):
            self._comm.Allreduce(self._mpi.IN_PLACE, piece, mpi_op)
        return tensor

    def _through_fp32(self, tensor: Tensor, op: str) -> Tensor:
        tensor.detach().copy_(self.all_reduce(tensor.detach().float(), op))
        return tensor

    def _half_sum(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().view(-1)
        if flat.numel() * self.size <= SMALL:
            parts = flat.new_empty(self.size, flat.numel())  # (p, n)
            flat.copy_(rank_order_sum(self.all_gather(parts, flat)))
            return tensor
        for piece in flat.split(max(1, STAGE // self.size) * self.size):
            share = -(-piece.numel() // self.size)
            whole = piece
            if piece.numel() < share * self.size:
                whole = piece.new_zeros(share * self.size)
                whole[: piece.numel()] = piece
            self.all_gather(whole, self.reduce_scatter(piece.new_empty(share), whole))
            if whole is not piece:
                piece.copy_(whole[: piece.numel()])
        return tensor

    def all_gather(self, output: Tensor, tensor: Tensor) -> Tensor:
        parts = rows(output, tensor, self.size)  # (p, n)
        inside = _overlap(output, tensor)
        assert not inside or tensor.data_ptr() == parts[self.rank].data_ptr(), "the part overlaps another rank's place"
        if not inside and (self.size == 1 or tensor.numel() > MAX_COUNT):
            parts[self.rank].copy_(tensor.detach().view(-1))
        if self.size == 1:
            return output
        if tensor.numel() > MAX_COUNT:
            for root in range(self.size):
                self.broadcast(parts[root], root)
        else:
            self._comm.Allgather(self._mpi.IN_PLACE if inside else _buffer(tensor), _buffer(output))
        return output

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> Tensor:
        parts = rows(tensor, output, self.size)  # (p, n)
        if self.size == 1:
            output.detach().view(-1).copy_(parts[0])
        elif tensor.dtype in HALF:
            self._half_reduce_scatter(output.detach().view(-1), parts)
        elif _overlap(output, tensor):  # MPI's in-place form would put every rank's result at the beginning
            output.copy_(self.reduce_scatter(torch.empty_like(output), tensor))
        else:
            self._reduce_scatter_columns(output.detach().view(-1), parts)
        return output

    def _reduce_scatter_columns(self, output: Tensor, parts: Tensor) -> None:
        step = min(MAX_COUNT, max(SUMMED // self.size, SUMMED_PER_RANK))
        for start in range(0, output.numel(), step):
            sent = parts[:, start : start + step].contiguous()  # (p, step), no copy when it is the whole
            self._comm.Reduce_scatter_block(_buffer(sent), _buffer(output[start : start + step]), self._op("sum", parts.dtype))

    def _half_reduce_scatter(self, output: Tensor, parts: Tensor) -> None:
        step = max(1, STAGE // self.size)
        for start in range(0, output.numel(), step):
            sent = parts[:, start : start + step].contiguous()  # (p, step), no copy when it is the whole
            received = torch.empty_like(sent)
            self._comm.Alltoall(_buffer(sent), _buffer(received))
            output[start : start + step] = rank_order_sum(received)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        for piece in _pieces(_buffer(tensor)):
            self._comm.Bcast(piece, root)
        return tensor

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        assert dst != self.rank, "a blocking send to oneself never returns"
        for piece in _pieces(_buffer(tensor)):
            self._comm.Send(piece, dst, tag)

    def recv(self, tensor: Tensor, src: int, tag: int = 0) -> Tensor:
        assert src != self.rank, "a blocking receive from oneself never returns"
        for piece in _pieces(_buffer(tensor)):
            self._comm.Recv(piece, src, tag)
        return tensor

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        return _Requests([self._comm.Isend(piece, dst, tag) for piece in _pieces(_buffer(tensor))], tensor)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        return _Requests([self._comm.Irecv(piece, src, tag) for piece in _pieces(_buffer(tensor))], tensor)

    def barrier(self) -> None:
        self._comm.Barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        return self._comm.bcast(obj, root)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        return self._comm.gather(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        return self._comm.allgather(obj)

    def split(self, color: int, key: int) -> MPIComm:
        return MPIComm(self._comm.Split(color, key))

    def abort(self, code: int = 1) -> None:
        """MPI_Abort on MPI_COMM_WORLD, whichever group this is. The caller has said why: MPI's own line is not shown."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        self._mpi.COMM_WORLD.Abort(code)
        os._exit(code)  # where MPI_Abort only asks the launcher and returns
