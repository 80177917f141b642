"""Checks for a communicator's verbs against plain torch.

tests/comm/test_thread_ranks.py runs the checks on threads; under MPI this file is each rank's program:
    mpiexec -n 4 python tests/comm/collective_checks.py [verbs] [orders] [node] [levels] [large]
verbs: all checks; orders: random orders, counting every MPI call; node: shared memory; levels: simulated nodes; large: messages above
2^31 bytes and 2^31 elements, 12 GB. p: ranks. Values are small integers, exact in every dtype; rounding has its own check.
"""

import os
import sys
import threading
from random import Random
from typing import ClassVar
from unittest import mock

import torch

from fugaku_megatron.comm import mpi, node, two_level
from fugaku_megatron.comm.base import COMM_DTYPES, HALF, rank_order_sum
from fugaku_megatron.comm.job import describe, run_or_abort
from fugaku_megatron.host import kernels, runtime
from fugaku_megatron.host.topology import Node

LENGTHS = (0, 1, 5, 64, 1003)


def values(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `rank`'s values (n,). Any rank can compute them."""
    generator = torch.Generator().manual_seed(1000 * rank + n)
    high = 2 if dtype == torch.bool else 20
    return torch.randint(0, high, (n,), generator=generator).to(dtype)


def stacked(p: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([values(rank, n, dtype) for rank in range(p)])  # (p, n)


def expected(everyone: torch.Tensor, op: str) -> torch.Tensor:
    wide = everyone.to(torch.float64)
    result = {"sum": wide.sum(0), "max": wide.amax(0), "min": wide.amin(0)}[op]
    return result.to(everyone.dtype)  # a sum of bool: true where any is


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype, f"got {got.dtype}, want {want.dtype}"
    if got.dtype == torch.bool:  # a byte of 2 would pass for true, and 256 of them would be false
        got = got.view(torch.uint8)
        want = want.view(torch.uint8)
    assert torch.equal(got, want), f"got {got}, want {want}"


def all_reduce(comm):
    for dtype in COMM_DTYPES:
        for n in LENGTHS:
            for op in ("sum", "max", "min"):
                tensor = values(comm.rank, n, dtype)
                assert comm.all_reduce(tensor, op) is tensor
                same(tensor, expected(stacked(comm.size, n, dtype), op))


def all_reduce_shapes(comm):
    scalar = torch.tensor(float(comm.rank))
    assert comm.all_reduce(scalar).shape == () and scalar.item() == sum(range(comm.size))
    leaf = torch.ones(2, 3, requires_grad=True)
    same(comm.all_reduce(leaf).detach(), torch.full((2, 3), float(comm.size)))


def half_parts(comm):
    """Return random values of every rank: few, gathered in one call, and many, exchanged in shares."""
    for dtype in HALF:
        for n in (7, 20003):
            yield [
                torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(comm.size)
            ]


def half_sums_round_once(comm):
    for everyone in half_parts(comm):
        total = rank_order_sum([part.float() for part in everyone])
        same(comm.all_reduce(everyone[comm.rank].clone()), total.to(everyone[0].dtype))


def half_sums_round_at_each_level(comm):
    """Check rounding. comm: a TwoLevelComm"""
    ranks = comm.levels.ranks  # (places, nodes)
    for everyone in half_parts(comm):
        sums = [
            rank_order_sum([everyone[rank] for rank in node]).to(everyone[0].dtype)
            for node in ranks.T.tolist()
        ]
        same(
            comm.all_reduce(everyone[comm.rank].clone()), rank_order_sum(sums).to(everyone[0].dtype)
        )


def all_gather(comm):
    """Check into another tensor, and in place."""
    for dtype in COMM_DTYPES:
        for n in LENGTHS:
            output = torch.zeros(comm.size, n, dtype=dtype)
            assert comm.all_gather(output, values(comm.rank, n, dtype)) is output
            same(output, stacked(comm.size, n, dtype))
        output = torch.zeros(comm.size, 5, dtype=dtype)
        output[comm.rank] = values(comm.rank, 5, dtype)
        comm.all_gather(output, output[comm.rank])
        same(output, stacked(comm.size, 5, dtype))


def reduce_scatter(comm):
    """Check into another tensor, with an unchanged input, and in place."""
    for dtype in COMM_DTYPES:
        for n in LENGTHS:
            everyone = stacked(comm.size, comm.size * n, dtype)
            own = expected(everyone, "sum").view(comm.size, n)[comm.rank]
            whole = everyone[comm.rank].clone().view(comm.size, n)
            output = torch.zeros(n, dtype=dtype)
            assert comm.reduce_scatter(output, whole) is output
            same(output, own)
            same(whole.flatten(), everyone[comm.rank])
            comm.reduce_scatter(whole[comm.rank], whole)
            same(whole[comm.rank], own)
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            same(whole[others], everyone[comm.rank].view(comm.size, n)[others])


def rows_between(sender: int, receiver: int, width: int) -> int:
    """Return the number of rows that one rank sends another in `all_to_all`: none, few, or more than a chunk."""
    return (3 * sender + 5 * receiver) % 4 * (150 if width == 1003 and receiver == 1 else 1)


def all_to_all(comm):
    """Check rows of every dtype in both directions, with empty messages and one rank that receives almost all."""
    p = comm.size
    rank = comm.rank
    for dtype in COMM_DTYPES:
        for width in LENGTHS[1:]:
            sent, received = (
                [rows_between(*pair, width) for pair in pairs]
                for pairs in ([(rank, r) for r in range(p)], [(r, rank) for r in range(p)])
            )
            whole = [
                values(r, sum(rows_between(r, to, width) for to in range(p)) * width, dtype).view(
                    -1, width
                )
                for r in range(p)
            ]
            starts = [sum(rows_between(r, to, width) for to in range(rank)) for r in range(p)]
            want = torch.cat(
                [rows[start : start + n] for rows, start, n in zip(whole, starts, received)]
            )
            got = torch.zeros_like(want)
            back = torch.zeros_like(whole[rank])
            assert comm.all_to_all(got, whole[rank], received, sent) is got
            same(got, want)
            handle = comm.iall_to_all(back, got, sent, received)
            comm.barrier()
            handle.wait()
            same(back, whole[rank])


def broadcast(comm):
    for dtype in COMM_DTYPES:
        for root in range(comm.size):
            for n in LENGTHS:
                tensor = values(comm.rank, n, dtype)
                assert comm.broadcast(tensor, root) is tensor
                same(tensor, values(root, n, dtype))


def send_and_recv(comm):
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    for dtype in COMM_DTYPES if comm.size > 1 else ():
        for n in LENGTHS:
            for rank in range(
                comm.size
            ):  # one sender at a time: a blocking ring would wait for itself
                if comm.rank == rank:
                    comm.send(values(rank, n, dtype), right, tag=n)
                if left == rank:
                    got = torch.zeros(n, dtype=dtype)
                    assert comm.recv(got, left, tag=n) is got
                    same(got, values(left, n, dtype))


def messages_match_by_tag_and_order(comm):
    right = (comm.rank + 1) % comm.size
    left = (comm.rank - 1) % comm.size
    sent = [torch.full((4,), float(10 * comm.rank + i)) for i in range(3)]
    got = [torch.zeros(4) for _ in sent]
    handles = [comm.irecv(got[2], left, tag=9)] + [comm.irecv(t, left, tag=1) for t in got[:2]]
    handles += [comm.isend(t, right, tag) for t, tag in zip(sent, (1, 1, 9))]
    for handle in handles[::-1]:
        handle.wait()
    for i, tensor in enumerate(got):
        same(tensor, torch.full((4,), float(10 * left + i)))


def nonblocking_collectives(comm):
    """Check several collectives in progress, waited for in another order, with blocking collectives in between."""
    for dtype in COMM_DTYPES:
        everyone = stacked(comm.size, comm.size * 6, dtype)
        shown = everyone[comm.rank]
        own = shown.clone()
        gathered = torch.zeros_like(everyone)
        part = torch.zeros(6, dtype=dtype)
        handles = [
            comm.iall_gather(gathered, shown),
            comm.iall_reduce(own),
            comm.ireduce_scatter(part, shown),
        ]
        comm.barrier()
        for handle in handles[::-1]:
            handle.wait()
            handle.wait()
            assert handle.done()
        same(own, expected(everyone, "sum"))
        same(gathered, everyone)
        same(part, expected(everyone, "sum").view(comm.size, 6)[comm.rank])


def one_order(random, comms):
    """Check nonblocking sums on comms[0] among blocking ones on the others, in this rank's own order; wait in any order."""
    programs = [[(comm, n) for n in range(3)] for comm in comms]
    under_way = []
    while any(programs):
        comm, n = random.choice([program for program in programs if program]).pop(0)
        tensor = torch.full((1 + 50 * n,), float(comm.rank + n))
        total = sum(rank + n for rank in range(comm.size))
        if comm is comms[0]:
            under_way.append((comm.iall_reduce(tensor), tensor, total))
        else:
            same(comm.all_reduce(tensor), torch.full_like(tensor, total))
    for handle, tensor, total in random.sample(under_way, len(under_way)):
        handle.wait()
        same(tensor, torch.full_like(tensor, total))


def random_orders(comm, count=20):
    row = comm.split(comm.rank // 2, comm.rank)
    column = comm.split(comm.rank % 2, comm.rank)
    random = Random(comm.rank)
    for _ in range(count):
        one_order(random, (column, row))


def objects(comm):
    own = {"rank": comm.rank}
    everyone = [{"rank": rank} for rank in range(comm.size)]
    assert comm.all_gather_object(own) == everyone
    for root in range(comm.size):
        assert comm.broadcast_object(own, root) == everyone[root]
        assert comm.gather_object(own, root) == (everyone if comm.rank == root else None)


def split(comm):
    reverse = comm.split(color=0, key=-comm.rank)
    assert (reverse.size, reverse.rank) == (comm.size, comm.size - 1 - comm.rank)
    assert reverse.all_gather_object(comm.rank) == list(range(comm.size))[::-1]
    parity = comm.split(color=comm.rank % 2, key=comm.rank)
    same_parity = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert parity.all_gather_object(comm.rank) == same_parity
    same(parity.all_reduce(torch.tensor([comm.rank])), torch.tensor([sum(same_parity)]))


def barrier(comm):
    comm.barrier()


COLLECTIVE_CHECKS = (
    all_reduce,
    all_reduce_shapes,
    half_sums_round_once,
    all_gather,
    reduce_scatter,
    all_to_all,
    nonblocking_collectives,
    random_orders,
    broadcast,
    objects,
    split,
    barrier,
)
LEVEL_CHECKS = (
    *(check for check in COLLECTIVE_CHECKS if check is not half_sums_round_once),
    half_sums_round_at_each_level,
)
CHECKS = (*COLLECTIVE_CHECKS, send_and_recv, messages_match_by_tag_and_order)


def run_checks(comm, checks, label):
    for check in checks:
        check(comm)
        if comm.rank == 0:
            print("ok", label, check.__name__, flush=True)


LIMITS = {"default": {}, "pieces": {"MAX_COUNT": 100, "STAGE": 200, "SMALL": 2}}


def filled(n: int, value: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `value` everywhere except at the ends, to find a count that wraps around."""
    tensor = torch.full((n,), value, dtype=dtype)
    tensor[0] = tensor[-1] = 3 * value
    return tensor


def uniform(tensor: torch.Tensor, value: int) -> None:
    low, high = tensor[1:-1].aminmax()
    assert (tensor[0], tensor[-1], low, high) == (3 * value, 3 * value, value, value), (
        tensor[0],
        tensor[-1],
        low,
        high,
    )


def large_all_reduce(comm, n, dtype):
    uniform(comm.all_reduce(filled(n, comm.rank + 1, dtype)), sum(range(1, comm.size + 1)))


def large_shards(comm, n, dtype):
    """Gather n elements per rank into p * n, and reduce them to n again."""
    output = torch.empty(comm.size, n, dtype=dtype)
    comm.all_gather(output, filled(n, comm.rank + 1, dtype))
    for rank in range(comm.size):
        uniform(output[rank], rank + 1)
    comm.reduce_scatter(output[comm.rank], output)
    uniform(output[comm.rank], comm.size * (comm.rank + 1))


def large_message(comm, n, dtype):
    tensor = filled(n, comm.rank + 1, dtype)
    if comm.rank == 0:
        comm.send(tensor, dst=1)
    elif comm.rank == 1:
        uniform(comm.recv(tensor, src=0), 1)
    uniform(comm.broadcast(tensor, root=0), 1)


LARGE = (
    (large_all_reduce, 2**29 + 3, torch.float32),
    (large_all_reduce, 2**30 + 3, torch.bfloat16),
    (large_all_reduce, 2**31 + 3, torch.uint8),
    (large_shards, 2**28 + 3, torch.float32),
    (large_shards, 2**29 + 3, torch.bfloat16),
    (large_shards, 2**30 + 3, torch.uint8),
    (large_message, 2**29 + 3, torch.float32),
    (large_message, 2**31 + 3, torch.uint8),
)


def run_large(world):
    for check, n, dtype in LARGE:
        check(world, n, dtype)
        if world.rank == 0:
            print("ok", check.__name__, dtype, n, flush=True)


class Counted:
    """A wrapper for mpi4py. It records calling threads and concurrent calls."""

    threads: ClassVar[set[int]] = set()
    inside = 0
    largest = 0
    lock = threading.Lock()

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        value = getattr(self.inner, name)
        if name.isupper() or not callable(value):
            return value

        def call(*arguments):
            with Counted.lock:
                Counted.inside += 1
                Counted.largest = max(Counted.largest, Counted.inside)
                Counted.threads.add(threading.get_ident())
            result = value(*arguments)
            with Counted.lock:
                Counted.inside -= 1
            return Counted(result) if name == "Split" else result

        return call


def run_orders(world, count=250):
    engine = world.engine
    parts = (Counted(world.mpi), Counted(world.mpi_comm))
    engine.test = Counted(engine).test
    random_orders(engine.call(lambda: mpi.MPIComm(*parts, engine)), count)
    assert (len(Counted.threads), Counted.largest) == (
        1,
        1,
    ) and threading.get_ident() not in Counted.threads
    if world.rank == 0:
        print("ok orders", count)


def chunks_of_shared_memory(comm):
    """Check tensors of several chunks with odd ends, blocking and not."""
    for dtype in (torch.float32, *HALF):
        n = 3 * node.HALF_BYTES // 4 // comm.size * comm.size + comm.size * 5
        everyone = stacked(comm.size, n, dtype)
        own = everyone[comm.rank].clone()
        part = torch.zeros(n // comm.size, dtype=dtype)
        gathered = torch.zeros_like(everyone)
        handles = [
            comm.ireduce_scatter(part, everyone[comm.rank]),
            comm.iall_gather(gathered, everyone[comm.rank]),
        ]
        same(comm.all_reduce(own), expected(everyone, "sum"))
        for handle in handles:
            handle.wait()
        same(part, expected(everyone, "sum").view(comm.size, -1)[comm.rank])
        same(gathered, everyone)
        same(
            comm.all_reduce(gathered[0].clone()),
            expected(everyone[:1].expand(comm.size, -1), "sum"),
        )


def run_node(world):
    """Check that shared memory works and starts no thread."""
    torch.empty(2**20).zero_()  # this thread's own OpenMP threads
    world.engine.call(
        lambda: runtime.apply_to_communication(runtime.CpuBinding(1, ()), Node.read())
    )
    shared = node.share_node(world, kernels)
    assert type(shared) is node.NodeComm
    threads = len(os.listdir("/proc/self/task"))
    run_checks(shared, (*COLLECTIVE_CHECKS, chunks_of_shared_memory), "node")
    assert len(os.listdir("/proc/self/task")) == threads
    with mock.patch.object(node, "SHARED_MEMORY", "/not/there"):
        assert type(node.share_node(world, kernels)) is mpi.MPIComm


# The node of a rank, of two or more nodes with as many ranks.
NODES = {"blocks": lambda rank: rank // 2, "in turn": lambda rank: rank % 2}


def run_levels(world):
    """Run the checks on mock nodes and on stages; MPI serves unequal nodes."""
    for name, place in NODES.items():
        shared = node.share_node(world, kernels, place(world.rank))
        assert (type(shared), type(shared.levels.inside)) == (two_level.TwoLevelComm, node.NodeComm)
        run_checks(shared, (*LEVEL_CHECKS, chunks_of_shared_memory), name)
    assert type(node.share_node(world, kernels, min(world.rank, 1))) is mpi.MPIComm
    two_level.MANY = 2
    staged = node.share_node(world, kernels, world.rank)
    assert (type(staged), type(staged.levels.inside)) == (two_level.TwoLevelComm, mpi.MPIComm)
    run_checks(staged, LEVEL_CHECKS, "stages")


def run_verbs(world):
    """Run the checks with whole messages, and with messages in small pieces."""
    for limit, constants in LIMITS.items():
        for name, value in constants.items():
            setattr(mpi, name, value)
        run_checks(world, CHECKS, limit)


PARTS = {
    "orders": run_orders,
    "node": run_node,
    "levels": run_levels,
    "verbs": run_verbs,
    "large": run_large,
}


def main(world):
    assert isinstance(world, mpi.MPIComm), (
        "no launcher: run mpiexec -n 4 python tests/comm/collective_checks.py"
    )
    for name in sys.argv[1:] or ["verbs"]:
        PARTS[name](world)
    if world.rank == 0:
        print(describe(world))


if __name__ == "__main__":
    run_or_abort(main)
