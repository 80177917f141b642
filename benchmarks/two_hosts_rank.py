"""A rank of `benchmarks two_hosts`: holds a trainer for each job and lets them take turns, iteration by iteration.

    mpiexec -n 2 python -m benchmarks.two_hosts_rank '{"alone": {...}, "together": {"blocking": {...}}, "rounds": 3,
        "cores": [[0, 1], [0, 1]]}'

One JSON line per round on rank 0: {job: {"seconds", "waiting", "sent", "loss"}}. All jobs live in the same two processes, so that a
round's differences are those of the jobs and not of processes. Left out: namespaces and figures (two_hosts.py).
Test: pytest tests/mpi/test_two_hosts.py
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.dry import DryComm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.comm.mpi import MPIComm
from fugaku_megatron.host.phases import PHASES, REDUCTIONS, Phases
from fugaku_megatron.run.arguments import make_run
from fugaku_megatron.run.layout import Layout
from fugaku_megatron.training import pretrain
from fugaku_megatron.training.kernel_choice import build_ops, choose_kernels
from fugaku_megatron.training.train import Trainer

from .two_hosts import ALONE, DEVICE


def build(world: Comm, values: dict[str, Any], phases: Phases) -> Trainer:
    """A data-parallel trainer over `world`. values: fields of its run. phases: the clock of its waiting."""
    run = make_run(None, values)
    groups, layout = Grid(world.size).groups(world), Layout.from_run(run, world.size)
    ops = build_ops(run, choose_kernels(run, layout, world).backends)
    return Trainer(run, world, phases.groups(groups), *pretrain.build_data(run, groups, layout), ops=ops)


def sent_bytes() -> int:
    """What this host has sent since its link exists."""
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


def turn(world: Comm, trainer: Trainer, phases: Phases) -> dict[str, float]:
    """One iteration, from the moment that both ranks are there: seconds of the slower rank, bytes that this rank sent."""
    phases.begin()
    world.barrier()
    before, begin = sent_bytes(), time.perf_counter()
    loss = trainer.train_step().loss
    seconds, sent = time.perf_counter() - begin, sent_bytes() - before
    waiting = phases.of_iteration(seconds)[PHASES.index(REDUCTIONS)]
    return {"seconds": world.all_reduce(torch.tensor(seconds, dtype=torch.float64), "max").item(), "waiting": waiting, "sent": sent,
            "loss": loss}


def place(world: MPIComm, computing: int, communicating: int) -> None:
    """This thread on one core, the thread that calls MPI on its own or the same."""
    os.sched_setaffinity(0, {computing})
    world.engine.call(lambda: os.sched_setaffinity(0, {communicating}))


def main(world: Comm) -> None:
    """The rounds of the JSON object in argv[1], after one that is not measured."""
    order = json.loads(sys.argv[1])
    pretrain.configure_process(make_run(None, order["alone"]), world)
    place(world, *order["cores"][world.rank])
    phases = Phases()
    trainers = {ALONE: build(DryComm(), order["alone"], phases)}
    trainers |= {name: build(world, values, phases) for name, values in order["together"].items()}
    names = list(trainers)
    for number in range(order["rounds"] + 1):
        first = number % len(names)  # every job comes first as often as the others
        measured = {name: turn(world, trainers[name], phases) for name in names[first:] + names[:first]}
        if world.rank == 0 and number > 0:
            print(json.dumps(measured), flush=True)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    run_or_abort(main)
