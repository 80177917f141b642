"""Communicator on mpi4py's nonblocking buffer calls, without pickling or copying tensors.

Only this module imports mpi4py, inside functions. The engine's thread makes every MPI call. MPI has
no BF16 or FP16: such data is sent as 16-bit integers; sums are an all-to-all and a local FP32 sum
in rank order, rounded once; maxima and minima are formed in FP32.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..start import environment, witness
from .base import DONE, HALF, OPS, Comm, Handle, check, check_exchange, rank_order_sum, rows
from .engine import Engine, Steps

THREAD_LEVELS = ("single", "funneled", "serialized", "multiple")
THREAD_LEVEL_VARIABLE = "FUGAKU_MEGATRON_MPI_THREAD_LEVEL"  # requested level
MAX_COUNT = 2**30  # elements per call, below the largest C int
# Elements of a sum per call, and the minimum for each rank. MPI allocates temporary memory as large as the message each time:
# 475 MB between two ranks take 0.18 s in one call, 0.05 s in 29.
SUMMED = 2**22
SUMMED_PER_RANK = 2**16
STAGE = 2**25  # elements received at once for a BF16/FP16 sum: limits its extra memory to 64 MiB
SMALL = 2**15  # elements of all ranks up to which a BF16/FP16 all_reduce is one all_gather
ABORT_SECONDS = 5


def mpi_world(waits: Callable[[bool], Any] = bool) -> MPIComm:
    """Initialise MPI on a new MPI thread and return the world communicator.

    waits: as in `Engine`

    Raises ValueError if the MPI library does not support the thread level.
    """
    level = os.environ.get(THREAD_LEVEL_VARIABLE, "serialized").lower()
    if level not in THREAD_LEVELS[1:]:
        raise ValueError(
            f"{THREAD_LEVEL_VARIABLE}={level}: expected one of {', '.join(THREAD_LEVELS[1:])}; correct or unset it"
        )
    crowded = environment.processes_of_node() > len(os.sched_getaffinity(0))
    if crowded:
        # MPICH's ranks must yield the core in blocking calls such as MPI_Comm_split; Open MPI's launcher sets this itself.
        os.environ.setdefault("MPIR_CVAR_ENABLE_HEAVY_YIELD", "1")
    engine = Engine(crowded=crowded, waits=waits)
    world = engine.call(lambda: _initialise(engine, level))
    if world.thread_level == "single":
        raise ValueError(
            f"{world.library} grants MPI_THREAD_SINGLE where MPI_THREAD_{level.upper()} was asked for: communication "
            "runs on a thread of its own, which needs MPI_THREAD_FUNNELED; use an MPI that is built with threads"
        )
    return world


def _initialise(engine: Engine, level: str) -> MPIComm:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        # mpi4py's own call would hold Python's lock until all ranks have started.
        library = ctypes.CDLL(MPI.__file__)
        asked = getattr(MPI, f"THREAD_{level.upper()}")
        library.MPI_Init_thread(None, None, asked, ctypes.byref(ctypes.c_int()))
        for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
            comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py raises them
        atexit.register(engine.end, library.MPI_Finalize)
    engine.test = MPI.Request.Testall
    return MPIComm(MPI, MPI.COMM_WORLD, engine)


def _buffer(tensor: Tensor) -> np.ndarray:
    flat = check(tensor).detach().view(-1)
    if flat.dtype in HALF:
        flat = flat.view(torch.int16)
    return (flat.view(torch.uint8) if flat.dtype == torch.bool else flat).numpy()


def _pieces(flat: np.ndarray, limit: int = MAX_COUNT) -> Iterator[np.ndarray]:
    size = min(MAX_COUNT, limit)
    for start in range(0, flat.size, size):
        yield flat[start : start + size]


def _overlap(a: Tensor, b: Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (a, b)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


class MPIComm(Comm):
    """An mpi4py communicator, built on the engine's thread. `wait` raises mpi4py.MPI.Exception."""

    def __init__(self, mpi: Any, mpi_comm: Any, engine: Engine) -> None:
        self.mpi = mpi
        self.mpi_comm = mpi_comm
        self.engine = engine
        self.rank = mpi_comm.Get_rank()
        self.size = mpi_comm.Get_size()
        self.thread_level = {
            getattr(mpi, f"THREAD_{name.upper()}"): name for name in THREAD_LEVELS
        }[mpi.Query_thread()]
        self.library = " ".join(
            mpi.Get_library_version().splitlines()[0].split(",")[0].rstrip("\0").split()
        )

    def _op(self, op: str, dtype: torch.dtype) -> Any:
        assert op in OPS, op
        name = "max" if dtype == torch.bool and op == "sum" else op  # a logical or on bytes 0 and 1
        return getattr(self.mpi, name.upper())

    def _collective(self, steps: Steps, *tensors: Tensor) -> Handle:
        return self.engine.start(steps, self.mpi_comm.handle, tensors)

    # Collectives: the verbs, then the steps of each -------------------------------------------------------------------------------

    def iall_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        self._op(op, check(tensor).dtype)
        flat = tensor.detach().view(-1)
        if self.size == 1:
            return DONE
        return self._collective(self._all_reduce(flat, op), flat)

    def _all_reduce(self, flat: Tensor, op: str) -> Steps:
        if flat.dtype in HALF and op == "sum":
            yield from self._half_sum(flat)
        elif flat.dtype in HALF:
            wide = flat.float()
            yield from self._all_reduce(wide, op)
            flat.copy_(wide)
        else:
            mpi_op = self._op(op, flat.dtype)
            for piece in _pieces(_buffer(flat), max(SUMMED, SUMMED_PER_RANK * self.size)):
                yield [self.mpi_comm.Iallreduce(self.mpi.IN_PLACE, piece, mpi_op)]

    def _half_sum(self, flat: Tensor) -> Steps:
        if flat.numel() * self.size <= SMALL:
            parts = flat.new_empty(self.size, flat.numel())  # (p, n)
            yield from self._all_gather(parts, flat)
            flat.copy_(rank_order_sum(parts))
            return
        for piece in flat.split(max(1, STAGE // self.size) * self.size):
            share = -(-piece.numel() // self.size)
            whole = piece
            if piece.numel() < share * self.size:
                whole = piece.new_zeros(share * self.size)
                whole[: piece.numel()] = piece
            part = piece.new_empty(share)
            yield from self._half_reduce_scatter(part, whole.view(self.size, share))
            yield from self._all_gather(whole, part)
            if whole is not piece:
                piece.copy_(whole[: piece.numel()])

    def iall_gather(self, output: Tensor, tensor: Tensor) -> Handle:
        """Start gathering `tensor` (n) from p ranks into `output` (p n), in place if `tensor` is this rank's part."""
        parts = rows(output, tensor, self.size)  # (p, n)
        if _overlap(output, tensor):
            assert tensor.data_ptr() == parts[self.rank].data_ptr(), (
                "the part overlaps another rank's place"
            )
        elif self.size == 1:
            parts[0].copy_(tensor.detach().view(-1))
        if self.size == 1:
            return DONE
        steps = self._all_gather(output.detach(), tensor.detach())
        return self._collective(steps, output, tensor)

    def _all_gather(self, output: Tensor, tensor: Tensor) -> Steps:
        inside = _overlap(output, tensor)
        if tensor.numel() <= MAX_COUNT:
            sent = self.mpi.IN_PLACE if inside else _buffer(tensor)
            yield [self.mpi_comm.Iallgather(sent, _buffer(output))]
            return
        parts = output.view(self.size, -1)  # (p, n)
        if not inside:
            parts[self.rank].copy_(tensor.view(-1))
        for root in range(self.size):
            yield from self._broadcast(_buffer(parts[root]), root)

    def ireduce_scatter(self, output: Tensor, tensor: Tensor) -> Handle:
        parts = rows(tensor, output, self.size)  # (p, n)
        if self.size == 1:
            output.detach().view(-1).copy_(parts[0])
            return DONE
        steps = self._reduce_scatter(output.detach().view(-1), parts)
        return self._collective(steps, output, tensor)

    def _reduce_scatter(self, output: Tensor, parts: Tensor) -> Steps:
        if parts.dtype in HALF:
            yield from self._half_reduce_scatter(output, parts)
            return
        # MPI's in-place form would put every rank's result at the beginning.
        result = torch.empty_like(output) if _overlap(output, parts) else output
        mpi_op = self._op("sum", parts.dtype)
        step = min(MAX_COUNT, max(SUMMED // self.size, SUMMED_PER_RANK))
        for start in range(0, output.numel(), step):
            sent = parts[:, start : start + step].contiguous()  # (p, step)
            received = _buffer(result[start : start + step])
            yield [self.mpi_comm.Ireduce_scatter_block(_buffer(sent), received, mpi_op)]
        if result is not output:
            output.copy_(result)

    def _half_reduce_scatter(self, output: Tensor, parts: Tensor) -> Steps:
        step = max(1, STAGE // self.size)
        for start in range(0, output.numel(), step):
            sent = parts[:, start : start + step].contiguous()  # (p, step)
            received = torch.empty_like(sent)
            yield [self.mpi_comm.Ialltoall(_buffer(sent), _buffer(received))]
            output[start : start + step] = rank_order_sum(received)

    def iall_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Handle:
        check_exchange(output, tensor, received, sent, self.size)
        if self.size == 1:
            output.detach().copy_(tensor.detach())
            return DONE
        steps = self._all_to_all(output.detach(), tensor.detach(), received, sent)
        return self._collective(steps, output, tensor)

    def _all_to_all(
        self, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Steps:
        # Counts are in rows: element counts may exceed a C int.
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        row = self.mpi.BYTE.Create_contiguous(row_bytes).Commit()

        def message(rows: Tensor, counts: Sequence[int]) -> list[Any]:
            offsets = [sum(counts[:rank]) for rank in range(self.size)]
            return [_buffer(rows), (list(counts), offsets), row]

        yield [self.mpi_comm.Ialltoallv(message(tensor, sent), message(output, received))]
        row.Free()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        if self.size > 1:
            self._collective(self._broadcast(_buffer(tensor), root), tensor).wait()
        return tensor

    def _broadcast(self, flat: np.ndarray, root: int) -> Steps:
        for piece in _pieces(flat):
            yield [self.mpi_comm.Ibcast(piece, root)]

    def barrier(self) -> None:
        self._wait_for(self.mpi_comm.Ibarrier)

    def _wait_for(self, start: Callable[[], Any]) -> None:
        def steps() -> Steps:
            yield [start()]

        self._collective(steps()).wait()

    # Messages -------------------------------------------------------------------------------------------------------------------

    def _message(self, start: Callable[..., Any], tensor: Tensor, rank: int, tag: int) -> Handle:
        def steps() -> Steps:
            yield [start(piece, rank, tag) for piece in _pieces(_buffer(tensor))]

        return self.engine.start(steps(), memory=tensor)

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Handle:
        return self._message(self.mpi_comm.Isend, tensor, dst, tag)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> Handle:
        return self._message(self.mpi_comm.Irecv, tensor, src, tag)

    def irecv_any(self, tensor: Tensor, tag: int, arrived: Callable[[int], None]) -> Handle:
        """Start receiving from the first rank that sends. arrived: called with the rank, on the MPI thread"""
        status = self.mpi.Status()

        def steps() -> Steps:
            yield lambda: self.mpi_comm.Iprobe(self.mpi.ANY_SOURCE, tag, status)
            source = status.Get_source()
            arrived(source)
            yield [self.mpi_comm.Irecv(piece, source, tag) for piece in _pieces(_buffer(tensor))]

        return self.engine.start(steps(), memory=tensor)

    # Objects and set-up -----------------------------------------------------------------------------------------------------------

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        if self.rank == root:
            data = np.frombuffer(pickle.dumps(obj), np.uint8).copy()
            self.broadcast(torch.tensor(data.size), root)
            self._collective(self._broadcast(data, root)).wait()
            return obj
        length = int(self.broadcast(torch.tensor(0), root))
        data = np.empty(length, np.uint8)
        self._collective(self._broadcast(data, root)).wait()
        return pickle.loads(data.data)

    def gather_object(self, obj: Any, root: int = 0) -> list[Any] | None:
        own, lengths = self._pickled(obj)
        if self.rank != root:
            self._wait_for(lambda: self.mpi_comm.Igatherv(own, None, root))
            return None
        everyone = np.empty(lengths.sum(), np.uint8)
        self._wait_for(lambda: self.mpi_comm.Igatherv(own, (everyone, lengths), root))
        return _unpickled(everyone, lengths)

    def all_gather_object(self, obj: Any) -> list[Any]:
        own, lengths = self._pickled(obj)
        everyone = np.empty(lengths.sum(), np.uint8)
        self._wait_for(lambda: self.mpi_comm.Iallgatherv(own, (everyone, lengths)))
        return _unpickled(everyone, lengths)

    def _pickled(self, obj: Any) -> tuple[np.ndarray, np.ndarray]:
        own = np.frombuffer(pickle.dumps(obj), np.uint8)
        lengths = torch.empty(self.size, dtype=torch.int64)
        self.all_gather(lengths, torch.tensor([own.size]))
        return own, lengths.numpy()

    def split(self, color: int, key: int) -> MPIComm:
        return self.engine.call(
            lambda: MPIComm(self.mpi, self.mpi_comm.Split(color, key), self.engine)
        )

    def create_group(self, ranks: Sequence[int], tag: int) -> MPIComm:
        """Build the communicator of `ranks`, in their order; entered by these ranks alone (MPI_Comm_create_group)."""

        def create() -> MPIComm:
            group = self.mpi_comm.Get_group().Incl(list(ranks))
            return MPIComm(self.mpi, self.mpi_comm.Create_group(group, tag), self.engine)

        return self.engine.call(create)

    def split_node(self) -> MPIComm:
        """Build the communicator of ranks that share memory (MPI_Comm_split_type)."""
        kind = self.mpi.COMM_TYPE_SHARED
        return self.engine.call(
            lambda: MPIComm(self.mpi, self.mpi_comm.Split_type(kind), self.engine)
        )

    def free(self) -> None:
        """Free the communicator. Collective: MPI calls wait for a rank that does not come."""
        self.engine.call(self.mpi_comm.Free)

    def abort(self, code: int = 1) -> None:
        """Call MPI_Abort on MPI_COMM_WORLD, after the caller's report: MPI's own line is not shown."""
        witness.tell()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        threading.Timer(ABORT_SECONDS, os._exit, [code]).start()  # if the engine hangs
        self.engine.call(lambda: self.mpi.COMM_WORLD.Abort(code))
        os._exit(code)  # some MPI_Abort return


def _unpickled(data: np.ndarray, lengths: np.ndarray) -> list[Any]:
    ends = lengths.cumsum()
    return [
        pickle.loads(data[end - length : end].data)
        for end, length in zip(ends, lengths, strict=True)
    ]
