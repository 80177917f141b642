"""A small run whose forwards and backwards take longer on one rank: mpiexec -n 8 python tests/system/mpi/slow_rank.py FILE

Ranks sleep instead of computing, so that it does not matter how many of them share a core. FILE: for --log-ranks. Prints what the
log says. See test_stragglers.py.
"""

import sys
import time

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.host.observed import Observed, Phases
from fugaku_megatron.training.rank_times import RankTimes
from fugaku_megatron.training.session import Session
from fugaku_megatron.training.train import Trainer
from tests.helpers import grid_groups, mock, small_run
from tests.parallel.test_session import Writer

SLOW_RANK, SLOWER = 6, 1.3
INSTRUCTION = 0.1  # s of a forward or backward
INTERVAL, INTERVALS = 12, 2


def main(world: Comm) -> None:
    """Two log intervals of a TP2 x DP4 run with two micro-batches."""
    torch.set_num_threads(1)
    run = small_run(num_layers=2, log_interval=INTERVAL, train_iters=INTERVAL * INTERVALS, tensor_model_parallel_size=2,
                    log_ranks=sys.argv[1])
    phases, log = Phases(), Writer()

    def sleep(name, function, args, kwargs):
        function(*args, **kwargs)
        time.sleep(INSTRUCTION * (SLOWER if world.rank == SLOW_RANK else 1))

    trainer = Trainer(run, world, phases.groups(grid_groups(world, run)), mock(run), waiting_for_data=phases.waiting_for_data,
                      watch=lambda executor: phases.watch(Observed(executor, ("forward", "backward"), sleep)))
    times = RankTimes(run, trainer.layout, world, phases, log.print)
    Session(trainer, log, run.training.train_iters, False, rank_times=times).run()
    trainer.close()
    if world.rank == 0:
        print(*log.lines, sep="\n")


if __name__ == "__main__":
    run_or_abort(main)
