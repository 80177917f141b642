"""The pipeline schedule of a run, with the costs that zero-bubble lists are made for."""

from __future__ import annotations

from functools import lru_cache

from ..config.layout import placement
from ..config.run_config import RunConfig
from ..pipeline.parts import (
    SPLITS_BACKWARD,
    PartCosts,
    SplitCosts,
)
from ..pipeline.schedule import Schedule
from .accounting import layer_and_head_flops, part_recompute_groups, pipeline_split

# F, I and W of a layer, beside one another: F and I have norms and attention, W has products alone. What full recompute adds to I:
# F without its last product. W where tensor-parallel ranks add up in F and I: lists are compared for it, but those made for it come
# out longer.
LAYER_COSTS = 6, 7, 5


AGAIN_COST = 5


WEIGHTS_BESIDE_SUMS = 2


@lru_cache(maxsize=1024)  # a search asks for the same again and again
def split_costs(run: RunConfig, summed: bool = False) -> PartCosts:
    """What F, I and W of each part of the model cost beside one another, as schedules take it: the same on all ranks.

    summed: with the sums of tensor-parallel ranks, if there are any.

    Nothing is measured, and what --recompute-auto chooses does not count: with another list sums would be taken in another order,
    and bits would differ. The head computes its gradients while it holds the logits, in F.
    """
    forward, inputs, weights = LAYER_COSTS
    if summed and run.parallel.tensor_model_parallel_size > 1:
        weights = WEIGHTS_BESIDE_SUMS
    layer, head = layer_and_head_flops(run)
    chosen, costs = run.training.recompute_part_layers is not None, list[SplitCosts]()
    for part, layers in enumerate(pipeline_split(run)):
        again = 0 if chosen else sum(map(len, part_recompute_groups(run, part)))
        costs.append((forward * layers, inputs * layers + AGAIN_COST * again, weights * layers))
    last, inputs, weights = costs.pop()
    return (*costs, (last + round(3 * forward * head / layer), inputs, weights))


def of_run(run: RunConfig, microbatches: int) -> Schedule:
    """The schedule that a run's flags ask for."""
    name = run.parallel.schedule
    if name not in SPLITS_BACKWARD:
        return Schedule(name, placement(run), microbatches)
    return Schedule(name, placement(run), microbatches, split_costs(run), split_costs(run, summed=True),
                    run.parallel.zero_bubble_max_pending_backward)
