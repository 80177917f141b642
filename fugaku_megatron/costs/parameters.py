"""Parameters of layers, stages and the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..config.parallel import ParallelConfig
from ..config.run_config import RunConfig
from .layers import layer_records, per_layer
from .stages import end_records, virtual_stage_layers


@lru_cache(maxsize=64)
def layer_parameters(run: RunConfig) -> tuple[int, ...]:
    return per_layer(run, lambda kind: sum(r.parameters for r in layer_records(run, kind)))


def virtual_stage_parameters(run: RunConfig, virtual_stage: int) -> int:
    ends = sum(record.parameters for record in end_records(run, virtual_stage))
    layers = virtual_stage_layers(run, virtual_stage)
    return sum(layer_parameters(run)[layers.start : layers.stop]) + ends


@lru_cache(maxsize=4096)  # searches repeat the same runs
def stage_parameters(run: RunConfig, stage: int) -> int:
    return sum(
        virtual_stage_parameters(run, virtual_stage)
        for virtual_stage in run.placement.virtual_stages_of(stage)
    )


def on_one_rank(run: RunConfig) -> RunConfig:
    return replace(run, parallel=ParallelConfig())


def model_parameters(run: RunConfig) -> int:
    """Count parameters: a tied embedding once, the vocabulary padded for one rank."""
    return stage_parameters(on_one_rank(run), 0)


def active_parameters(run: RunConfig) -> int:
    """Count only the experts to which a token is routed."""
    model = run.model
    layers = run.model.mlps.count("experts")
    if not layers or model.num_experts is None:
        return model_parameters(run)
    experts = sum(r.parameters for r in layer_records(on_one_rank(run)) if r.grouped)
    return (
        model_parameters(run)
        - layers * experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    )
