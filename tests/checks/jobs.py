"""Job maps."""

import itertools
from collections import Counter

from fugaku_megatron.jobs.torus import RankMap


def check_map(made: RankMap) -> None:
    """Check that every node has its ranks, and that every tensor-parallel group is inside a node or a unit."""
    nodes = [tuple(map(int, line.strip("()").split(","))) for line in made.lines().splitlines()]
    assert Counter(nodes) == dict.fromkeys(
        itertools.product(*map(range, made.shape)), made.ranks_per_node
    )
    assert nodes == list(made.nodes)
    tp = made.grid.tp
    for first in range(0, len(nodes), tp):
        group = nodes[first : first + tp]
        assert (
            len(set(group)) == max(1, tp // made.ranks_per_node)
            and len({(x // 2, y // 3, z // 2) for x, y, z in group}) == 1
        )
