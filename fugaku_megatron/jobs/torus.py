"""The Tofu network: shape of a job's nodes, and placement of ranks on nodes.

A unit is 2x3x2 nodes. A tensor-parallel group stays inside a node or a box within a unit; the boxes
form a grid, cut into a box of replicas for every pipeline stage. Hops are shortest paths.

    python -m fugaku_megatron.jobs.torus 16x24x32 2 8 6 > map     shape, ranks per node, TP, PP, and CP unless 1:
                                                                  for mpiexec --vcoordfile
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ..comm.rank_grid import RankGrid
from ..config.fields import check
from ..config.layout import Layout, check_world_size

Shape = tuple[int, int, int]
UNIT: Shape = (2, 3, 2)
UNIT_NODES = math.prod(UNIT)
WHOLE: Shape = (48, 69, 48)  # the whole machine: 24 x 23 x 24 units
NODES = math.prod(WHOLE)  # 158,976
MAX_RANKS_PER_NODE = 48  # one for each core
# nodes of a tensor-parallel group -> the box that they occupy in a unit
TILES: dict[int, Shape] = {
    1: (1, 1, 1),
    2: (2, 1, 1),
    3: (1, 3, 1),
    4: (2, 1, 2),
    6: (2, 3, 1),
    12: (2, 3, 2),
}


def text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def sizes(layout: Layout) -> str:
    words = [layout.tp, layout.pp]
    if layout.cp > 1:
        words.append(layout.cp)
    return " ".join(map(str, words))


def whole(shape: Shape) -> bool:
    return all(n > 0 and n % u == 0 for n, u in zip(shape, UNIT))


def shapes(nodes: int) -> Iterator[Shape]:
    for x in range(UNIT[0], WHOLE[0] + 1, UNIT[0]):
        for y in range(UNIT[1], WHOLE[1] + 1, UNIT[1]):
            z, rest = divmod(nodes, x * y)
            if not rest and z and z % UNIT[2] == 0 and z <= WHOLE[2]:
                yield x, y, z


def best_shape(nodes: int) -> Shape | None:
    """Return the most compact box (smallest sum of edges, then longest edge), or None."""
    return min(shapes(nodes), key=lambda s: (sum(s), max(s), s), default=None)


def nearest(nodes: int) -> list[int]:
    """Return the nearest smaller and larger numbers of nodes with a shape."""
    around = (range(nodes, 0, -1), range(nodes, NODES + 1))
    counts = [
        next((n for n in numbers if n % UNIT_NODES == 0 and best_shape(n)), None)
        for numbers in around
    ]
    return sorted({n for n in counts if n})


def tensor_fits(tp: int, ranks_per_node: int) -> bool:
    return ranks_per_node % tp == 0 or tp % ranks_per_node == 0 and tp // ranks_per_node in TILES


def check_tensor(tp: int, ranks_per_node: int) -> None:
    divisors = {d for d in range(1, ranks_per_node) if ranks_per_node % d == 0}
    sizes = sorted({ranks_per_node * n for n in TILES} | divisors)
    check(
        tensor_fits(tp, ranks_per_node),
        f"--tensor-model-parallel-size {tp} with {ranks_per_node} ranks per node fits neither "
        f"into a node nor into a 2x3x2 unit: pass {', '.join(map(str, sizes))}",
    )


def snake(box: Shape) -> list[Shape]:
    """Order a box's points so that consecutive points are neighbours."""
    return [
        (x, y if x % 2 == 0 else box[1] - 1 - y, z if (x * box[1] + y) % 2 == 0 else box[2] - 1 - z)
        for x in range(box[0])
        for y in range(box[1])
        for z in range(box[2])
    ]


def cut(cells: Shape, replicas: int) -> Shape:
    """Return the edges of the most cubic box of `replicas` cells that tiles `cells`, whose number
    `replicas` divides.
    """
    x, y, z = ([d for d in range(1, c + 1) if c % d == 0] for c in cells)
    return min(
        (b for b in itertools.product(x, y, z) if math.prod(b) == replicas),
        key=lambda b: (sum(b), b),
    )


class RankMap(NamedTuple):
    """Rank placement.

    nodes: coordinates (x, y, z) of each rank's node
    box: edges of a stage's box, in tensor-parallel groups
    """

    shape: Shape
    ranks_per_node: int
    grid: RankGrid
    nodes: tuple[Shape, ...]
    box: Shape

    @staticmethod
    def from_layout(shape: Shape, ranks_per_node: int, tp: int, pp: int, cp: int = 1) -> RankMap:
        """Place a layout. ValueError for a shape without whole units, or sizes that do not fit."""
        check(
            math.prod(shape) <= NODES,
            f"node={text(shape)} is above {NODES} nodes, the whole machine: request fewer",
        )
        check(
            0 < ranks_per_node <= MAX_RANKS_PER_NODE,
            f"{ranks_per_node} ranks per node: pass 1 to {MAX_RANKS_PER_NODE}",
        )
        check(
            whole(shape),
            f"node={text(shape)} is not made of units of 2x3x2: X and Z "
            "must be even, Y a multiple of 3",
        )
        check_tensor(tp, ranks_per_node)
        check_world_size(math.prod(shape) * ranks_per_node, tp, pp, cp)
        grid = RankGrid(math.prod(shape) * ranks_per_node, tp, pp, cp=cp)
        tile = TILES[max(1, tp // ranks_per_node)]
        cells = _shape(n // t for n, t in zip(shape, tile))
        # Tensor-parallel groups of a node: first those that share a sequence, then neighbouring stages, then others.
        slots = max(1, ranks_per_node // tp)
        stages = math.gcd(slots // math.gcd(slots, cp), pp)
        replicas = slots // stages
        box = cut(cells, grid.dp // replicas)
        stage_at = snake(_shape(c // b for c, b in zip(cells, box)))
        replica_at = snake(box)
        inside = snake(tile)

        def node(rank: int) -> Shape:
            dp, stage, index = grid.coords(rank)
            corner = stage_at[stage // stages]
            offset = replica_at[dp // replicas]
            within = inside[index // ranks_per_node] if tp > ranks_per_node else (0, 0, 0)
            return _shape(
                (c * b + o) * t + w for c, b, o, t, w in zip(corner, box, offset, tile, within)
            )

        return RankMap(
            shape=shape,
            ranks_per_node=ranks_per_node,
            grid=grid,
            box=box,
            nodes=tuple(node(rank) for rank in range(grid.world_size)),
        )

    def lines(self) -> str:
        """Return mpiexec --vcoordfile's lines (x,y,z)."""
        return "".join(f"({x},{y},{z})\n" for x, y, z in self.nodes)

    def statistics(self) -> dict[str, tuple[float, int]]:
        """Return (mean, maximum) hops between ring neighbours for tp, pp, dp, and cp if above 1."""
        import numpy as np  # which a check of a script does not need

        grid = self.grid
        nodes = np.array(self.nodes).reshape(-1, grid.pp, grid.cp, grid.tp, 3)
        replicas = nodes.swapaxes(1, 2).reshape(grid.dp, grid.pp, grid.tp, 3)
        rings = {"tp": (nodes, 3), "pp": (nodes, 1), "dp": (replicas, 0)}
        if grid.cp > 1:
            rings["cp"] = (nodes, 2)
        result = {}
        for kind, (places, axis) in rings.items():
            steps = np.abs(np.diff(places, axis=axis))
            hops = np.minimum(steps, np.array(self.shape) - steps).sum(-1)
            result[kind] = (float(hops.mean()), int(hops.max())) if hops.size else (0.0, 0)
        return result


def _shape(sizes: Iterable[int]) -> Shape:
    x, y, z = sizes
    return x, y, z


def _is_size(word: str) -> bool:
    return word.isdecimal() and len(word) <= len(str(NODES)) and int(word) > 0


def main(argv: Sequence[str]) -> int:
    """Print the rank map of a node shape and layout; return 2 for wrong arguments."""
    try:
        check(
            len(argv) in (4, 5) and all(map(_is_size, argv[1:])),
            "pass SHAPE RANKS_PER_NODE TP PP [CP], such as 16x24x32 2 8 6",
        )
        word = argv[0]
        parts = word.split("x")
        check(
            len(parts) == 3 and all(_is_size(p) for p in parts),
            f"node shape {word!r:.60}: pass XxYxZ, such as 4x6x16",
        )
        made = RankMap.from_layout(_shape(map(int, parts)), *map(int, argv[1:]))
    except ValueError as error:
        print(f"fugaku_megatron.jobs.torus: {error}", file=sys.stderr)
        return 2
    sys.stdout.write(made.lines())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
