"""The grid against its definition (one reshape), and groups on threads and dry ranks."""

import pytest
import torch

from fugaku_megatron.comm.base import SoloComm
from fugaku_megatron.comm.grid import Grid
from tests.threads import ThreadWorld

pytestmark = pytest.mark.parallel

NAMES = ("world", "tp", "pp", "dp", "embedding")


def places(groups):
    return [(getattr(groups, name).rank, getattr(groups, name).size) for name in NAMES]


@pytest.mark.parametrize(
    "layout", [(1, 1, 1), (8, 2, 2), (8, 1, 4), (8, 4, 1), (12, 2, 3), (6, 1, 1)]
)
def test_groups_are_rows_of_one_reshape(layout):
    """Check threads and dry ranks."""
    grid = Grid(*layout)
    table = torch.arange(grid.world_size).view(grid.dp, grid.pp, grid.tp)
    for rank in range(grid.world_size):
        dp, pp, tp = grid.coords(rank)
        assert table[dp, pp, tp].item() == rank == grid.rank(dp, pp, tp)
        ends = sorted({table[dp, 0, tp].item(), table[dp, -1, tp].item()})
        assert grid.ranks(rank) == {
            "tp": table[dp, pp, :].tolist(),
            "pp": table[dp, :, tp].tolist(),
            "dp": table[:, pp, tp].tolist(),
            "embedding": ends if pp in (0, grid.pp - 1) else [rank],
        }

    def members(comm):
        groups = grid.groups(comm)
        assert groups.world is comm
        return {
            name: getattr(groups, name).all_gather_object(comm.rank) for name in NAMES[1:]
        }, places(groups)

    dry = [places(grid.groups(SoloComm(rank, grid.world_size))) for rank in range(grid.world_size)]
    assert ThreadWorld(grid.world_size).run(members) == [
        (grid.ranks(rank), dry[rank]) for rank in range(grid.world_size)
    ]


def test_tensor_parallel_ranks_are_neighbours():
    assert Grid(16, tp=4, pp=2).ranks(5) == {
        "tp": [4, 5, 6, 7],
        "pp": [1, 5],
        "dp": [5, 13],
        "embedding": [1, 5],
    }


@pytest.mark.parametrize(
    ("sizes", "rank", "ep", "etp", "edp"),
    [
        ((16, 2, 2, 2), 5, [1, 5], [4, 5], [5, 13]),
        ((16, 2, 2, 4, 1), 5, [0, 1, 4, 5], [5], [5, 13]),
        ((16, 2, 2, 1, 1), 5, [5], [5], [0, 1, 4, 5, 8, 9, 12, 13]),
        ((8, 1, 1, 4), 6, [4, 5, 6, 7], [6], [2, 6]),
    ],
)
def test_groups_of_divided_experts(sizes, rank, ep, etp, edp):
    """Order a stage's ranks as (edp, ep, etp)."""
    assert {name: Grid(*sizes).ranks(rank)[name] for name in ("ep", "etp", "edp")} == {
        "ep": ep,
        "etp": etp,
        "edp": edp,
    }


def test_a_dry_rank_of_a_large_job_works_out_no_more_ranks_than_its_groups_have(monkeypatch):
    asked = []
    rank = Grid.rank
    monkeypatch.setattr(Grid, "rank", lambda *place: asked.append(place) or rank(*place))
    groups = Grid(12288, tp=6, pp=8).groups(SoloComm(12287, 12288))
    assert len(asked) == 6 + 8 + 256 + 2
    assert places(groups) == [(12287, 12288), (5, 6), (7, 8), (255, 256), (1, 2)]


def test_a_world_of_another_size_is_refused():
    with pytest.raises(ValueError, match="grid has 8 ranks but 4 were started: run mpiexec -n 8"):
        Grid(8).groups(SoloComm(0, 4))
