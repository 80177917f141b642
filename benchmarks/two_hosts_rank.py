"""A rank of `benchmarks two_hosts`: holds a trainer for each job and lets them take turns, iteration by iteration.

    mpiexec -n 2 python -m benchmarks.two_hosts_rank '{"jobs": {"blocking": {...}}, "rounds": 3, "cores": [[0, 1], [0, 1]]}'

One JSON line per round on rank 0: {job: {"seconds", "computation", "waiting", "sent", "loss"}}. computation: seconds of another
iteration of the same trainer, whose data- and tensor-parallel communication is left out: the same code on the same memory, which
differs by several per cent between trainers. Left out: namespaces and figures (two_hosts.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fugaku_megatron.comm.base import DONE, Comm
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.comm.mpi import MPIComm
from fugaku_megatron.config.arguments import make_run
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.host.observed import NONBLOCKING, PHASES, REDUCTIONS, VERBS, Observed, Phases
from fugaku_megatron.training import pretrain
from fugaku_megatron.training.start_choices import build_ops, choose_kernels
from fugaku_megatron.training.train import Trainer

from .child import answer, answers
from .two_hosts import DEVICE


class Silence:
    """While `on`, the verbs of a communicator that it observes do nothing: what a rank computes, and nothing of what it sends."""

    def __init__(self) -> None:
        self.on = False

    def observe(self, name: str, verb: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call the verb, or return what it would."""
        if not self.on:
            return verb(*args, **kwargs)
        return DONE if name in NONBLOCKING else args[0]


def build(world: Comm, values: dict[str, Any], phases: Phases, silence: Silence) -> Trainer:
    """A trainer over `world`. values: fields of its run. phases: the clock of its waiting. silence: of its groups."""
    run = make_run(None, values)
    layout = Layout.from_run(run, world.size)
    groups = Grid(world.size, layout.tp, layout.pp).groups(world)
    groups = replace(groups, **{name: Observed(getattr(groups, name), VERBS, silence.observe) for name in ("dp", "tp")})
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


def pair(world: Comm, trainer: Trainer, phases: Phases, silence: Silence, number: int) -> dict[str, float]:
    """An iteration, and one without its communication; which comes first, the round's number says."""
    turns = {}
    for silence.on in (True, False) if number % 2 else (False, True):
        turns[silence.on] = turn(world, trainer, phases)
    return {**turns[False], "computation": turns[True]["seconds"]}


def place(world: MPIComm, computing: int, communicating: int) -> None:
    """This thread on one core, the thread that calls MPI on its own or the same."""
    os.sched_setaffinity(0, {computing})
    world.engine.call(lambda: os.sched_setaffinity(0, {communicating}))


def main(world: Comm) -> None:
    """The rounds of the JSON object in argv[1], after one that is not measured."""
    stream, order = answers(), json.loads(sys.argv[1])
    names = list(order["jobs"])
    pretrain.configure_process(make_run(None, order["jobs"][names[0]]), world)
    place(world, *order["cores"][world.rank])
    phases, silence = Phases(), Silence()
    trainers = {name: build(world, values, phases, silence) for name, values in order["jobs"].items()}
    for number in range(order["rounds"] + 1):
        first = number % len(names)  # every job comes first as often as the others
        measured = {name: pair(world, trainers[name], phases, silence, number) for name in names[first:] + names[:first]}
        if world.rank == 0 and number > 0:
            answer(stream, measured)
    for trainer in trainers.values():
        trainer.close()


if __name__ == "__main__":
    run_or_abort(main)
