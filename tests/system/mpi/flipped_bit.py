"""A small run on real ranks in which one bit of one weight flips on one rank: mpiexec -n 3 python tests/system/mpi/flipped_bit.py

Prints what the log says. See test_weight_hash.py.
"""

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.comm.launch import run_or_abort
from fugaku_megatron.training.session import Session
from fugaku_megatron.training.train import IterationResult, Trainer
from tests.helpers import grid_groups, mock, small_run
from tests.parallel.test_session import Writer

RANK, ITERATION, INTERVAL, BIT = 2, 5, 3, 1 << 20


class FlippedBit(Trainer):
    """A rank's memory flips a bit of a weight after ITERATION."""

    def train_step(self) -> IterationResult:
        result = super().train_step()
        if (self.progress.iteration, self.world.rank) == (ITERATION, RANK):
            self.stage.layers[1].mlp.linear_fc2.weight.data.view(torch.int32)[7, 5] ^= BIT
        return result


def main(world: Comm) -> None:
    """A data-parallel run that compares weights every INTERVAL iterations."""
    torch.set_num_threads(1)
    run = small_run(num_layers=2, global_batch_size=12, train_iters=9, check_weight_hash_across_dp_replicas_interval=INTERVAL)
    trainer, log = FlippedBit(run, world, grid_groups(world, run), mock(run)), Writer()
    if world.rank == 0:
        log.print = lambda line: print(line, flush=True)
    Session(trainer, log, run.training.train_iters, False).run()


if __name__ == "__main__":
    run_or_abort(main)
