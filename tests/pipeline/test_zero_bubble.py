"""Zero-bubble lists for given costs of F, I and W: their length, their memory, and the costs of runs."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat

import pytest

from fugaku_megatron.config.run_config import ParallelConfig
from fugaku_megatron.costs.layers import layer_and_head_flops
from fugaku_megatron.costs.run_schedule import build_schedule, split_costs
from fugaku_megatron.costs.stages import virtual_stage_sizes
from fugaku_megatron.pipeline import zero_bubble
from fugaku_megatron.pipeline.instructions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    InFlight,
    peaks_in_flight,
)
from fugaku_megatron.pipeline.placement import Placement, SplitCosts, V, VirtualStageCosts
from fugaku_megatron.pipeline.schedule import Schedule, build
from fugaku_megatron.pipeline.timeline import Costs, walk
from tests.checks.schedules import part_costs
from tests.helpers import small_run

pytestmark = pytest.mark.unit


OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)


def made_for(
    costs: SplitCosts,
    stages: int,
    microbatches: int,
    head: int = 0,
    pending: int | None = None,
) -> Schedule:
    """Build ZB-V for virtual stages of these costs."""
    return replace(
        build("zbv", stages, 2, microbatches),
        costs=part_costs(2 * stages, costs, head),
        pending=pending,
    )


def end(lists: Schedule, costs: VirtualStageCosts) -> float:
    """Return the end of all stages at these costs of virtual stages."""
    place = lists.placement
    stages = range(lists.placement.stages)
    chunks = range(lists.placement.model_chunks)
    return walk(
        lists,
        Costs(
            {
                op: [
                    [costs[place.virtual_stage(stage, chunk)][n] for chunk in chunks]
                    for stage in stages
                ]
                for n, op in enumerate(OPERATIONS)
            }
        ),
    )


def busy(lists: Schedule, costs: VirtualStageCosts) -> int:
    """Return the computation time of the busiest stage."""
    place = lists.placement
    stages = range(lists.placement.stages)
    return lists.microbatches * max(
        sum(sum(costs[place.virtual_stage(stage, chunk)]) for chunk in range(place.model_chunks))
        for stage in stages
    )


def most(moments: Sequence[InFlight], share: float = 1) -> float:
    """Return the most micro-batches in flight, per model chunk. share: weight of those between I and W."""
    return max(sum(moment.activations) + share * sum(moment.weight_inputs) for moment in moments)


@pytest.mark.parametrize(("costs", "gain"), [((6, 7, 5), 0.985), ((6, 12, 5), 0.88)])
@pytest.mark.parametrize("stages", [4, 6, 8])
def test_lists_made_for_the_costs_are_shorter(stages, costs, gain):
    slots = build("zbv", stages, 2, 4 * stages)
    own = made_for(costs, stages, 4 * stages)
    assert end(own, own.costs) <= gain * end(slots, own.costs)
    assert end(own, own.costs) <= (1 + 0.6 / 4) * busy(own, own.costs)


@pytest.mark.parametrize(
    ("costs", "head"), [((6, 7, 5), 0), ((6, 9, 5), 0), ((6, 12, 5), 0), ((6, 7, 5), 50)]
)
@pytest.mark.parametrize(("stages", "more"), [(1, 0), (2, 3), (5, 0), (8, 3)])
def test_they_hold_no_more_than_they_may(stages, costs, head, more):
    pending = stages + more if more else None
    own = made_for(costs, stages, 70, head, pending)
    for stage in range(stages):
        moments = peaks_in_flight(own.instructions(stage), 2)
        assert most(moments) <= 2 * (pending or stages)
        for share in (1, 0.6):  # of a chunk's bytes that its W needs
            assert most(own.in_flight(stage), share) == pytest.approx(
                most(moments, share), rel=0.03
            ), "a shorter list holds as much"


def test_costs_of_runs_and_where_there_is_no_list():
    place = Placement(8, 2, V)
    costs = part_costs(16, (6, 7, 5), 14)
    made = [
        zero_bubble._Simulation(place, 24, 32, zero_bubble.Policy(costs, True, empties)).lists
        for empties in (False, True)
    ]
    assert math.inf in [zero_bubble.end(place, lists, costs) for lists in made]
    assert zero_bubble.end(place, zero_bubble.lists(place, 24, 32, costs), costs) < math.inf
    placement = Placement(12, 3)
    with pytest.raises(
        zero_bubble.NoList,
        match="12 stages of 3 chunks that hold 54 of them have no zero-bubble list",
    ):
        zero_bubble.lists(
            placement,
            168,
            54,
            tuple(repeat((6, 7, 5), placement.virtual_stages)),
            tuple(repeat((6, 7, 2), placement.virtual_stages)),
        )
    run = small_run(
        num_layers=4,
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        pipeline_schedule="zb-h1",
        zero_bubble_max_pending_backward=3,
    )
    lists = build_schedule(run, 4)
    assert (
        lists.pending == 3
        and [w for _, _, w in lists.costs] == [10, 10]
        and [w for _, _, w in lists.compared] == [4, 4]
    )


@pytest.mark.parametrize(
    ("costs", "head"), [((1, 1, 1), 0), ((6, 7, 5), 0), ((6, 12, 5), 0), ((6, 7, 5), 50)]
)
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (8, 4), (5, 16)])
def test_the_end_is_that_of_the_walk_and_no_later_than_that_of_the_list_for_equal_costs(
    stages, microbatches, costs, head
):
    own = made_for(costs, stages, microbatches, head)
    found = zero_bubble.lists(own.placement, microbatches, 2 * stages, own.costs)
    assert (
        zero_bubble.end(own.placement, found, own.costs)
        == end(own, own.costs)
        <= end(replace(own, costs=()), own.costs)
    )


@pytest.mark.parametrize(
    ("changes", "costs"),
    [
        ({}, (6, 7, 5)),
        ({"recompute_granularity": "full"}, (6, 12, 5)),
        ({"recompute_granularity": "full", "recompute_part_layers": (2, 2, 2, 0)}, (6, 7, 5)),
    ],
)
def test_parts_cost_what_their_layers_and_the_head_do(changes, costs):
    run = small_run(
        num_layers=8, pipeline_model_parallel_size=2, pipeline_schedule="zbv", **changes
    )
    found = build_schedule(run, 4)
    layers = virtual_stage_sizes(run)
    layer, head = layer_and_head_flops(run)
    expected = [tuple(cost * count for cost in costs) for count in layers]
    expected[-1] = (expected[-1][0] + round(3 * 6 * head / layer), *expected[-1][1:])
    assert found.costs == found.compared == split_costs(run) == tuple(expected)
    assert (
        build_schedule(
            replace(run, parallel=ParallelConfig(pipeline_model_parallel_size=2)), 4
        ).costs
        == ()
    )
