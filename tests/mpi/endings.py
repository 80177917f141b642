"""Ways for a job to end, as a program: mpiexec -n 3 python tests/mpi/endings.py <name>; see tests/comm/test_mpi.py.

Rank 0 prints "started" when all ranks are there.
"""

import sys
import threading
import time

import torch

from fugaku_megatron.comm.agreement import everywhere
from fugaku_megatron.comm.job import run_or_abort
from fugaku_megatron.config.layout import check_world_size


def on_rank_1(world, error):
    if world.rank == 1:
        raise error
    world.barrier()  # the failing rank never enters it again


def bug_on_one_rank(world):
    on_rank_1(world, AssertionError("a bug on rank one"))


def mistake_on_one_rank(world):
    on_rank_1(world, ValueError("shard 1 is missing:\n  name it with --data-path"))


def interrupt_on_one_rank(world):
    on_rank_1(world, KeyboardInterrupt())


def exit_of_one_rank(world):
    on_rank_1(world, SystemExit(7))


def mistake_on_all_ranks(world):
    with everywhere():
        check_world_size(world.size, world.size + 1, 1)


def bug_in_a_thread(world):
    def fail():
        raise RuntimeError("a bug in a thread")

    if world.rank == 1:
        threading.Thread(target=fail).start()
    time.sleep(0.1)
    world.recv(torch.zeros(1), src=(world.rank + 1) % world.size)


def failure_in_a_subgroup(world):
    pair = world.split(world.rank // 2, world.rank)
    if pair.size == 1:
        raise ValueError("the odd rank fails")
    pair.barrier()
    pair.recv(torch.zeros(1), src=1 - pair.rank)


def main(world):
    world.barrier()
    if world.rank == 0:
        print("started", flush=True)
    world.barrier()  # no rank fails before that is printed
    globals()[sys.argv[1]](world)


if __name__ == "__main__":
    run_or_abort(main)
