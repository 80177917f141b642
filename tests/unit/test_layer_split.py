"""Layers are cut into parts of equal cost, whatever the placement."""

from __future__ import annotations

import itertools

import pytest

from fugaku_megatron.pipeline import parts
from fugaku_megatron.pipeline.parts import Placement, V


@pytest.mark.parametrize(("layers", "placement", "head", "expected"), [
    (12, Placement(1), 45, [12]),
    (12, Placement(2), 45, [8, 4]),
    (12, Placement(5), 45, [2, 3, 3, 3, 1]),
    (12, Placement(2, 2), 45, [4, 3, 4, 1]),
    (12, Placement(2, 2, V), 45, [3, 4, 4, 1]),  # the first stage has the logits
    (12, Placement(1, 3), 45, [5, 6, 1]),
    (40, Placement(8, 5), 1, [1] * 40),
    (24, Placement(4, 2), 0, [3] * 8),
    (26, Placement(4, 2), 0, [3, 3, 3, 3, 3, 3, 4, 4]),
])
def test_balanced(layers, placement, head, expected):
    assert list(parts.balanced_cut(layers, placement, 10, head)) == expected


@pytest.mark.parametrize("placement", [Placement(p, v) for p in (1, 2, 3) for v in (1, 2, 3)] + [Placement(2, 2, V)], ids=str)
@pytest.mark.parametrize("head", [0, 7, 30, 100])
def test_no_cut_has_a_cheaper_costliest_stage(placement, head):
    layers, head_stage = 10, placement.owner(placement.parts - 1)[0]

    def costliest(totals):
        return max(10 * n + head * (stage == head_stage) for stage, n in enumerate(totals))

    every = [c for c in itertools.product(range(placement.chunks, layers + 1), repeat=placement.stages) if sum(c) == layers]
    sizes = parts.balanced_cut(layers, placement, 10, head)
    assert sum(sizes) == layers and min(sizes) >= 1
    totals = [sum(sizes[placement.part(s, c)] for c in range(placement.chunks)) for s in range(placement.stages)]
    assert costliest(totals) == min(map(costliest, every))


def test_given_stages_are_cut_into_chunks():
    assert parts.cut_of_stages((8, 4), Placement(2, 2), 10, 45) == (4, 3, 4, 1)
    assert parts.cut_of_stages((7, 4), Placement(2, 2, V), 10, 45) == (6, 2, 2, 1)
    assert parts.even_cut(12, Placement(2, 3)) == (2,) * 6
