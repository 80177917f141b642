"""The grid's arithmetic against the definition (one reshape), and the groups on threads and on dry ranks."""

import time

import pytest
import torch

from fugaku_megatron.comm.grid import Grid
from fugaku_megatron.comm.solo import SoloComm
from tests.threads import ThreadWorld

NAMES = ("world", "tp", "pp", "dp", "embedding")
LAYOUTS = [(1, 1, 1), (4, 2, 2), (8, 2, 2), (8, 1, 4), (8, 4, 1), (12, 2, 3), (6, 1, 1)]


def reshaped(grid):
    return torch.arange(grid.world_size).view(grid.dp, grid.pp, grid.tp)  # (dp, pp, tp)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coords_are_one_reshape(layout):
    grid = Grid(*layout)
    table = reshaped(grid)
    for rank in range(grid.world_size):
        assert table[grid.coords(rank)].item() == rank == grid.rank(*grid.coords(rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_are_rows_of_the_reshape(layout):
    grid = Grid(*layout)
    table = reshaped(grid)
    for rank in range(grid.world_size):
        dp, pp, tp = grid.coords(rank)
        ends = sorted({table[dp, 0, tp].item(), table[dp, -1, tp].item()})
        assert grid.ranks(rank) == {
            "tp": table[dp, pp, :].tolist(),
            "pp": table[dp, :, tp].tolist(),
            "dp": table[:, pp, tp].tolist(),
            "embedding": ends if pp in (0, grid.pp - 1) else [rank],
        }


def test_tensor_parallel_ranks_are_neighbours():
    assert Grid(16, tp=4, pp=2).ranks(5) == {"tp": [4, 5, 6, 7], "pp": [1, 5], "dp": [5, 13], "embedding": [1, 5]}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_on_threads_hold_the_right_ranks(layout):
    grid = Grid(*layout)

    def members(comm):
        groups = grid.groups(comm)
        assert groups.world is comm
        return {name: getattr(groups, name).all_gather_object(comm.rank) for name in NAMES[1:]}

    assert ThreadWorld(grid.world_size).run(members) == [grid.ranks(rank) for rank in range(grid.world_size)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dry_groups_equal_real_ones(layout):
    grid = Grid(*layout)

    def shape(comm):
        groups = grid.groups(comm)
        places = [(getattr(groups, name).rank, getattr(groups, name).size) for name in NAMES]
        return places

    dry = [shape(SoloComm(rank, grid.world_size)) for rank in range(grid.world_size)]
    assert dry == ThreadWorld(grid.world_size).run(shape)


def test_a_dry_rank_of_a_large_job_is_built_at_once():
    begin = time.monotonic()
    groups = Grid(12288, tp=6, pp=8).groups(SoloComm(12287, 12288))
    assert time.monotonic() - begin < 1
    assert [(getattr(groups, n).rank, getattr(groups, n).size) for n in NAMES] == [
        (12287, 12288), (5, 6), (7, 8), (255, 256), (1, 2)]


def test_one_stage_has_no_other_embedding():
    assert Grid(2).groups(SoloComm(1, 2)).embedding.size == 1


@pytest.mark.parametrize("sizes", [(10, 2, 4), (3, 2, 2), (4, 0, 1), (4, 1, -1), (0, 1, 1)])
def test_sizes_that_do_not_divide_are_our_mistake(sizes):
    """Users' sizes are checked before, by `layout.check_world_size`."""
    with pytest.raises(AssertionError):
        Grid(*sizes)


def test_a_world_of_another_size_is_refused():
    with pytest.raises(ValueError, match="grid has 8 ranks but 4 were started: run mpiexec -n 8"):
        Grid(8).groups(SoloComm(0, 4))
