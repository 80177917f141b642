"""Ranks as threads and ranks without traffic: all verbs, sums in rank order, and a failure that ends every rank."""

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from tests.comm import collective_checks
from tests.recording import RecordingComm
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel


@pytest.mark.parametrize("check", collective_checks.CHECKS, ids=lambda check: check.__name__)
def test_threads_agree_with_torch(check):
    for size in (1, 2, 4):
        ThreadWorld(size).run(check)
    ThreadWorld(3).run(lambda comm: check(RecordingComm(comm)))


@pytest.mark.parametrize(
    "check", collective_checks.COLLECTIVE_CHECKS, ids=lambda check: check.__name__
)
def test_a_dry_world_of_one_is_the_identity(check):
    check(SoloComm())


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
    assert comm.all_gather(
        torch.empty(12288, 10**6, device="meta"), torch.empty(10**6, device="meta")
    ).is_meta
    assert comm.all_reduce(torch.empty(10**9, device="meta")).is_meta
