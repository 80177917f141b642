"""Ranks as threads, ranks without traffic, the recorder, and the rule that all sums are formed in rank order."""

import time

import pytest
import torch

from fugaku_megatron.comm.base import rank_order_sum
from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.solo import SoloComm
from tests.parallel import collective_checks
from tests.recording import RecordingComm, record
from tests.threads import ThreadWorld


@pytest.mark.parametrize("check", collective_checks.CHECKS, ids=lambda check: check.__name__)
def test_threads_agree_with_torch(check):
    for size in (1, 2, 4):
        ThreadWorld(size).run(check)
    ThreadWorld(3).run(lambda comm: check(RecordingComm(comm)))


@pytest.mark.parametrize("check", collective_checks.COLLECTIVE_CHECKS, ids=lambda check: check.__name__)
def test_a_dry_world_of_one_is_the_identity(check):
    check(SoloComm())


def test_sums_are_formed_in_rank_order():
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1e-3])]
    assert rank_order_sum(parts).item() == pytest.approx(1e-3)
    assert rank_order_sum(parts[::-1]).item() == 0.0
    totals = ThreadWorld(3).run(lambda comm: comm.all_reduce(parts[comm.rank].clone()).item())
    assert totals == [pytest.approx(1e-3)] * 3


@pytest.mark.parametrize("wait", [
    lambda comm: comm.barrier(), lambda comm: comm.recv(torch.zeros(1), src=1), lambda comm: comm.split(0, 0).barrier()],
    ids=["barrier", "recv", "split"])
def test_a_failing_rank_wakes_the_others(wait):
    """Also one that waits in a group of both, and with it one that waits in another."""
    def fn(comm):
        half = comm.split(comm.rank // 2, comm.rank)
        if comm.rank == 1:
            raise KeyError("the cause")
        half.barrier()
        wait(comm)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="the cause") as caught:
        ThreadWorld(3).run(fn)
    assert caught.value.rank == 1 and time.monotonic() - begin < 5


@pytest.mark.parametrize("fn, verb", [
    (lambda comm: comm.rank or comm.barrier(), "barrier"),
    (lambda comm: comm.rank or comm.recv(torch.zeros(1), src=1, tag=5), "recv from rank 1, tag 5"),
], ids=["barrier", "recv"])
def test_waiting_has_a_limit(fn, verb):
    with pytest.raises(TimeoutError, match=verb):
        ThreadWorld(2, timeout=0.2).run(fn)


@pytest.mark.parametrize(("fn", "message"), [
    (lambda comm: comm.all_reduce(torch.ones(3)) if comm.rank else comm.barrier(), "barrier.*all_reduce sum torch.float32 x 3"),
    (lambda comm: comm.recv(torch.zeros(2), src=0) if comm.rank else comm.send(torch.zeros(3), dst=1),
     "sent torch.float32 x 3.*receives torch.float32 x 2"),
    (lambda comm: comm.all_reduce(torch.ones(3, 2).t()), "contiguous"),
], ids=["different collectives", "another length", "strides"])
def test_calls_that_do_not_fit_are_named(fn, message):
    with pytest.raises(AssertionError, match=message):
        ThreadWorld(2).run(fn)


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


def test_recording_tallies_calls_and_bytes_per_group_also_of_a_dry_run():
    every = ThreadWorld(8).run(lambda comm: exercise(record(Grid(8, tp=2, pp=2).groups(comm))))
    dry = [exercise(record(Grid(8, tp=2, pp=2).groups(SoloComm(rank, 8)))) for rank in range(8)]
    assert [g.world.log for g in dry] == [g.world.log for g in every]
    groups = every[5]
    assert groups.tp.records == [("all_reduce", 40), ("all_reduce", 12)]
    assert groups.dp.records == [("reduce_scatter", 24), ("all_gather", 12)]
    assert groups.embedding.records == []
    assert groups.world.tally() == groups.tp.tally() == {
        ("tp", "all_reduce"): (2, 52), ("dp", "reduce_scatter"): (1, 24), ("dp", "all_gather"): (1, 12),
        ("world", "broadcast"): (1, 16), ("world", "barrier"): (1, 0), ("world", "broadcast_object"): (1, 0),
        ("pp", "send"): (1, 20), ("pp", "recv"): (1, 20),
    }
