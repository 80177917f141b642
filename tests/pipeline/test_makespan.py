"""Virtual stages of a model, the division of layers among them, and simulated and extrapolated schedule times."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fugaku_megatron.pipeline.placement import Placement, V, balanced_cut
from fugaku_megatron.pipeline.schedule import Schedule, build
from fugaku_megatron.pipeline.timeline import COMPUTATIONS, Costs, makespan, walk

pytestmark = pytest.mark.unit

PLACEMENTS = [
    *(Placement(p, v) for p in (1, 2, 3, 8) for v in (1, 2, 5)),
    *(Placement(p, 2, V) for p in (1, 2, 3, 8)),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_owner_inverts_part_and_neighbours_follow_the_model(placement):
    owned = {
        (stage, chunk): placement.virtual_stage(stage, chunk)
        for stage in range(placement.stages)
        for chunk in range(placement.model_chunks)
    }
    assert sorted(owned.values()) == list(range(placement.virtual_stages))
    for (stage, chunk), part in owned.items():
        assert placement.owner(part) == (stage, chunk)
        after, before = (placement.neighbour(stage, chunk, step) for step in (1, -1))
        assert owned.get(after) == (part + 1 if part + 1 < placement.virtual_stages else None)
        assert owned.get(before) == (part - 1 if part else None)


@pytest.mark.parametrize(
    "placement",
    [Placement(p, v) for p in (1, 2, 3) for v in (1, 2, 3)] + [Placement(2, 2, V)],
    ids=str,
)
@pytest.mark.parametrize("head", [0, 30, 100])
def test_no_cut_has_a_cheaper_costliest_stage(placement, head):
    layers = 10
    head_stage = placement.owner(placement.virtual_stages - 1)[0]

    def costliest(totals):
        return max(10 * n + head * (stage == head_stage) for stage, n in enumerate(totals))

    every = [
        c
        for c in itertools.product(
            range(placement.model_chunks, layers + 1), repeat=placement.stages
        )
        if sum(c) == layers
    ]
    sizes = balanced_cut(layers, placement, 10, head)
    assert sum(sizes) == layers and min(sizes) >= 1
    totals = [
        sum(sizes[placement.virtual_stage(s, c)] for c in range(placement.model_chunks))
        for s in range(placement.stages)
    ]
    assert costliest(totals) == min(map(costliest, every))


def slots(name: str, stages: int, chunks: int, microbatches: int) -> float:
    """Return the slots of an iteration with F = I = W = 1 for all chunks of a stage, B = 2 and free messages."""
    schedule = build(name, stages, chunks, microbatches)
    return walk(schedule, Costs.alike(schedule))


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 5), (4, 8), (8, 16), (8, 40)])
def test_bubbles(stages, microbatches):
    p = stages
    m = microbatches
    assert slots("1f1b", p, 1, m) == 3 * (m + p - 1)
    assert slots("interleaved", p, 3, -(-m // p) * p) == pytest.approx(
        3 * -(-m // p) * p + (p - 1)
    )  # a third of 1F1B's
    assert slots("zb-h1", p, 1, m) == 3 * m + (p - 1)  # a third of 1F1B's
    assert (
        slots("zbv", p, 2, m) == 3 * m + (p - 1) / 2
    )  # none, but that the last stage begins (p - 1) half slots late


KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]


def drawn(schedule: Schedule, draw: np.random.Generator) -> Costs:
    """Draw seconds that differ from stage to stage."""
    shape = (schedule.placement.stages, schedule.placement.model_chunks)
    return Costs(
        {op: draw.uniform(0.5, 2, shape).tolist() for op in COMPUTATIONS},
        float(draw.choice([0.0, 0.1, 1.0])),
    )


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_makespan_equals_the_walked_lists(name, chunks, seed):
    draw = np.random.default_rng(seed)
    stages = int(draw.integers(1, 9))
    schedule = build(name, stages, chunks, int(draw.integers(1, 5 * stages)))
    costs = drawn(schedule, draw)
    assert makespan(schedule, costs) == pytest.approx(walk(schedule, costs), rel=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rel"),
    [
        *(
            (build(name, 4, chunks, 97), 1e-12 if name == "1f1b" else 1e-2)
            for name, chunks in KINDS
        ),
        *(
            (replace(build("zbv", 5, 2, 64), costs=(costs,) * 10), 1e-2)
            for costs in ((6, 7, 5), (6, 9, 5), (6, 12, 5))
        ),
    ],
)
def test_long_lists_are_extended(schedule, rel):
    for seed in range(2):
        costs = drawn(schedule, np.random.default_rng(seed))
        assert makespan(schedule, costs) == pytest.approx(walk(schedule, costs), rel=rel)
