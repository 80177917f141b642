"""The pipeline schedule of a run, with the costs that zero-bubble lists are made for, and what --recompute-auto chooses for it.

Early stages of a pipeline hold more micro-batches than late ones, and early chunks of a stage more than late ones, so one number of
recomputed layers for all of them would recompute too much or hold too much. Attention alone (selective) is not a choice: attention
keeps one number for each row and head, so a layer recomputed whole frees several hundred times as much for less than a hundred
times the time. Left out: the bytes (`memory`), the time (`perf`). No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ..config.layout import Layout, placement
from ..config.run_config import RunConfig
from ..pipeline.cuts import PartCosts, SplitCosts
from ..pipeline.instructions import InFlight
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import SPLITS_BACKWARD
from .accounting import (
    layer_and_head_flops,
    pipeline_split,
    stage_virtual_stages,
    virtual_stage_recompute_groups,
)
from .memory import chunks_live_bytes, live_bytes, stage_memory

# F, I and W of a layer, relative to each other: F and I have norms and attention, W has matmuls alone.
LAYER_COSTS = 6, 7, 5
RECOMPUTE_COST = 5  # added to I by full recompute: F without its last matmul
# W where tensor-parallel ranks all-reduce in F and I: lists are compared at it, but those made for it come out longer.
REDUCED_WEIGHT_COST = 2
MIB = 2**20
StageHolds = Callable[[int], Sequence[InFlight]]


@lru_cache(maxsize=1024)  # a search asks for the same again and again
def split_costs(run: RunConfig, reduced: bool = False) -> PartCosts:
    """What F, I and W of each part of the model cost relative to each other, as schedules take it: the same on all ranks.

    reduced: with the all-reduces of tensor-parallel ranks, if there are any. Nothing is measured, and what --recompute-auto chooses
    does not count: another list would reduce in another order, and bits would differ. The head computes its gradients while it
    holds the logits, in F.
    """
    forward, inputs, weights = LAYER_COSTS
    if reduced and run.parallel.tensor_model_parallel_size > 1:
        weights = REDUCED_WEIGHT_COST
    layer, head = layer_and_head_flops(run)
    chosen = run.training.recompute_part_layers is not None
    costs = list[SplitCosts]()
    for part, layers in enumerate(pipeline_split(run)):
        again = 0 if chosen else sum(map(len, virtual_stage_recompute_groups(run, part)))
        costs.append((forward * layers, inputs * layers + RECOMPUTE_COST * again, weights * layers))
    last, inputs, weights = costs.pop()
    return (*costs, (last + round(3 * forward * head / layer), inputs, weights))


def build_schedule(run: RunConfig, microbatches: int) -> Schedule:
    """The schedule that a run's flags ask for."""
    name = run.parallel.schedule
    if name not in SPLITS_BACKWARD:
        return Schedule(name, placement(run), microbatches)
    return Schedule(
        name,
        placement(run),
        microbatches,
        split_costs(run),
        split_costs(run, reduced=True),
        run.parallel.zero_bubble_max_pending_backward,
    )


def full_batch_schedule(run: RunConfig, layout: Layout) -> Schedule:
    """`build_schedule` for an iteration at the full global batch size."""
    return build_schedule(run, layout.microbatches(run, layout.global_batch_size(run)))


def recompute_name(run: RunConfig) -> str:
    """What is recomputed, in words: none, selective, full, "block N" for N layers of each chunk, or "N of M" layers."""
    training = run.training
    if training.recompute_part_layers:
        return f"{sum(training.recompute_part_layers)} of {run.model.num_layers}"
    if training.recompute_granularity != "full":
        return training.recompute_granularity or "none"
    return (
        f"block {training.recompute_num_layers}" if training.recompute_method == "block" else "full"
    )


def resolve_recompute(run: RunConfig, layout: Layout, limit: float) -> tuple[RunConfig, list[str]]:
    """The run with what --recompute-auto chooses for its schedule within `limit` bytes, and the line of the log about it."""
    run = with_recompute(run, layout, limit, full_batch_schedule(run, layout).in_flight)
    return run, [choice_line(run, limit)]


def choice_line(run: RunConfig, limit: float) -> str:
    """What `with_recompute` has chosen for a run within `limit` bytes, for its log."""
    within = f"recompute: chosen for {limit / MIB:.0f} MiB a rank (model): "
    if run.training.recompute_part_layers is None:
        return within + "none"
    stages = range(run.parallel.pipeline_model_parallel_size)
    return (
        within
        + "of the layers of each stage"
        + ", chunk by chunk" * (placement(run).model_chunks > 1)
        + ", "
        + "; ".join(
            f"{stage}: {' '.join(str(again) for again in recomputed_layers(run, stage))}"
            for stage in stages
        )
    )


def recomputed_layers(run: RunConfig, stage: int) -> list[int]:
    """How many layers of each chunk of a stage are recomputed."""
    return [
        sum(map(len, virtual_stage_recompute_groups(run, part)))
        for part in stage_virtual_stages(run, stage)
    ]


def with_recompute(run: RunConfig, layout: Layout, limit: float, holds: StageHolds) -> RunConfig:
    """The run with the flags that say what --recompute-auto chooses; unchanged without it.

    limit: bytes of a rank's tensors (`memory.Memory.total`). holds: what the schedule of a stage holds (`schedule.Schedule.in_flight`).
    A stage for which no choice is enough recomputes all of its layers.
    """
    if not run.training.recompute_auto:
        return run
    run = replace(run, training=replace(run.training, recompute_auto=False))  # recomputes nothing
    numbers = dict.fromkeys(range(len(pipeline_split(run))), 0)
    for stage in range(layout.pp):
        numbers |= zip(
            stage_virtual_stages(run, stage), fewest(run, layout, stage, limit, holds(stage))
        )
    if not any(numbers.values()):
        return run
    layers = tuple(numbers.values())
    return replace(
        run,
        training=replace(run.training, recompute_granularity="full", recompute_part_layers=layers),
    )


def fewest(
    run: RunConfig, layout: Layout, stage: int, limit: float, held: Sequence[InFlight]
) -> tuple[int, ...]:
    """Layers of each chunk of a stage that are recomputed, for a run that recomputes none so far."""
    layers = [pipeline_split(run)[part] for part in stage_virtual_stages(run, stage)]
    whole = stage_memory(run, layout, stage, held)
    if whole.total <= limit:
        return (0,) * len(layers)
    space = limit - (
        whole.total + whole.reused - live_bytes(run, layout, stage, held)
    )  # less is kept, less is reused

    def fits(count: int) -> bool:
        again = [[range(i, i + 1) for i in range(number)] for number in spread(count, layers, held)]
        return chunks_live_bytes(run, layout.tp, layers, again, held) <= space

    some = range(
        1, sum(layers)
    )  # each further layer takes less; all of one micro-batch take more than all but one
    return spread(1 + bisect_left(some, True, key=fits), layers, held)


def spread(count: int, layers: Sequence[int], held: Sequence[InFlight]) -> tuple[int, ...]:
    """`count` layers of a stage, shared out among its chunks: first to those that hold most micro-batches at once."""
    most = [max(moment.activations[chunk] for moment in held) for chunk in range(len(layers))]
    numbers = [0] * len(layers)
    for chunk in sorted(range(len(layers)), key=lambda chunk: -most[chunk]):
        numbers[chunk] = min(count, layers[chunk])
        count -= numbers[chunk]
    return tuple(numbers)
