"""Collectives between ranks of this machine, now and before: seconds of each by size, in turn, as table, JSON and picture.

    python -m benchmarks comm --png comm.png

"Before" is MPI's blocking call, piece by piece, made by the thread that makes every MPI call. Every rank has one thread and by
default a core of its own: ranks that share a core wait for each other's time slices. A row is printed as soon as it is measured.
The ranks run this module as a program (child.py). Left out: networks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from fugaku_megatron.comm import mpi
from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.job import describe, run_or_abort
from fugaku_megatron.comm.node import share_node
from fugaku_megatron.config.fields import check
from fugaku_megatron.host import kernels, runtime
from fugaku_megatron.host.timing import slowest_seconds
from fugaku_megatron.report.communication import operands
from fugaku_megatron.text.table import Column, heading, line

from . import child, core, disturbance, pictures

SIZES = tuple(2**power for power in (16, 18, 20, 22, 24, 26, 28))
COLUMNS: tuple[Column, ...] = (
    ("collective", "<15", "op"),
    ("ranks", ">5", "ranks"),
    ("KiB", ">8.0f", lambda row: row["bytes"] / 1024),
    ("ms now", ">9.3f", lambda row: 1e3 * row["seconds"]),
    ("ms before", ">10.3f", lambda row: 1e3 * row["before_seconds"]),
    ("ratio", ">6.2f", "ratio"),
)


def default_ranks(cores: int) -> list[int]:
    """The numbers of ranks that have a core each; two ranks on one core are the least that can be measured."""
    return [ranks for ranks in (2, 4) if ranks <= cores] or [2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        default=default_ranks(len(os.sched_getaffinity(0))),
        help="numbers of ranks (default: those of 2 and 4 for which this process has the cores)",
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        default=list(SIZES),
        metavar="BYTES",
        help="of a whole tensor (default: 64 KiB to 256 MiB)",
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="timed rounds of each row (default: %(default)s)"
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The rows, each printed when it is measured. ValueError for numbers that cannot be measured."""
    check(
        min(options.ranks) >= 2,
        f"--ranks {min(options.ranks)}: pass 2 or more, one rank has nobody to send to",
    )
    check(
        min(options.sizes) >= 4 * max(options.ranks),
        f"--sizes {min(options.sizes)}: pass {4 * max(options.ranks)} or more, "
        "four bytes for every rank",
    )
    result: dict[str, Any] = {"rows": [], "rounds": options.rounds}
    for ranks in options.ranks:
        watch = disturbance.Watch(min(ranks, os.cpu_count() or 1))
        library, *rows = measured(ranks, options)
        busy = watch.disturbed()
        result |= {**library, "rows": result["rows"] + [{**row, "busy": busy} for row in rows]}
        if busy:
            print(f"BUSY MACHINE during the rows of {ranks} ranks")
    return result


def measured(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The MPI library, then the rows, each printed when it is measured. RuntimeError when the ranks fail."""
    print(heading(COLUMNS), flush=True)
    records = []
    for row in child.ranks(ranks, "comm", {"sizes": options.sizes, "rounds": options.rounds}):
        records.append(row)
        if len(records) > 1:
            print(line(COLUMNS, row), flush=True)
    return records


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return a line that says where the rows were measured."""
    return f"{result['cpu']}, {result['library']}, one thread a rank, measured"


draw = pictures.draw_collectives


# A rank ---------------------------------------------------------------------------------------------------------------------------

Operation = Callable[[], None]


class Blocking:
    """The collectives as blocking MPI calls on FP32: in place, in pieces of mpi.SUMMED elements."""

    def __init__(self, comm: mpi.MPIComm) -> None:
        self.comm = comm
        self.raw = comm.mpi_comm
        self.mpi = comm.mpi

    def all_reduce(self, tensor: Tensor) -> None:
        flat = tensor.numpy()
        for start in range(0, flat.size, mpi.SUMMED):
            self.raw.Allreduce(self.mpi.IN_PLACE, flat[start : start + mpi.SUMMED], self.mpi.SUM)

    def reduce_scatter(self, output: Tensor, tensor: Tensor) -> None:
        parts = tensor.view(self.comm.size, -1)  # (p, n)
        result = output.numpy()
        for start in range(0, result.size, step := mpi.SUMMED // self.comm.size):
            sent = parts[:, start : start + step].contiguous()
            self.raw.Reduce_scatter_block(sent.numpy(), result[start : start + step], self.mpi.SUM)

    def all_gather(self, output: Tensor, tensor: Tensor) -> None:
        self.raw.Allgather(tensor.numpy(), output.numpy())


def pairs(world: mpi.MPIComm, shared: Comm, n: int) -> dict[str, tuple[Operation, Operation]]:
    """Name -> (now, before) of collectives over n FP32 elements in all, a multiple of the ranks."""
    blocking = Blocking(world)
    call = world.engine.call

    def pair(name: str, tensors: tuple[Tensor, ...]) -> tuple[Operation, Operation]:
        now = getattr(shared, name)
        before = getattr(blocking, name)
        return lambda: now(*tensors), lambda: call(lambda: before(*tensors))

    return {name: pair(name, tensors) for name, tensors in operands(n, world.size).items()}


def rows(world: mpi.MPIComm, sizes: list[int], rounds: int) -> Iterator[dict[str, Any]]:
    """One row per operation and size in bytes; medians over `rounds` turns."""
    shared = share_node(world, kernels)
    for size in sizes:
        for name, (now, before) in pairs(
            world, shared, size // 4 // world.size * world.size
        ).items():
            now(), before()
            turns = [
                {
                    "seconds": slowest_seconds(world, now),
                    "before_seconds": slowest_seconds(world, before),
                }
                for _ in range(rounds)
            ]
            row = core.medians(turns)
            yield {
                "op": name,
                "bytes": size,
                "ranks": world.size,
                **row,
                "ratio": row["before_seconds"] / row["seconds"],
                "measured": True,
            }


def main(world: Comm) -> None:
    """The library, then the rows, on rank 0. The order: sizes in bytes, rounds."""
    assert isinstance(world, mpi.MPIComm), "started by python -m benchmarks comm"
    torch.set_num_threads(1)
    world.engine.call(
        lambda: runtime.apply_to_communication(runtime.Placement(1, ()), runtime.Node.read())
    )
    order, answer = child.order()
    answer = answer if world.rank == 0 else lambda record: None
    answer({"library": describe(world)})
    for row in rows(world, order["sizes"], order["rounds"]):
        answer(row)


if __name__ == "__main__":
    run_or_abort(main)
