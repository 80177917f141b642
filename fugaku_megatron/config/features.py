"""Trainer features that save time or memory, one row each.

The planner tries the features, and the performance model counts their gain. Tests check that each
row's flag and module exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A row in FEATURES.

    place: module below the package
    field: config field that switches the feature; None: always on
    value: value, or tuple of values, that switches it on
    """

    meaning: str
    place: str
    field: str | None = None
    value: Any = True


FEATURES: dict[str, Feature] = {
    BALANCED_SPLIT: Feature(
        meaning="stages of equal cost, the logits counted",
        place="costs/stages.py",
        field="pipeline_split",
        value="balanced",
    ),
    ZERO_1: Feature(
        meaning="optimizer state sharded over data-parallel ranks",
        place="optim/optimizer.py",
        field="zero_stage",
        value=1,
    ),
    SELECTIVE: Feature(
        meaning="attention alone is computed again",
        place="nn/blocks.py",
        field="recompute_granularity",
        value="selective",
    ),
    BLOCK: Feature(
        meaning="some layers of a stage are computed again",
        place="nn/blocks.py",
        field="recompute_method",
        value="block",
    ),
    RECOMPUTE_AUTO: Feature(
        meaning="each stage and chunk recomputes as few layers as fit into memory",
        place="costs/run_schedule.py",
        field="recompute_auto",
    ),
    OVERLAP_GRAD_REDUCE: Feature(
        meaning="buckets of gradients are reduced, overlapped with the last backward",
        place="optim/buckets.py",
        field="overlap_grad_reduce",
    ),
    OVERLAP_PARAM_GATHER: Feature(
        meaning="ZeRO's weights are gathered, overlapped with the next forward",
        place="optim/buckets.py",
        field="overlap_param_gather",
    ),
    GRAD_REDUCE_IN_BF16: Feature(
        meaning="gradients are sent in BF16",
        place="optim/buckets.py",
        field="grad_reduce_in_bf16",
    ),
    NODE_SUMS: Feature(
        meaning="groups inside a node all-reduce in shared memory, on all cores",
        place="comm/node.py",
    ),
    TWO_LEVEL_SUMS: Feature(
        meaning="groups over several nodes reduce and exchange inside each node, then between nodes",
        place="comm/two_level.py",
    ),
    SEQUENCE_PARALLEL: Feature(
        meaning="norms, dropout and residuals on 1/TP of the sequence",
        place="nn/layers.py",
        field="sequence_parallel",
    ),
    TP_COMM_OVERLAP: Feature(
        meaning="tensor-parallel collectives, overlapped with matmuls",
        place="nn/ops/overlapped.py",
        field="tp_comm_overlap",
    ),
    EXPERT_GROUPS: Feature(
        meaning="rows of experts are sent between nodes in groups, overlapped with matmuls of others",
        place="nn/experts.py",
    ),
    INTERLEAVED: Feature(
        meaning="several chunks of layers on a stage",
        place="pipeline/instruction_lists.py",
        field="pipeline_schedule",
        value=schedule_names.of_feature(INTERLEAVED),
    ),
    ZERO_BUBBLE: Feature(
        meaning="weight gradients fill the pipeline's bubble",
        place="pipeline/instruction_lists.py",
        field="pipeline_schedule",
        value=schedule_names.of_feature(ZERO_BUBBLE),
    ),
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
    names = []
    for name, feature in FEATURES.items():
        values = feature.value if isinstance(feature.value, tuple) else (feature.value,)
        if feature.field is None:
            names.append(name)
        elif feature.field == "pipeline_schedule":
            if run.parallel.schedule in values:
                names.append(name)
        elif run.values[feature.field] in values:
            names.append(name)
    return frozenset(names)


def field_of(name: str) -> str:
    field = FEATURES[name].field
    assert field is not None, name
    return field


def switched(run: RunConfig, name: str, on: bool = True) -> RunConfig:
    field = field_of(name)
    group = GROUP_OF[field]
    return replace(run, **{group: replace(getattr(run, group), **{field: on})})
