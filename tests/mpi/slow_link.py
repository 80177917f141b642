"""A rank that sends experts' rows over a slow link. Arguments: rows for each rank, seconds, groups of experts.

Computation is slept, so that a busy machine does not change it. Rank 0 prints the seconds for a forward and a backward.
"""

import sys
import time

import torch

from fugaku_megatron.comm.all_to_all import AllToAll, GroupedAllToAll
from fugaku_megatron.comm.job import run_or_abort

WIDTH = 512


class Slept(torch.autograd.Function):
    """Experts that double their rows. The backward takes twice as long as the forward."""

    @staticmethod
    def forward(ctx, rows, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return 2 * rows

    @staticmethod
    def backward(ctx, grad):
        time.sleep(2 * ctx.seconds)
        return 2 * grad, None


def main(world):
    rows = int(sys.argv[1])
    seconds = float(sys.argv[2])
    groups = int(sys.argv[3])
    exchange = AllToAll(world, [rows // groups] * 2, [rows // groups] * 2)
    exchanges = [exchange for _ in range(groups)]
    there, back = (GroupedAllToAll(exchanges, groups > 1) for _ in range(2))
    x = torch.randn(2 * rows, WIDTH, requires_grad=True)
    scores = torch.ones(2 * rows, 1, requires_grad=True)
    world.barrier()
    begin = time.perf_counter()
    token = there.dispatch(x, scores)
    returning = []
    for i in range(groups):
        here, factors = there.dispatched(i, token)
        returning.append(back.combine(i, Slept.apply(here, seconds / groups) * factors))
    y = back.combined(returning)
    y.sum().backward()
    took = time.perf_counter() - begin
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full_like(x, 2.0)), (
        "every row comes back to its place"
    )
    if world.rank == 0:
        print(took)


if __name__ == "__main__":
    run_or_abort(main)
