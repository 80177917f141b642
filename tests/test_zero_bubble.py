"""Zero-bubble lists that are made for what F, I and W cost. That they can be walked: tests/test_schedule.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fugaku_megatron import zero_bubble
from fugaku_megatron.parts import ALIKE, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Placement, V
from fugaku_megatron.run.recompute import split_costs
from fugaku_megatron.schedule import Schedule, build, held, of_run
from fugaku_megatron.timeline import Costs, walk
from tests.helpers import small_run

OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def end(lists: Schedule, costs: tuple[int, int, int]) -> float:
    """When the stages have finished where F, I and W cost what `costs` says."""
    stages = lists.placement.stages
    return walk(lists, Costs({op: [[cost, cost]] * stages for op, cost in zip(OPERATIONS, costs, strict=True)}))


@pytest.mark.parametrize(("costs", "gain"), [((6, 7, 5), 0.985), ((6, 12, 5), 0.88)])
@pytest.mark.parametrize("stages", [4, 6, 8])
def test_lists_made_for_the_costs_are_shorter(stages, costs, gain):
    slots = build("zbv", stages, 2, 4 * stages)
    own = replace(slots, costs=costs)
    assert end(own, costs) <= gain * end(slots, costs)
    assert end(own, costs) <= (1 + 0.6 / 4) * 8 * stages * sum(costs)  # of the time that every stage is busy


@pytest.mark.parametrize("costs", [(6, 7, 5), (6, 9, 5), (6, 12, 5)])
@pytest.mark.parametrize("stages", [1, 2, 5, 8])
def test_they_hold_no_more_than_the_first_stage_of_1f1b(stages, costs):
    own = replace(build("zbv", stages, 2, 40), costs=costs)
    for stage in range(stages):
        moments = held(own.instructions(stage), 2)
        assert max(sum(m.activations) + sum(m.weight_inputs) for m in moments) <= 2 * stages
        assert set(own.held(stage)) == set(moments), "a shorter list holds as much"


def test_a_list_that_blocking_sends_would_stop_is_not_taken():
    placement, costs = Placement(16, 2, V), (6, 12, 5)  # one of the cases that have such lists
    ways = [zero_bubble._Stages(placement, 40, 32, costs, empties).lists for empties in (False, True)]
    ends = [zero_bubble.end(placement, way, costs) for way in ways]
    assert math.inf in ends
    assert zero_bubble.end(placement, zero_bubble.lists(placement, 40, 32, costs), costs) < math.inf


@pytest.mark.parametrize("costs", [ALIKE, (6, 7, 5), (6, 12, 5)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (8, 4), (5, 16)])
def test_the_end_is_that_of_the_walk_and_no_later_than_that_of_the_list_for_equal_costs(stages, microbatches, costs):
    equal = build("zbv", stages, 2, microbatches)
    own = replace(equal, costs=costs)
    found = zero_bubble.lists(own.placement, microbatches, 2 * stages, costs)
    assert zero_bubble.end(own.placement, found, costs) == end(own, costs) <= end(equal, costs)


@pytest.mark.parametrize(("changes", "costs"), [
    ({}, (6, 7, 5)), ({"recompute_granularity": "full"}, (6, 12, 5)),
    ({"recompute_granularity": "full", "recompute_part_layers": (2, 2, 2, 0)}, (6, 7, 5))])
def test_recompute_makes_the_gradient_of_the_input_longer(changes, costs):
    run = small_run(num_layers=8, pipeline_model_parallel_size=2, pipeline_schedule="zbv", **changes)
    assert split_costs(run) == of_run(run, 4).costs == costs
    assert of_run(replace(run, parallel=replace(run.parallel, pipeline_schedule="zb-h1")), 4).costs == ALIKE
