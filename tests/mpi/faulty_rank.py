"""A small run with a slow rank or a flipped bit: mpiexec -n 4 python tests/mpi/faulty_rank.py slow FILE

slow: forwards and backwards take longer on one rank; FILE is for --log-ranks. The clock of a rank runs only in those, so that it
does not matter how many ranks share a core. flip: a bit in a weight flips on one rank. audit: a bit of an activation flips in every
forward of one rank. Prints the log.
See tests/observe/test_faulty_rank.py.
"""

import sys
from dataclasses import replace

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.config.output import OutputConfig
from fugaku_megatron.host import observed
from fugaku_megatron.host.observed import Observed, Phases, observe_groups
from fugaku_megatron.observe.hang.stragglers import RankTimes
from fugaku_megatron.run.loop import Session
from fugaku_megatron.training import trainer as trainer_module
from tests.campaigns.audits.trial import Fault, train_with_fault
from tests.checks.session import Writer
from tests.fault_injection import change_after, flip_weight
from tests.helpers import build_trainer, grid_groups, mock, small_run

RANK = 2
SLOWER = 1.3
INSTRUCTION = 0.14  # s of a forward or backward: an interval takes the 5 s that a judgement needs
INTERVAL = 10
INTERVALS = 2
ITERATION = 5
COMPARED = 3
BIT = 20


class Clock:
    """A rank's seconds: they advance as it computes, and at a collective with a rank that computed for longer."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def meeting(self, comm: Comm):
        """Return an observer for a group's collectives."""

        def call(name, function, args, kwargs):
            result = function(*args, **kwargs)
            self.now = comm.all_reduce(torch.tensor(self.now, dtype=torch.float64), "max").item()
            return result

        return call


def flip(world: Comm, log: Writer) -> None:
    """A data-parallel run that compares weights every COMPARED iterations."""
    run = small_run(
        num_layers=2,
        global_batch_size=12,
        train_iters=9,
        check_weight_hash_across_dp_replicas_interval=COMPARED,
    )
    trainer = build_trainer(run, world, mock(run))
    change_after(
        trainer,
        ITERATION,
        lambda trainer: flip_weight(trainer, "decoder.layers.1.mlp.linear_fc2.weight", 7, BIT),
        rank=RANK,
    )
    Session(trainer, log, run.training.train_iters, ()).run()


def audit(world: Comm, log: Writer) -> None:
    """A ZeRO-1 run with audits, and a fault from iteration ITERATION on."""
    fault = Fault(3, "DP 4, ZeRO-1", "activation", RANK, ITERATION)
    run = replace(fault.run("unused"), output=OutputConfig())
    code, _, lines = train_with_fault(world, run, fault)
    log.print(lines[-1])
    raise SystemExit(code)


def slow(world: Comm, log: Writer, file: str) -> None:
    """Train two log intervals with TP2 x DP2 and two micro-batches."""
    run = small_run(
        num_layers=2,
        log_interval=INTERVAL,
        train_iters=INTERVAL * INTERVALS,
        tensor_model_parallel_size=2,
        global_batch_size=8,
        log_ranks=file,
    )
    phases = Phases()
    log.log_interval = INTERVAL
    groups = grid_groups(world, run)
    observed.time = trainer_module.time = clock = Clock()

    def compute(name, function, args, kwargs):
        function(*args, **kwargs)
        clock.now += INSTRUCTION * (SLOWER if world.rank == RANK else 1)

    meeting = observe_groups(groups, lambda name: clock.meeting(getattr(groups, name)))
    trainer = build_trainer(
        run,
        world,
        mock(run),
        groups=phases.groups(meeting),
        waiting_for_data=phases.waiting_for_data,
        watch=lambda executor: phases.watch(Observed(executor, ("forward", "backward"), compute)),
    )
    times = RankTimes(run, trainer.layout, world, phases, log.print)
    Session(trainer, log, run.training.train_iters, (), observers=[times]).run()
    trainer.close()


def main(world: Comm) -> None:
    torch.set_num_threads(1)
    log = Writer()
    if world.rank == 0:
        log.print = lambda line: print(line, flush=True)
    globals()[sys.argv[1]](world, log, *sys.argv[2:])


if __name__ == "__main__":
    run_or_abort(main)
