"""A run's pipeline schedule, the costs for zero-bubble schedules, and the choice by --recompute-auto."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..pipeline.instructions import InFlight
from ..pipeline.placement import SplitCosts, VirtualStageCosts
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import row
from .layers import layer_and_head_flops
from .memory import chunks_live_bytes, live_bytes, stage_memory
from .stages import (
    stage_layers,
    stage_recompute_groups,
    virtual_stage_layers,
    virtual_stage_recompute_groups,
    virtual_stage_sizes,
)

# Relative costs of a layer's F, I and W: F and I have norms and attention, W has matmuls alone.
LAYER_COSTS = 6, 7, 5
RECOMPUTE_COST = 5  # added to I by full recompute: F without its last matmul
# W if tensor-parallel ranks all-reduce in F and I. Schedules are compared at this cost; schedules made for it are longer.
REDUCED_WEIGHT_COST = 2
MIB = 2**20
StageInFlight = Callable[[int], Sequence[InFlight]]


@lru_cache(maxsize=1024)  # searches repeat the same runs
def split_costs(run: RunConfig, reduced: bool = False) -> VirtualStageCosts:
    """Return each virtual stage's relative costs for F, I and W, the same on all ranks.

    reduced: count all-reduces among tensor-parallel ranks. Neither measurements nor --recompute-auto enter, because another schedule
    would change bits. The head computes its gradients in F.
    """
    forward, inputs, weights = LAYER_COSTS
    if reduced and run.tp > 1:
        weights = REDUCED_WEIGHT_COST
    layer, head = layer_and_head_flops(run)
    chosen = run.training.recompute_part_layers is not None
    costs = list[SplitCosts]()
    for virtual_stage in range(run.placement.virtual_stages):
        layers = len(virtual_stage_layers(run, virtual_stage))
        recomputed = 0
        if not chosen:
            groups = virtual_stage_recompute_groups(run, virtual_stage)
            recomputed = sum(map(len, groups))
        costs.append(
            (forward * layers, inputs * layers + RECOMPUTE_COST * recomputed, weights * layers)
        )
    last, inputs, weights = costs.pop()
    return (*costs, (last + round(3 * forward * head / layer), inputs, weights))


def build_schedule(run: RunConfig, microbatches: int) -> Schedule:
    """Build the schedule; a split backward is ordered by the stages' relative costs."""
    name = run.parallel.schedule
    if not row(name).splits_backward:
        return Schedule(name, run.placement, microbatches)
    return Schedule(
        name,
        run.placement,
        microbatches,
        split_costs(run),
        split_costs(run, reduced=True),
        run.parallel.zero_bubble_max_pending_backward,
    )


def full_batch_schedule(run: RunConfig, layout: Layout) -> Schedule:
    return build_schedule(run, layout.microbatches(run))


def recompute_name(run: RunConfig) -> str:
    """Return none, selective, full, "block N" (layers per model chunk), or "N of M" layers."""
    training = run.training
    if training.recompute_part_layers:
        return f"{sum(training.recompute_part_layers)} of {run.model.num_layers}"
    if training.recompute_granularity != "full":
        return training.recompute_granularity or "none"
    if training.recompute_method == "block":
        return f"block {training.recompute_num_layers}"
    return "full"


def resolve_recompute(run: RunConfig, layout: Layout, limit: float) -> tuple[RunConfig, list[str]]:
    run = with_recompute(run, layout, limit, full_batch_schedule(run, layout).in_flight)
    return run, [choice_line(run, limit)]


def choice_line(run: RunConfig, limit: float) -> str:
    within = f"recompute: chosen for {limit / MIB:.0f} MiB a rank (model): "
    if run.training.recompute_part_layers is None:
        return within + "none"
    chunks = ", chunk by chunk" if run.placement.model_chunks > 1 else ""
    counts = "; ".join(
        f"{stage}: {' '.join(map(str, recomputed_layers(run, stage)))}"
        for stage in range(run.placement.stages)
    )
    return f"{within}of the layers of each stage{chunks}, {counts}"


def recomputed_layers(run: RunConfig, stage: int) -> list[int]:
    return [sum(map(len, groups)) for groups in stage_recompute_groups(run, stage)]


def with_recompute(
    run: RunConfig, layout: Layout, limit: float, in_flight: StageInFlight
) -> RunConfig:
    """Return the run with --recompute-auto resolved; unchanged without the flag.

    limit: bytes for a rank's tensors (`memory.Memory.total`).
    A stage for which no choice suffices recomputes all layers.
    """
    if not run.training.recompute_auto:
        return run
    run = replace(run, training=replace(run.training, recompute_auto=False))  # recomputes nothing
    placement = run.placement
    numbers = dict.fromkeys(range(placement.virtual_stages), 0)
    for stage in range(layout.pp):
        recomputed = fewest(run, layout, stage, limit, in_flight(stage))
        numbers |= zip(placement.virtual_stages_of[stage], recomputed)
    if not any(numbers.values()):
        return run
    layers = tuple(numbers.values())
    return replace(
        run,
        training=replace(run.training, recompute_granularity="full", recompute_part_layers=layers),
    )


def fewest(
    run: RunConfig, layout: Layout, stage: int, limit: float, in_flight: Sequence[InFlight]
) -> tuple[int, ...]:
    """Return the fewest layers to recompute, by model chunk, that fit a stage into `limit` bytes."""
    own = stage_layers(run, stage)
    sizes = virtual_stage_sizes(run)  # without MTP modules, which are not recomputed
    layers = [sizes[n] for n in run.placement.virtual_stages_of[stage]]
    whole = stage_memory(run, layout, stage, in_flight)
    if whole.total <= limit:
        return (0,) * len(layers)
    # fewer saved activations also mean less reused memory
    others = whole.total + whole.reused - live_bytes(run, stage, in_flight)
    space = limit - others

    def fits(count: int) -> bool:
        counts = spread(count, layers, in_flight)
        groups = [[range(i, i + 1) for i in range(number)] for number in counts]
        return chunks_live_bytes(run, own, groups, in_flight) <= space

    # With one micro-batch in flight, recomputing all layers keeps more than recomputing all but one.
    some = range(1, sum(layers))
    return spread(1 + bisect_left(some, True, key=fits), layers, in_flight)


def spread(count: int, layers: Sequence[int], in_flight: Sequence[InFlight]) -> tuple[int, ...]:
    """Distribute `count` layers over model chunks, most micro-batches in flight first."""
    most = [max(moment.activations[chunk] for moment in in_flight) for chunk in range(len(layers))]
    numbers = [0] * len(layers)
    for chunk in sorted(range(len(layers)), key=lambda chunk: -most[chunk]):
        numbers[chunk] = min(count, layers[chunk])
        count -= numbers[chunk]
    return tuple(numbers)
