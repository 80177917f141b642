"""What generation would take of each rank's memory, without loading weights: generate --dry-run."""

from __future__ import annotations

from collections.abc import Sequence

from ..run import accounting, activations
from ..run.config import RunConfig
from ..run.layout import Layout

MIB = 2**20


def describe(run: RunConfig, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> str:
    """Parameters, layout, and the weights and the cache of the rank that holds most of each."""
    tp, pp = run.parallel.tensor_model_parallel_size, run.parallel.pipeline_model_parallel_size
    layout, stages = Layout(tp * pp, tp, pp, 1), range(pp)
    weights = max(accounting.stage_parameters(run, layout, stage) for stage in stages) * activations.element_bytes(run)
    positions = max(map(len, prompts)) + max_new_tokens
    layers = max(sum(map(len, accounting.stage_layers(run, stage))) for stage in stages)
    cache = activations.cache_bytes(run, len(prompts), positions, layers, tp)
    slots = activations.cache_slots(run.model, positions)
    return (f"{accounting.parameters(run):,} parameters in {run.precision.name}, tensor parallel {tp}, pipeline parallel {pp}\n"
            f"a rank holds at most {weights / MIB:.1f} MiB of weights and {cache / MIB:.1f} MiB of keys and values: "
            f"{layers} layers, {len(prompts)} samples, {slots} positions")
