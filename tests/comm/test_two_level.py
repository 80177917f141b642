"""Sums at two levels and in stages on threads: every placement on nodes, and errors in BF16 sums."""

from dataclasses import replace

import pytest
import torch

from fugaku_megatron.comm import two_level
from fugaku_megatron.comm.engine import Engine
from fugaku_megatron.comm.grid import Groups
from fugaku_megatron.comm.two_level import TwoLevelComm, in_stages, split_levels, stage_ranks
from fugaku_megatron.host.observed import Observed
from tests.comm import collective_checks
from tests.recording import record
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

# The node of each rank: what a launcher does in blocks, in turn, or as it likes.
PLACEMENTS = {
    "blocks": [0, 0, 1, 1],
    "in turn": [0, 1, 0, 1],
    "any": [0, 1, 1, 0],
    "three nodes": [2, 2, 0, 0, 1, 1],
    "three ranks a node": [0, 1, 0, 0, 1, 1],
}
LIMITS = {"default": {}, "small": {"SMALL": 0, "PIECE": 2}}


@pytest.fixture(scope="module")
def engines() -> list[Engine]:
    """Return an engine for each rank, shared because engine threads end with the process."""
    return [Engine() for _ in range(max(map(len, PLACEMENTS.values())))]


def two_levels(comm, placement, engines) -> TwoLevelComm:
    levels = split_levels(comm, comm.split(placement[comm.rank], comm.rank))
    return TwoLevelComm(comm, levels, engines[comm.rank])


@pytest.mark.parametrize(
    ("limits", "placement"),
    [
        ("default", "in turn"),
        ("default", "three nodes"),
        ("small", "blocks"),
        ("small", "any"),
        ("small", "three ranks a node"),
    ],
)
@pytest.mark.parametrize("check", collective_checks.LEVEL_CHECKS, ids=lambda check: check.__name__)
def test_verbs_agree_with_torch(check, placement, limits, engines, monkeypatch):
    for name, value in LIMITS[limits].items():
        monkeypatch.setattr(two_level, name, value)
    nodes = PLACEMENTS[placement]
    ThreadWorld(len(nodes)).run(lambda comm: check(two_levels(comm, nodes, engines)))


def test_levels_number_the_nodes_alike_at_every_place():
    placement = [
        0,
        1,
        1,
        0,
        2,
        2,
    ]  # the first ranks at place 0 are on nodes 0 and 1, at place 1 on nodes 1 and 0
    levels = ThreadWorld(6).run(
        lambda comm: split_levels(comm, comm.split(placement[comm.rank], comm.rank))
    )
    assert all(each.ranks.tolist() == [[0, 1, 4], [3, 2, 5]] for each in levels)
    assert [(each.inside.rank, each.between.rank) for each in levels] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 0),
        (0, 2),
        (1, 2),
    ]


def test_nodes_with_different_numbers_of_ranks_have_no_levels():
    assert (
        ThreadWorld(3).run(lambda comm: split_levels(comm, comm.split(comm.rank // 2, comm.rank)))
        == [None] * 3
    )


@pytest.mark.parametrize(
    "verb, elements", [("all_reduce", 6000), ("reduce_scatter", 6000), ("all_gather", 1500)]
)
def test_a_node_sends_each_byte_once(verb, elements, engines):
    """Count bytes between nodes: 1 / m of a rank's bytes, or an all_gather's own shard."""

    def run(world):
        levels = split_levels(world, world.split(world.rank // 2, world.rank))
        groups = record(
            Groups(world=world, tp=levels.inside, pp=world, dp=levels.between, embedding=world)
        )
        recorded = two_level.Levels(groups.tp, groups.dp, levels.ranks)
        comm = TwoLevelComm(world, recorded, engines[world.rank])
        part = torch.ones(1500)
        operands = {
            "all_reduce": (torch.ones(6000),),
            "reduce_scatter": (part, torch.ones(6000)),
            "all_gather": (torch.ones(6000), part),
        }
        getattr(comm, verb)(*operands[verb])
        return groups.dp.records

    between = 4 * elements // (1 if verb == "all_gather" else 2)
    assert ThreadWorld(4).run(run) == [[(verb, between)]] * 4


def messages(comm, log):
    """Return `comm` with a log: rows in an all_to_all's messages, one message to every rank that receives rows."""

    def observe(verb, call, args, kwargs):
        log.extend(count for rank, count in enumerate(args[-1]) if count and rank != comm.rank)
        return call(*args, **kwargs)

    return Observed(comm, ("all_to_all", "iall_to_all"), observe)


@pytest.mark.parametrize("placement", ["blocks", "in turn", "three nodes", "three ranks a node"])
def test_one_message_for_each_pair_of_nodes(placement, engines):
    """Exchange a + 2 b + 1 rows between ranks a and b; rows inside a node stay in its memory."""
    nodes = PLACEMENTS[placement]

    def run(world):
        levels = split_levels(world, world.split(nodes[world.rank], world.rank))
        flat_log = []
        between_log = []
        between = messages(levels.between, between_log)
        comm = TwoLevelComm(
            messages(world, flat_log), replace(levels, between=between), engines[world.rank]
        )
        sent, received = (
            [a + 2 * b + 1 for a, b in pairs]
            for pairs in (
                [(world.rank, b) for b in range(world.size)],
                [(a, world.rank) for a in range(world.size)],
            )
        )
        rows = torch.arange(3.0 * sum(sent)).view(-1, 3) + 1000 * world.rank
        flat, output = (torch.empty(sum(received), 3) for _ in range(2))
        world.all_to_all(flat, rows, received, sent)
        comm.all_to_all(output, rows, received, sent)
        assert torch.equal(output, flat)
        return flat_log, [(nodes[world.rank], count) for count in between_log]

    flat, between = zip(*ThreadWorld(len(nodes)).run(run))
    expected = {
        (a, b): sum(
            i + 2 * j + 1
            for i, x in enumerate(nodes)
            for j, y in enumerate(nodes)
            if (x, y) == (a, b)
        )
        for a in set(nodes)
        for b in set(nodes)
        if a != b
    }
    assert not any(flat)
    assert sorted(message for each in between for message in each) == sorted(
        (a, rows) for (a, _), rows in expected.items()
    )


@pytest.mark.parametrize(
    "ranks, width",
    [(2, None), (64, None), (65, 5), (96, 8), (128, 8), (12288, 64), (67, None), (134, 2)],
)
def test_the_ranks_of_a_stage(ranks, width):
    assert stage_ranks(ranks) == width


def sizes(comm) -> list[int]:
    """Return the sizes of a sum's all-to-alls."""
    return (
        [comm.levels.inside.size, *sizes(comm.levels.between)]
        if isinstance(comm, TwoLevelComm)
        else [comm.size]
    )


def test_stages_follow_one_another_down_to_few_ranks(monkeypatch):
    monkeypatch.setattr(two_level, "MANY", 3)
    assert ThreadWorld(12).run(lambda comm: sizes(in_stages(comm, None))) == [[3, 2, 2]] * 12


def relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return ((result.double() - exact).norm() / exact.norm()).item()


def test_bf16_sums_in_stages_are_rounded_once_a_stage(monkeypatch):
    """Check the figures in docs/numerics.md: independent gradients, and 1.7e-3 of the sum per rounding, in squares."""
    ranks = 96
    n = 960
    gradients = torch.randn(ranks, n, generator=torch.Generator().manual_seed(1))
    exact = gradients.double().sum(0)
    ring = gradients[0].bfloat16()
    for gradient in gradients[1:]:
        ring = (ring.float() + gradient.bfloat16().float()).bfloat16()

    def error(stages: int) -> float:
        results = ThreadWorld(ranks).run(
            lambda comm: staged(comm, stages).all_reduce(gradients[comm.rank].bfloat16())
        )
        assert all(torch.equal(result, results[0]) for result in results)
        return relative_error(results[0], exact)

    def staged(comm, stages):
        comm = comm if stages == 1 else in_stages(comm, None)
        assert len(sizes(comm)) == stages
        return comm

    one = error(1)
    two = error(2)
    monkeypatch.setattr(two_level, "MANY", 8)
    three = error(3)
    assert [one, two, three] == pytest.approx(
        [1.66e-3 * roundings**0.5 for roundings in (2, 3, 4)], rel=0.1
    )
    assert relative_error(ring, exact) > 3 * three
