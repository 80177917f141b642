"""Node shapes and rank maps: every tensor group in a node or unit, replicas in boxes, neighbours close."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from fugaku_megatron.jobs import torus
from fugaku_megatron.jobs.torus import RankMap


def check_map(made: RankMap) -> None:
    """What mpiexec reads: every node has its ranks, and every tensor-parallel group lies in a node or a unit."""
    nodes = [tuple(map(int, line.strip("()").split(","))) for line in made.lines().splitlines()]
    assert Counter(nodes) == dict.fromkeys(itertools.product(*map(range, made.shape)), made.ranks_per_node)
    assert nodes == list(made.nodes)
    tp = made.grid.tp
    for first in range(0, len(nodes), tp):
        group = nodes[first : first + tp]
        assert len(set(group)) == max(1, tp // made.ranks_per_node) and len({(x // 2, y // 3, z // 2) for x, y, z in group}) == 1


@pytest.mark.parametrize("nodes, shape", [(12, (2, 3, 2)), (384, (8, 6, 8)), (6144, (16, 24, 16)), (12288, (16, 24, 32))])
def test_shapes_are_whole_units_and_compact(nodes, shape):
    assert torus.best_shape(nodes) == shape


@pytest.mark.parametrize("nodes", [512, 13, 12 * 43])
def test_node_counts_without_a_shape_have_neighbours_with_one(nodes):
    assert torus.best_shape(nodes) is None
    below, above = torus.nearest(nodes)
    assert below < nodes < above and torus.best_shape(below) and torus.best_shape(above)


@pytest.mark.parametrize("shape, ranks, tp, pp", [((2, 3, 2), 1, 12, 1), ((4, 6, 4), 4, 8, 6), ((4, 6, 4), 4, 2, 3),
                                                  ((8, 6, 8), 1, 6, 8), ((4, 3, 4), 4, 1, 1), ((4, 6, 8), 2, 6, 4),
                                                  ((16, 24, 16), 2, 8, 32)])
def test_the_map_read_back_keeps_tensor_groups_together(shape, ranks, tp, pp):
    check_map(RankMap.from_layout(shape, ranks, tp, pp))


@pytest.mark.parametrize("shape, ranks, tp, pp", [((4, 6, 4), 4, 8, 6), ((8, 6, 8), 1, 1, 8), ((8, 6, 8), 1, 4, 6)])
def test_replicas_of_a_stage_fill_a_box(shape, ranks, tp, pp):
    made = RankMap.from_layout(shape, ranks, tp, pp)
    for stage in range(pp):
        for index in range(tp):
            group = {made.nodes[made.grid.rank(dp, stage, index)] for dp in range(made.grid.dp)}
            assert len(group) == math.prod(len({node[axis] for node in group}) for axis in range(3))


def test_neighbours_are_close():
    made = RankMap.from_layout((8, 6, 8), 1, 1, 6)
    assert made.statistics()["dp"] == (1.0, 1)  # a snake through the box
    assert made.statistics()["tp"] == (0.0, 0)


def test_sizes_that_fit_nowhere_are_refused():
    with pytest.raises(ValueError, match="pass 1, 2, 3, 4, 6, 12"):
        RankMap.from_layout((4, 6, 4), 1, 8, 1)
    with pytest.raises(ValueError, match="X and Z must be even"):
        RankMap.from_layout((3, 6, 4), 1, 1, 1)


def test_command(capsys):
    assert torus.main(["2x3x2", "1", "2", "1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    assert torus.main(["2x3", "1", "2", "1"]) == 2
