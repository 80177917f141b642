"""The fast pipeline time equals the walk through the schedule's own lists."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fugaku_megatron.pipeline.schedule import Schedule, build
from fugaku_megatron.pipeline.timeline import COMPUTATIONS, Costs, makespan, one_f_one_b, walk

KINDS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)]


@pytest.mark.parametrize("costs", [(6, 7, 5), (6, 9, 5), (6, 12, 5)])
def test_long_lists_for_unequal_costs_are_extended(costs):
    schedule = replace(build("zbv", 5, 2, 64), costs=(costs,) * 10)
    seconds = drawn(schedule, np.random.default_rng(1))
    assert makespan(schedule, seconds) == pytest.approx(walk(schedule, seconds), rel=1e-2)


def drawn(schedule: Schedule, draw: np.random.Generator) -> Costs:
    """Seconds that differ from stage to stage."""
    shape = (schedule.placement.stages, schedule.placement.chunks)
    return Costs({op: draw.uniform(0.5, 2, shape).tolist() for op in COMPUTATIONS}, float(draw.choice([0.0, 0.1, 1.0])))


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_makespan_equals_the_walked_lists(name, chunks, seed):
    draw = np.random.default_rng(seed)
    stages = int(draw.integers(1, 9))
    schedule = build(name, stages, chunks, int(draw.integers(1, 5 * stages)))
    costs = drawn(schedule, draw)
    assert makespan(schedule, costs) == pytest.approx(walk(schedule, costs), rel=1e-12)


@pytest.mark.parametrize(("name", "chunks"), KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_long_lists_are_extended(name, chunks, seed):
    draw = np.random.default_rng(seed)
    schedule = build(name, 4, chunks, 97)
    costs = drawn(schedule, draw)
    assert makespan(schedule, costs) == pytest.approx(walk(schedule, costs), rel=1e-12 if name == "1f1b" else 1e-2)


def test_equal_stages_give_the_textbook_bubble():
    assert one_f_one_b([1.0] * 8, [2.0] * 8, 0.0, 16) == pytest.approx(3.0 * (16 + 8 - 1))


def test_the_slowest_stage_sets_the_pace():
    slow_last = one_f_one_b([1.0] * 4, [2.0] * 3 + [5.0], 0.0, 65) - one_f_one_b([1.0] * 4, [2.0] * 3 + [5.0], 0.0, 64)
    assert slow_last == pytest.approx(6.0)
