"""Pipeline schedules on real MPI ranks whose stages sleep instead of computing: seconds of each list, walked and measured.

    python -m benchmarks schedule --stages 8 --microbatches 7 --slot-ms 100

Messages, communicators and the loop that walks a list are the trainer's. A forward sleeps one slot, a backward two, the gradients
of inputs and of weights one each, divided by the number of chunks: what is measured is the list, not the cores.
The ranks run this module as a program (child.py).
Left out: computation (`step`), the seconds that a list takes by itself (pipeline/timeline.py).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.base import Comm, Handle
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.config.fields import check
from fugaku_megatron.host.timing import slowest_seconds
from fugaku_megatron.observe.log import schedule_plot
from fugaku_megatron.pipeline.instruction_lists import receives, send_queue
from fugaku_megatron.pipeline.instructions import Instruction, execute
from fugaku_megatron.pipeline.schedule import Schedule, build
from fugaku_megatron.pipeline.schedule_names import SCHEDULES
from fugaku_megatron.pipeline.timeline import Costs, Span, spans, walk
from fugaku_megatron.text.table import Column

from . import child, core, disturbance

ELEMENTS = 1024  # of a message: sleeping stages measure the order of messages, not their size
COLUMNS: tuple[Column, ...] = (
    ("schedule", "<12", "schedule"),
    ("chunks", ">6", "chunks"),
    ("list s", ">8.3f", "list_seconds"),
    ("measured s", ">10.3f", "measured_seconds"),
    ("of list", ">8.3f", lambda row: row["measured_seconds"] / row["list_seconds"]),
    ("x 1F1B", ">7.3f", "ratio_to_1f1b"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this family."""
    parser.add_argument(
        "--stages", type=int, default=8, help="ranks, one for each stage (default: %(default)s)"
    )
    parser.add_argument(
        "--microbatches", type=int, default=7, help="of an iteration (default: %(default)s)"
    )
    parser.add_argument(
        "--slot-ms",
        type=float,
        default=100.0,
        help="milliseconds of a stage's forward (default: %(default)s)",
    )
    parser.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[2, 5],
        help="of interleaved and ZB-H1 schedules (default: 2 5)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="timed turns of each schedule (default: %(default)s)"
    )


def schedules(stages: int, microbatches: int, chunks: list[int]) -> list[Schedule]:
    """Return the schedules to compare; first 1F1B, with which the others are compared."""
    kinds = [
        ("1f1b", 1),
        *(("interleaved", v) for v in chunks),
        ("zb-h1", 1),
        *(("zb-h1", v) for v in chunks),
        ("zbv", 2),
    ]
    return [build(name, stages, v, microbatches) for name, v in kinds]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a row for each schedule. ValueError for numbers that cannot be measured, RuntimeError when the ranks fail."""
    check(
        options.stages >= 2,
        f"--stages {options.stages}: pass 2 or more, one stage waits for nobody",
    )
    check(options.slot_ms > 0, f"--slot-ms {options.slot_ms}: pass a number above 0")
    check(
        min(options.chunks) >= 2,
        f"--chunks {min(options.chunks)}: pass 2 or more, one chunk is 1F1B",
    )
    watch = disturbance.Watch(os.cpu_count() or 1)
    order = {
        name: getattr(options, name)
        for name in ("stages", "microbatches", "slot_ms", "chunks", "rounds")
    }
    rows = list(child.ranks(options.stages, "schedule", order))
    for row in rows if not options.png else ():
        del row["spans"]
    return {"rows": rows, "busy": watch.disturbed(), **order}


def text(options: argparse.Namespace, result: dict[str, Any]) -> str:
    """Return the table."""
    return (
        f"{core.table(COLUMNS, result['rows'])}\n{options.stages} sleeping stages on {result['cpu']}, {options.microbatches} "
        f"micro-batches, a forward is {options.slot_ms:g} ms, measured" + core.mark(result["busy"])
    )


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw every schedule's list next to what the ranks did in the last turn."""
    rows = []
    for plan, row in zip(
        schedules(result["stages"], result["microbatches"], result["chunks"]),
        result["rows"],
        strict=True,
    ):
        chunks = plan.placement.model_chunks
        name = f"{plan.name}, {chunks} chunks" if chunks > 1 else plan.name
        rows.append(
            (
                name,
                spans(plan, Costs.alike(plan, result["slot_ms"] / 1e3)),
                [Span(*fields) for fields in row["spans"]],
            )
        )
    schedule_plot.compare(path, rows)
    print(f"wrote {path}")


# A rank ---------------------------------------------------------------------------------------------------------------------------


class Sleeper:
    """An `Executor` of one stage that sleeps instead of computing; the next receives of each tag are posted ahead."""

    def __init__(self, pp: Comm, plan: Schedule, costs: Costs) -> None:
        self.pp = pp
        self.plan = plan
        self.costs = costs
        self.instructions = plan.instructions(pp.rank)
        self.queue = send_queue(plan, pp.rank)
        self.sending: deque[Handle] = deque()
        self.spans: list[Span] = []
        self.begin = pp.broadcast(
            torch.tensor(time.perf_counter(), dtype=torch.float64)
        ).item()  # one clock: that of the node
        self.posted: dict[Instruction, Handle] = {}
        self.waiting = {tag: iter(waiting) for tag, waiting in receives(self.instructions).items()}
        for _ in range(SCHEDULES[plan.name].receives_ahead):
            for tag in self.waiting:
                self._post(tag)

    def run(self) -> None:
        """Walk the list and wait until everything is sent."""
        execute(self.instructions, self)
        while self.sending:
            self.sending.popleft().wait()

    def _post(self, tag: tuple[str, int]) -> None:
        for instruction in itertools.islice(self.waiting[tag], 1):
            peer = self.plan.placement.peer(self.pp.rank, instruction)
            self.posted[instruction] = self.pp.irecv(torch.empty(ELEMENTS), *peer)

    def _compute(self, instruction: Instruction) -> None:
        start = time.perf_counter() - self.begin
        time.sleep(self.costs.of[instruction.op][self.pp.rank][instruction.model_chunk])
        self.spans.append(
            Span(
                self.pp.rank,
                instruction.op,
                instruction.microbatch,
                instruction.model_chunk,
                start,
                time.perf_counter() - self.begin,
            )
        )

    def _receive(self, instruction: Instruction) -> None:
        self.posted.pop(instruction).wait()
        self._post((instruction.op, instruction.model_chunk))

    def _send(self, instruction: Instruction) -> None:
        self.sending.append(
            self.pp.isend(
                torch.ones(ELEMENTS), *self.plan.placement.peer(self.pp.rank, instruction)
            )
        )
        if len(self.sending) > self.queue:
            self.sending.popleft().wait()

    forward = backward = backward_input = backward_weight = _compute
    recv_forward = recv_backward = _receive
    send_forward = send_backward = _send


def timed(pp: Comm, plan: Schedule, slot: float) -> tuple[float, list[Span]]:
    """Return the seconds of an iteration, and what this stage did."""
    sleeper = Sleeper(pp, plan, Costs.alike(plan, slot))
    return slowest_seconds(pp, sleeper.run), sleeper.spans


def rows(pp: Comm, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure one row for each schedule; medians over the rounds, in which the schedules take turns."""
    slot = order["slot_ms"] / 1e3
    plans = schedules(pp.size, order["microbatches"], order["chunks"])
    for plan in plans:
        timed(pp, plan, slot / 100)  # connections are made by the first messages
    turns = [[timed(pp, plan, slot) for plan in plans] for _ in range(order["rounds"])]
    seconds = [
        statistics.median(taken for taken, _ in column) for column in zip(*turns, strict=True)
    ]
    last = [
        pp.all_gather_object([list(vars(span).values()) for span in mine]) for _, mine in turns[-1]
    ]
    return [
        {
            "schedule": plan.name,
            "chunks": plan.placement.model_chunks,
            "stages": pp.size,
            "microbatches": plan.microbatches,
            "list_seconds": walk(plan, Costs.alike(plan, slot)),
            "measured_seconds": mine,
            "ratio_to_1f1b": seconds[0] / mine,
            "measured": True,
            "spans": sum(all_stages, []),
        }
        for plan, mine, all_stages in zip(plans, seconds, last, strict=True)
    ]


def main(world: Comm) -> None:
    """Answer the rows, on rank 0. The order: microbatches, slot_ms, chunks, rounds."""
    torch.set_num_threads(1)
    order, answer = child.order()
    for row in rows(world, order):
        if world.rank == 0:
            answer(row)


if __name__ == "__main__":
    run_or_abort(main)
