"""Trainer features that save time or memory, one row each.

The planner tries the features, and the performance model counts their gain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..pipeline import schedule_names
from .run_config import GROUP_OF, RunConfig

BALANCED_SPLIT = "pipeline_split_balanced"
SELECTIVE = "recompute_selective"
BLOCK = "recompute_block"
ZERO_1 = "zero_stage_1"
RECOMPUTE_AUTO = "recompute_auto"
OVERLAP_GRAD_REDUCE = "overlap_grad_reduce"
OVERLAP_PARAM_GATHER = "overlap_param_gather"
GRAD_REDUCE_IN_BF16 = "grad_reduce_in_bf16"
NODE_SUMS = "node_shared_sums"
TWO_LEVEL_SUMS = "two_level_sums"
SEQUENCE_PARALLEL = "sequence_parallel"
TP_COMM_OVERLAP = "tp_comm_overlap"
INTERLEAVED = "interleaved_schedule"
ZERO_BUBBLE = "zero_bubble_schedule"
EXPERT_GROUPS = "expert_groups"


class Feature(NamedTuple):
    """A row in FEATURES.

    field: config field that switches the feature; None: always on
    values: those that switch it on
    """

    field: str | None = None
    values: tuple[Any, ...] = (True,)


FEATURES: dict[str, Feature] = {
    # Stages of equal cost, the logits counted.
    BALANCED_SPLIT: Feature("pipeline_split", ("balanced",)),
    # Optimizer state sharded over data-parallel ranks.
    ZERO_1: Feature("zero_stage", (1,)),
    # Attention alone is computed again.
    SELECTIVE: Feature("recompute_granularity", ("selective",)),
    # Some layers of a stage are computed again.
    BLOCK: Feature("recompute_method", ("block",)),
    # Each stage and chunk recomputes as few layers as fit into memory.
    RECOMPUTE_AUTO: Feature(RECOMPUTE_AUTO),
    # Buckets of gradients are reduced, overlapped with the last backward.
    OVERLAP_GRAD_REDUCE: Feature(OVERLAP_GRAD_REDUCE),
    # ZeRO's weights are gathered, overlapped with the next forward.
    OVERLAP_PARAM_GATHER: Feature(OVERLAP_PARAM_GATHER),
    # Gradients are sent in BF16.
    GRAD_REDUCE_IN_BF16: Feature(GRAD_REDUCE_IN_BF16),
    # Groups inside a node all-reduce in shared memory, on all cores.
    NODE_SUMS: Feature(),
    # Groups over several nodes reduce and exchange inside each node, then between nodes.
    TWO_LEVEL_SUMS: Feature(),
    # Norms, dropout and residuals on 1/TP of the sequence.
    SEQUENCE_PARALLEL: Feature(SEQUENCE_PARALLEL),
    # Tensor-parallel collectives, overlapped with matmuls.
    TP_COMM_OVERLAP: Feature(TP_COMM_OVERLAP),
    # Rows of experts are sent between nodes in groups, overlapped with matmuls of others.
    EXPERT_GROUPS: Feature(),
    # Several chunks of layers on a stage.
    INTERLEAVED: Feature("pipeline_schedule", schedule_names.of_feature(INTERLEAVED)),
    # Weight gradients fill the pipeline's bubble.
    ZERO_BUBBLE: Feature("pipeline_schedule", schedule_names.of_feature(ZERO_BUBBLE)),
}

# Features with a flag without value; a feature that needs another one is listed before it.
SWITCHES = (
    OVERLAP_PARAM_GATHER,
    OVERLAP_GRAD_REDUCE,
    GRAD_REDUCE_IN_BF16,
    TP_COMM_OVERLAP,
    SEQUENCE_PARALLEL,
    RECOMPUTE_AUTO,
)


def used(run: RunConfig) -> frozenset[str]:
    """Return the names of all features in a run, including features without a flag."""
    values = {**run.values, "pipeline_schedule": run.parallel.schedule}
    return frozenset(
        name
        for name, feature in FEATURES.items()
        if feature.field is None or values[feature.field] in feature.values
    )


def field_of(name: str) -> str:
    field = FEATURES[name].field
    assert field is not None, name
    return field


def switched(run: RunConfig, name: str, on: bool = True) -> RunConfig:
    field = field_of(name)
    group = GROUP_OF[field]
    return replace(run, **{group: replace(getattr(run, group), **{field: on})})
