"""One rank of `python -m benchmarks comm`: times collectives in turn with their blocking forms on MPI alone.

    mpiexec -n 2 python -m benchmarks.comm_rank '{"sizes": [65536], "rounds": 5}'        prints one JSON line per row, on rank 0

"Before" is what the trainer did until communication had a thread of its own: MPI's blocking call, piece by piece, made here by that
thread as every MPI call must be.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fugaku_megatron.comm import mpi
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.launch import describe, run_or_abort
from fugaku_megatron.comm.node import share_node
from fugaku_megatron.host import kernels, runtime

from .child import answer, answers

Operation = Callable[[], None]


class Blocking:
    """The collectives as blocking MPI calls on FP32: in place, in pieces of mpi.SUMMED elements."""

    def __init__(self, comm: mpi.MPIComm) -> None:
        self.comm, self.raw, self.mpi = comm, comm.mpi_comm, comm.mpi

    def all_reduce(self, tensor: Tensor) -> None:
        flat = tensor.numpy()
        for start in range(0, flat.size, mpi.SUMMED):
            self.raw.Allreduce(self.mpi.IN_PLACE, flat[start : start + mpi.SUMMED], self.mpi.SUM)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        parts, result = tensor.view(self.comm.size, -1), output.numpy()  # (p, n)
        for start in range(0, result.size, step := mpi.SUMMED // self.comm.size):
            sent = parts[:, start : start + step].contiguous()
            self.raw.Reduce_scatter_block(sent.numpy(), result[start : start + step], self.mpi.SUM)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self.raw.Allgather(tensor.numpy(), output.numpy())


def pairs(world: mpi.MPIComm, shared: Comm, n: int) -> dict[str, tuple[Operation, Operation]]:
    """Name -> (now, before) of collectives over n FP32 elements in all, a multiple of the ranks."""
    blocking, call = Blocking(world), world.engine.call
    whole, part = torch.ones(n), torch.ones(n // world.size)
    operands = {"all_reduce": (whole,), "reduce_scatter": (part, whole), "all_gather": (whole, part)}

    def pair(name: str, tensors: tuple[Tensor, ...]) -> tuple[Operation, Operation]:
        now, before = getattr(shared, name), getattr(blocking, name)
        return lambda: now(*tensors), lambda: call(lambda: before(*tensors))

    return {name: pair(name, tensors) for name, tensors in operands.items()}


def timed(comm: Comm, operation: Operation) -> float:
    """Seconds from the moment that all ranks are there until the last has its result."""
    comm.barrier()
    begin = time.perf_counter()
    operation()
    return comm.all_reduce(torch.tensor(time.perf_counter() - begin, dtype=torch.float64), "max").item()


def rows(world: mpi.MPIComm, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """One row per operation and size in bytes; medians over `rounds` turns."""
    shared = share_node(world, kernels)
    for size in sizes:
        for name, (now, before) in pairs(world, shared, size // 4 // world.size * world.size).items():
            now(), before()
            turns = [(timed(world, now), timed(world, before)) for _ in range(rounds)]
            seconds, before_seconds = (statistics.median(column) for column in zip(*turns, strict=True))
            yield {"op": name, "bytes": size, "ranks": world.size, "seconds": seconds, "before_seconds": before_seconds,
                   "ratio": before_seconds / seconds, "measured": True}


def main(world: Comm) -> None:
    """The rows of the JSON object in argv[1]: sizes in bytes, rounds."""
    assert isinstance(world, mpi.MPIComm), "started by python -m benchmarks comm"
    torch.set_num_threads(1)
    world.engine.call(lambda: runtime.apply_to_communication(runtime.Placement(1, ())))
    stream, options = answers(), json.loads(sys.argv[1])
    for record in itertools.chain([{"library": describe(world)}], rows(world, options["sizes"], options["rounds"])):
        if world.rank == 0:
            answer(stream, record)


if __name__ == "__main__":
    run_or_abort(main)
