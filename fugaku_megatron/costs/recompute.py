"""--recompute-auto: which layers of each stage and chunk backward computes again, as few as fit into memory. No torch.

Early stages of a pipeline hold more micro-batches than late ones, and early chunks of a stage more than late ones, so a number for
all of them would recompute too much or hold too much. Attention alone (selective) is no choice: attention keeps one number for each
row and head, so a layer recomputed whole frees several hundred times as much for less than a hundred times the time.
Left out: the bytes (`memory`), the time (`perf`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config.layout import Layout, placement
from ..config.run_config import RunConfig
from ..pipeline.parts import Held
from .accounting import part_recompute_groups, pipeline_split, stage_parts
from .memory import chunks_live_bytes, live_bytes, stage_memory

MIB = 2**20
StageHolds = Callable[[int], Sequence[Held]]


def recompute_name(run: RunConfig) -> str:
    """What is recomputed, in words: none, selective, full, "block N" for N layers of each chunk, or "N of M" layers."""
    training = run.training
    if training.recompute_part_layers:
        return f"{sum(training.recompute_part_layers)} of {run.model.num_layers}"
    if training.recompute_granularity != "full":
        return training.recompute_granularity or "none"
    return f"block {training.recompute_num_layers}" if training.recompute_method == "block" else "full"


def choice_line(run: RunConfig, limit: float) -> str:
    """What `settled` has chosen for a run, for its log. limit: bytes, as it was given."""
    within = f"recompute: chosen for {limit / MIB:.0f} MiB a rank (model): "
    if run.training.recompute_part_layers is None:
        return within + "none"
    stages = range(run.parallel.pipeline_model_parallel_size)
    return within + "of the layers of each stage" + ", chunk by chunk" * (placement(run).chunks > 1) + ", " + "; ".join(
        f"{stage}: {' '.join(str(again) for again in layers_again(run, stage))}" for stage in stages)


def layers_again(run: RunConfig, stage: int) -> list[int]:
    """How many layers of each chunk of a stage are recomputed."""
    return [sum(map(len, part_recompute_groups(run, part))) for part in stage_parts(run, stage)]




def without_choice(run: RunConfig) -> RunConfig:
    """The run without --recompute-auto, which recomputes nothing."""
    return replace(run, training=replace(run.training, recompute_auto=False))


def settled(run: RunConfig, layout: Layout, limit: float, holds: StageHolds) -> RunConfig:
    """The run with the flags that say what --recompute-auto chooses; unchanged without it.

    limit: bytes of a rank's tensors (`memory.Memory.total`). holds: what the schedule of a stage holds (`schedule.Schedule.held`).
    A stage for which no choice is enough recomputes all of its layers.
    """
    if not run.training.recompute_auto:
        return run
    run = without_choice(run)
    numbers = dict.fromkeys(range(len(pipeline_split(run))), 0)
    for stage in range(layout.pp):
        numbers |= zip(stage_parts(run, stage), fewest(run, layout, stage, limit, holds(stage)))
    if not any(numbers.values()):
        return run
    layers = tuple(numbers.values())
    return replace(run, training=replace(run.training, recompute_granularity="full", recompute_part_layers=layers))


def fewest(run: RunConfig, layout: Layout, stage: int, limit: float, held: Sequence[Held]) -> tuple[int, ...]:
    """Layers of each chunk of a stage that are recomputed, for a run that recomputes none so far."""
    layers = [pipeline_split(run)[part] for part in stage_parts(run, stage)]
    whole = stage_memory(run, layout, stage, held)
    if whole.total <= limit:
        return (0,) * len(layers)
    room = limit - (whole.total + whole.reused - live_bytes(run, layout, stage, held))  # less is kept, less is reused

    def fits(count: int) -> bool:
        again = [[range(i, i + 1) for i in range(number)] for number in spread(count, layers, held)]
        return chunks_live_bytes(run, layout.tp, layers, again, held) <= room

    some = range(1, sum(layers))  # each further layer takes less; all of one micro-batch take more than all but one
    return spread(1 + bisect_left(some, True, key=fits), layers, held)


def spread(count: int, layers: Sequence[int], held: Sequence[Held]) -> tuple[int, ...]:
    """`count` layers of a stage, shared out among its chunks: first to those that hold most micro-batches at once."""
    most = [max(moment.activations[chunk] for moment in held) for chunk in range(len(layers))]
    numbers = [0] * len(layers)
    for chunk in sorted(range(len(layers)), key=lambda chunk: -most[chunk]):
        numbers[chunk] = min(count, layers[chunk])
        count -= numbers[chunk]
    return tuple(numbers)
