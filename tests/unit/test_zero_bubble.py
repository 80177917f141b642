"""Zero-bubble lists that are made for what F, I and W cost. That they can be walked: tests/unit/test_schedule.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fugaku_megatron.config.run_config import ParallelConfig
from fugaku_megatron.costs.accounting import layer_and_head_flops, pipeline_split
from fugaku_megatron.costs.run_schedule import of_run, split_costs
from fugaku_megatron.pipeline import zero_bubble
from fugaku_megatron.pipeline.parts import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Held, PartCosts, Placement, SplitCosts, V
from fugaku_megatron.pipeline.schedule import Schedule, build, held
from fugaku_megatron.pipeline.timeline import Costs, walk
from tests.helpers import small_run

OPERATIONS = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
# Of 124M, whose head costs five layers, and of a model whose head costs two, both cut for stages of equal cost.
HEAVY = {2: ((18, 21, 15), (24, 28, 20), (24, 28, 20), (94, 7, 5)),
         4: ((12, 14, 10), *((18, 21, 15),) * 6, (42, 7, 5))}


def part_costs(parts: int, each: SplitCosts, head: int = 0) -> PartCosts:
    """head: what the last part's F costs beside its layers."""
    return *(each,) * (parts - 1), (each[0] + head, *each[1:])


def made_for(costs: SplitCosts, stages: int, microbatches: int, head: int = 0, pending: int | None = None) -> Schedule:
    """ZB-V for parts that cost so much."""
    return replace(build("zbv", stages, 2, microbatches), costs=part_costs(2 * stages, costs, head), pending=pending)


def end(lists: Schedule, costs: PartCosts) -> float:
    """When the stages have finished where the parts cost what `costs` says."""
    place, stages, chunks = lists.placement, range(lists.placement.stages), range(lists.placement.chunks)
    return walk(lists, Costs({op: [[costs[place.part(stage, chunk)][n] for chunk in chunks] for stage in stages]
                              for n, op in enumerate(OPERATIONS)}))


def busy(lists: Schedule, costs: PartCosts) -> int:
    """For how long the busiest stage computes."""
    place, stages = lists.placement, range(lists.placement.stages)
    return lists.microbatches * max(sum(sum(costs[place.part(stage, chunk)]) for chunk in range(place.chunks)) for stage in stages)


def most(moments: Sequence[Held], share: float = 1) -> float:
    """What a stage holds at its fullest moment, in micro-batches of a chunk. share: of what is held between I and W."""
    return max(sum(moment.activations) + share * sum(moment.weight_inputs) for moment in moments)


@pytest.mark.parametrize(("costs", "gain"), [((6, 7, 5), 0.985), ((6, 12, 5), 0.88)])
@pytest.mark.parametrize("stages", [4, 6, 8])
def test_lists_made_for_the_costs_are_shorter(stages, costs, gain):
    slots, own = build("zbv", stages, 2, 4 * stages), made_for(costs, stages, 4 * stages)
    assert end(own, own.costs) <= gain * end(slots, own.costs)
    assert end(own, own.costs) <= (1 + 0.6 / 4) * busy(own, own.costs)


@pytest.mark.parametrize(("stages", "microbatches", "pending", "idle"), [(2, 4, None, 0.06), (2, 4, 3, 0.005), (2, 16, 3, 0.01),
                                                                         (4, 16, 6, 0.03)])
def test_a_heavy_last_part_and_more_memory_leave_stages_busy(stages, microbatches, pending, idle):
    own = replace(made_for((6, 7, 5), stages, microbatches, pending=pending), costs=HEAVY[stages])
    alike = replace(own, costs=(), pending=None)
    assert end(own, own.costs) <= (1 + idle) * busy(own, own.costs) and end(own, own.costs) < 0.97 * end(alike, own.costs)
    assert max(most(own.held(stage)) for stage in range(stages)) <= 2 * (pending or stages)


@pytest.mark.parametrize(("costs", "head"), [((6, 7, 5), 0), ((6, 9, 5), 0), ((6, 12, 5), 0), ((6, 7, 5), 50)])
@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("more", [0, 3])
def test_they_hold_no_more_than_they_may(stages, costs, head, more):
    pending = stages + more if more else None
    own = made_for(costs, stages, 70, head, pending)
    for stage in range(stages):
        moments = held(own.instructions(stage), 2)
        assert most(moments) <= 2 * (pending or stages)
        for share in (1, 0.6):  # of a chunk's bytes that its W needs
            assert most(own.held(stage), share) == pytest.approx(most(moments, share), rel=0.03), "a shorter list holds as much"


def test_a_list_that_blocking_sends_would_stop_is_not_taken():
    place = Placement(8, 2, V)
    costs = part_costs(16, (6, 7, 5), 14)
    made = [zero_bubble._Stages(place, 24, 32, zero_bubble.Way(costs, True, empties)).lists for empties in (False, True)]
    assert math.inf in [zero_bubble.end(place, lists, costs) for lists in made]
    assert zero_bubble.end(place, zero_bubble.lists(place, 24, 32, costs), costs) < math.inf


@pytest.mark.parametrize(("costs", "head"), [((1, 1, 1), 0), ((6, 7, 5), 0), ((6, 12, 5), 0), ((6, 7, 5), 50)])
@pytest.mark.parametrize(("stages", "microbatches"), [(1, 3), (4, 2), (8, 4), (5, 16)])
def test_the_end_is_that_of_the_walk_and_no_later_than_that_of_the_list_for_equal_costs(stages, microbatches, costs, head):
    own = made_for(costs, stages, microbatches, head)
    found = zero_bubble.lists(own.placement, microbatches, 2 * stages, own.costs)
    assert zero_bubble.end(own.placement, found, own.costs) == end(own, own.costs) <= end(replace(own, costs=()), own.costs)


@pytest.mark.parametrize(("changes", "costs"), [
    ({}, (6, 7, 5)), ({"recompute_granularity": "full"}, (6, 12, 5)),
    ({"recompute_granularity": "full", "recompute_part_layers": (2, 2, 2, 0)}, (6, 7, 5))])
def test_parts_cost_what_their_layers_and_the_head_do(changes, costs):
    run = small_run(num_layers=8, pipeline_model_parallel_size=2, pipeline_schedule="zbv", **changes)
    layers, found = pipeline_split(run), of_run(run, 4)
    layer, head = layer_and_head_flops(run)
    expected = [tuple(cost * count for cost in costs) for count in layers]
    expected[-1] = (expected[-1][0] + round(3 * 6 * head / layer), *expected[-1][1:])
    assert found.costs == found.compared == split_costs(run) == tuple(expected)
    assert of_run(replace(run, parallel=ParallelConfig(pipeline_model_parallel_size=2)), 4).costs == ()


def test_sums_of_tensor_parallel_ranks_make_weight_gradients_a_smaller_share():
    run = small_run(num_layers=4, pipeline_model_parallel_size=2, tensor_model_parallel_size=2, pipeline_schedule="zb-h1",
                    zero_bubble_max_pending_backward=3)
    lists = of_run(run, 4)
    assert lists.pending == 3 and [w for _, _, w in lists.costs] == [10, 10] and [w for _, _, w in lists.compared] == [4, 4]


def test_where_blocking_sends_stop_every_list_there_is_none():
    placement = Placement(12, 3)
    with pytest.raises(zero_bubble.NoList, match="12 stages of 3 chunks that hold 54 of them have no zero-bubble list"):
        zero_bubble.lists(placement, 168, 54, ((6, 7, 5),) * placement.parts, ((6, 7, 2),) * placement.parts)
