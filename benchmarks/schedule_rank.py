"""One rank of `python -m benchmarks schedule`: walks each schedule's list as one stage, sleeping instead of computing.

    mpiexec -n 4 python -m benchmarks.schedule_rank '{"microbatches": 4, "slot_ms": 50, "chunks": [2], "rounds": 1}'
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections import deque
from typing import Any

import torch

from fugaku_megatron.comm.base import Comm, Handle
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.pipeline import schedule
from fugaku_megatron.pipeline.parts import receives_ahead
from fugaku_megatron.pipeline.schedule import Instruction, Schedule
from fugaku_megatron.pipeline.timeline import Costs, Span, walk

from .child import answer, answers
from .schedule import schedules

ELEMENTS = 1024  # of a message: sleeping stages measure the order of messages, not their size


class Sleeper:
    """A `schedule.Executor` of one stage; the next receives of each tag are posted ahead."""

    def __init__(self, pp: Comm, plan: Schedule, costs: Costs) -> None:
        self.pp, self.plan, self.costs = pp, plan, costs
        self.instructions = plan.instructions(pp.rank)
        self.queue = plan.send_queue(pp.rank)
        self.sending: deque[Handle] = deque()
        self.spans: list[Span] = []
        self.begin = pp.broadcast(torch.tensor(time.perf_counter(), dtype=torch.float64)).item()  # one clock: that of the node
        self.posted: dict[Instruction, Handle] = {}
        self.waiting = {tag: iter(receives) for tag, receives in schedule.receives(self.instructions).items()}
        for tag in [*self.waiting] * receives_ahead(plan.name):
            self._post(tag)

    def run(self) -> None:
        """Walk the list and wait until everything is sent."""
        schedule.run(self.instructions, self)
        while self.sending:
            self.sending.popleft().wait()

    def _post(self, tag: tuple[str, int]) -> None:
        for instruction in itertools.islice(self.waiting[tag], 1):
            peer = self.plan.placement.peer(self.pp.rank, instruction)
            self.posted[instruction] = self.pp.irecv(torch.empty(ELEMENTS), *peer)

    def _compute(self, instruction: Instruction) -> None:
        start = time.perf_counter() - self.begin
        time.sleep(self.costs.of[instruction.op][self.pp.rank][instruction.chunk])
        self.spans.append(Span(self.pp.rank, instruction.op, instruction.microbatch, instruction.chunk, start,
                               time.perf_counter() - self.begin))

    def _receive(self, instruction: Instruction) -> None:
        self.posted.pop(instruction).wait()
        self._post((instruction.op, instruction.chunk))

    def _send(self, instruction: Instruction) -> None:
        self.sending.append(self.pp.isend(torch.ones(ELEMENTS), *self.plan.placement.peer(self.pp.rank, instruction)))
        if len(self.sending) > self.queue:
            self.sending.popleft().wait()

    forward = backward = backward_input = backward_weight = _compute
    recv_forward = recv_backward = _receive
    send_forward = send_backward = _send


Turn = tuple[float, list[Span]]


def timed(pp: Comm, plan: Schedule, slot: float) -> Turn:
    """Seconds of an iteration, from the moment that all stages are there until the last has finished, and what this stage did."""
    sleeper = Sleeper(pp, plan, Costs.alike(plan, slot))
    pp.barrier()
    begin = time.perf_counter()
    sleeper.run()
    return pp.all_reduce(torch.tensor(time.perf_counter() - begin, dtype=torch.float64), "max").item(), sleeper.spans


def rows(pp: Comm, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each schedule; medians over the rounds, in which the schedules take turns."""
    slot = options["slot_ms"] / 1e3
    plans = schedules(pp.size, options["microbatches"], options["chunks"])
    for plan in plans:
        timed(pp, plan, slot / 100)  # connections are made by the first messages
    turns = [[timed(pp, plan, slot) for plan in plans] for _ in range(options["rounds"])]
    seconds = [statistics.median(taken for taken, _ in column) for column in zip(*turns, strict=True)]
    spans = [pp.all_gather_object([list(vars(span).values()) for span in mine]) for _, mine in turns[-1]]
    return [{"schedule": plan.name, "chunks": plan.placement.chunks, "stages": pp.size, "microbatches": plan.microbatches,
             "list_seconds": walk(plan, Costs.alike(plan, slot)), "measured_seconds": mine, "ratio_to_1f1b": seconds[0] / mine,
             "measured": True, "spans": sum(all_stages, [])} for plan, mine, all_stages in zip(plans, seconds, spans, strict=True)]


def main(world: Comm) -> None:
    """The rows, on rank 0, of the JSON object in argv[1]: microbatches, slot_ms, chunks, rounds."""
    torch.set_num_threads(1)
    stream = answers()
    for row in rows(world, json.loads(sys.argv[1])):
        if world.rank == 0:
            answer(stream, row)


if __name__ == "__main__":
    run_or_abort(main)
