"""Ranks as threads, ranks without traffic, the recorder, and the rule that all sums are formed in rank order."""

import time

import pytest
import torch
from torch.autograd import Function

from fugaku_megatron.comm.base import rank_order_sum
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.solo import SoloComm
from tests.parallel import collective_checks
from tests.recording import RecordingComm, record
from tests.threads import ThreadWorld


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("check", collective_checks.CHECKS, ids=lambda check: check.__name__)
def test_threads_agree_with_torch(check, size):
    ThreadWorld(size).run(check)


@pytest.mark.parametrize("check", collective_checks.COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_a_dry_world_of_one_is_the_identity(check):
    check(SoloComm())


def test_results_come_in_rank_order_with_arguments():
    assert ThreadWorld(3).run(lambda comm, a, b: (comm.rank, a + b), 1, 2) == [(0, 3), (1, 3), (2, 3)]


def test_sums_are_formed_in_rank_order():
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1e-3])]
    assert rank_order_sum(parts).item() == pytest.approx(1e-3)
    assert rank_order_sum(parts[::-1]).item() == 0.0
    totals = ThreadWorld(3).run(lambda comm: comm.all_reduce(parts[comm.rank].clone()).item())
    assert totals == [pytest.approx(1e-3)] * 3


@pytest.mark.parametrize("wait", [
    lambda comm: comm.barrier(),
    lambda comm: comm.recv(torch.zeros(1), src=1),
    lambda comm: comm.split(0, 0).barrier(),
], ids=["barrier", "recv", "split"])
def test_a_failing_rank_wakes_the_others(wait):
    def fn(comm):
        if comm.rank == 1:
            raise KeyError("the cause")
        wait(comm)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="the cause") as caught:
        ThreadWorld(3).run(fn)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < 5


def test_a_failure_wakes_ranks_that_wait_in_a_subgroup():
    def fn(comm):
        half = comm.split(comm.rank // 2, comm.rank)
        if comm.rank == 0:
            raise ValueError("rank 0 stops")
        if comm.rank != 1:
            half.barrier()
        half.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 0 stops"):
        ThreadWorld(4).run(fn)


@pytest.mark.parametrize("fn, verb", [
    (lambda comm: comm.rank or comm.barrier(), "barrier"),
    (lambda comm: comm.rank or comm.recv(torch.zeros(1), src=1, tag=5), "recv from rank 1, tag 5"),
], ids=["barrier", "recv"])
def test_waiting_has_a_limit(fn, verb):
    with pytest.raises(TimeoutError, match=verb):
        ThreadWorld(2, timeout=0.2).run(fn)


def test_different_collectives_are_named():
    with pytest.raises(AssertionError, match="barrier.*all_reduce sum torch.float32 x 3"):
        ThreadWorld(2).run(lambda comm: comm.all_reduce(torch.ones(3)) if comm.rank else comm.barrier())


def test_a_message_must_fit_its_receiver():
    def fn(comm):
        if comm.rank:
            comm.recv(torch.zeros(2), src=0)
        else:
            comm.send(torch.zeros(3), dst=1)

    with pytest.raises(AssertionError, match="sent torch.float32 x 3.*receives torch.float32 x 2"):
        ThreadWorld(2).run(fn)


def test_a_sent_tensor_may_change_afterwards():
    def fn(comm):
        tensor = torch.ones(3)
        if comm.rank == 0:
            comm.send(tensor, dst=1)
            tensor.zero_()
            comm.barrier()
            return None
        comm.barrier()
        return comm.recv(torch.zeros(3), src=0).tolist()

    assert ThreadWorld(2).run(fn)[1] == [1.0, 1.0, 1.0]


def test_non_contiguous_tensors_are_refused():
    with pytest.raises(AssertionError, match="contiguous"):
        ThreadWorld(1).run(lambda comm: comm.all_reduce(torch.ones(3, 2).t()))


def test_collectives_inside_backward():
    class SumGradients(Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return ctx.comm.all_reduce(grad.clone()), None

    def fn(comm):
        x = torch.ones(3, requires_grad=True)
        (SumGradients.apply(x, comm) * (comm.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert ThreadWorld(3).run(fn) == [[6.0, 6.0, 6.0]] * 3


def test_dry_collectives_leave_plausible_values():
    comm = SoloComm(rank=2, size=4)
    x = torch.arange(8.0)
    assert torch.equal(comm.all_reduce(x.clone()), x)
    assert torch.equal(comm.all_gather(torch.empty(4, 8), x), x.expand(4, 8))
    assert torch.equal(comm.reduce_scatter(torch.empty(2), x), torch.tensor([4.0, 5.0]))
    assert torch.equal(comm.recv(x.clone(), src=0), torch.zeros(8))
    assert comm.all_gather_object("a") == ["a"] * 4
    assert comm.gather_object("a", root=1) is None and comm.gather_object("a", root=2) == ["a"] * 4
    with pytest.raises(SystemExit) as end:
        comm.abort(3)
    assert end.value.code == 3


def test_dry_collectives_take_meta_tensors():
    comm = SoloComm(rank=1, size=12288)
    assert comm.all_gather(torch.empty(12288, 10**6, device="meta"), torch.empty(10**6, device="meta")).is_meta
    assert comm.all_reduce(torch.empty(10**9, device="meta")).is_meta


def exercise(groups):
    groups.tp.all_reduce(torch.ones(10))
    groups.tp.all_reduce(torch.ones(6, dtype=torch.bfloat16))
    groups.dp.reduce_scatter(torch.zeros(3), torch.ones(6))
    groups.dp.all_gather(torch.zeros(6), torch.ones(3))
    groups.world.broadcast(torch.zeros(2, dtype=torch.int64))
    groups.world.barrier()
    groups.world.broadcast_object("seed")
    other = 1 - groups.pp.rank
    handles = [groups.pp.isend(torch.ones(5), other), groups.pp.irecv(torch.zeros(5), other)]
    for handle in handles:
        handle.wait()
    return groups


def test_recording_tallies_calls_and_bytes_per_group():
    groups = ThreadWorld(8).run(lambda comm: exercise(record(Grid(8, tp=2, pp=2).groups(comm))))[5]
    assert groups.tp.records == [("all_reduce", 40), ("all_reduce", 12)]
    assert groups.dp.records == [("reduce_scatter", 24), ("all_gather", 12)]
    assert groups.embedding.records == []
    assert groups.world.tally() == groups.tp.tally() == {
        ("tp", "all_reduce"): (2, 52), ("dp", "reduce_scatter"): (1, 24), ("dp", "all_gather"): (1, 12),
        ("world", "broadcast"): (1, 16), ("world", "barrier"): (1, 0), ("world", "broadcast_object"): (1, 0),
        ("pp", "send"): (1, 20), ("pp", "recv"): (1, 20),
    }


def test_a_dry_run_records_what_a_real_one_does():
    real = ThreadWorld(8).run(lambda comm: exercise(record(Grid(8, tp=2, pp=2).groups(comm))))
    dry = [exercise(record(Grid(8, tp=2, pp=2).groups(SoloComm(rank, 8)))) for rank in range(8)]
    assert [g.world.log for g in dry] == [g.world.log for g in real]


@pytest.mark.parametrize("check", collective_checks.CHECKS, ids=lambda check: check.__name__)
def test_recording_changes_no_result(check):
    ThreadWorld(3).run(lambda comm: check(RecordingComm(comm)))


def test_recorded_worlds_build_groups():
    groups = Grid(12, tp=2, pp=3).groups(RecordingComm(SoloComm(7, 12)))
    assert [(c.rank, c.size) for c in (groups.tp, groups.pp, groups.dp)] == [(1, 2), (0, 3), (1, 2)]
    groups.tp.barrier()
    assert groups.world.log == [("world/subgroup", "barrier", 0)]
