"""Layers, parameters, recompute groups and operations of virtual stages and pipeline stages.

A stage's units are its parameters in the order in which backward finishes them; a gradient bucket has whole units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from ..config import freezing
from ..config.layout import stage_sizes
from ..config.model import ModelConfig
from ..config.run_config import RunConfig
from ..pipeline.placement import FIRST_STAGE, balanced_cut, cut_of_stages, even_cut
from .adapters import frozen
from .layers import (
    embedding_records,
    head_records,
    is_quantized,
    layer_and_head_flops,
    layer_records,
    per_layer,
)
from .records import Record
from .sizes import vocabulary_rows


@lru_cache(maxsize=4096)  # searches repeat the same runs
def quantized_elements(run: RunConfig, stage: int) -> int:
    """Return the elements of a stage's weights that are quantized. Predictions of later tokens share one head."""
    elements = 0
    heads = 0
    for record in stage_records(run, stage):
        heads += record.is_head
        repeated = record.is_head and heads > 1
        if record.gemm and is_quantized(run, record) and not repeated:
            _, outputs, inputs = record.gemm
            elements += record.gemm_count * outputs * inputs
    return elements


@lru_cache(maxsize=1024)  # searches repeat the same runs
def virtual_stage_sizes(run: RunConfig) -> tuple[int, ...]:
    """Return layers per virtual stage: given by flags, even, or balanced by FLOPs."""
    layers = run.model.num_layers
    sizes = stage_sizes(run)
    placement = run.placement
    if placement.virtual_stages == 1 or run.parallel.pipeline_split == "even" and sizes is None:
        return even_cut(layers, placement)
    layer, head = layer_and_head_flops(run)
    head += run.model.predictions * layer
    if sizes is None:
        return balanced_cut(layers, placement, layer, head)
    if len(sizes) == placement.virtual_stages:
        return sizes
    return cut_of_stages(sizes, placement, layer, head)


def virtual_stage_layers(run: RunConfig, virtual_stage: int) -> range:
    """Return the layers, from 0, and in the last virtual stage also the MTP modules."""
    sizes = virtual_stage_sizes(run)
    end = sum(sizes[: virtual_stage + 1])
    if virtual_stage == len(sizes) - 1:
        end += run.model.predictions
    return range(sum(sizes[:virtual_stage]), end)


def trains_below(run: RunConfig, virtual_stage: int) -> bool:
    """Return True if backward needs the gradient of a virtual stage's input."""
    if not run.freezes_embedding:
        return virtual_stage > 0
    first = sum(virtual_stage_sizes(run)[:virtual_stage])
    return first > run.layers_without_backward


def stage_layers(run: RunConfig, stage: int) -> list[range]:
    return [
        virtual_stage_layers(run, virtual_stage)
        for virtual_stage in run.placement.virtual_stages_of[stage]
    ]


def whole_layers(model: ModelConfig, layers: Iterable[int]) -> int:
    """Return the number of layers with a mixer and an MLP that have as many parts as these layers, rounded up."""
    return -(-sum(model.layer_parts[layer] for layer in layers) // 2)


def virtual_stage_recompute_groups(run: RunConfig, virtual_stage: int) -> list[range]:
    """Return the groups of layers (from 0) that full recompute runs together.

    An MTP module is a group of its own with --recompute-method uniform, and else saves its activations, as in Megatron-core.
    """
    training = run.training
    if training.recompute_granularity != "full":
        return []
    layers = virtual_stage_sizes(run)[virtual_stage]
    if training.recompute_part_layers is not None:
        return recompute_groups(layers, "block", training.recompute_part_layers[virtual_stage])
    groups = recompute_groups(layers, training.recompute_method, training.recompute_num_layers)
    if training.recompute_method == "uniform":
        for module in range(layers, len(virtual_stage_layers(run, virtual_stage))):
            groups.append(range(module, module + 1))
    return groups


def stage_recompute_groups(run: RunConfig, stage: int) -> list[list[range]]:
    return [
        virtual_stage_recompute_groups(run, virtual_stage)
        for virtual_stage in run.placement.virtual_stages_of[stage]
    ]


@lru_cache(maxsize=4096)  # searches repeat the same runs
def end_records(run: RunConfig, virtual_stage: int) -> tuple[Record, ...]:
    """Return the embedding's and the head's operations."""
    placement = run.placement
    records = list[Record]()
    if virtual_stage == 0:
        records += embedding_records(run)
    if virtual_stage == placement.virtual_stages - 1:
        tied = placement.owner(virtual_stage)[0] == FIRST_STAGE
        records += head_records(run, tied=tied)
        if run.model.predictions and not run.model.tied and not tied:
            table = vocabulary_rows(run) * run.model.hidden_size
            records.append(Record(name="word_embeddings", parameters=table))
    return tuple(records)


def stage_records(run: RunConfig, stage: int) -> list[Record]:
    """Return the operations of a stage for one micro-batch, without gradients of frozen layers."""
    comm_types = run.cp_comm_types
    records = list[Record]()
    for virtual_stage in run.placement.virtual_stages_of[stage]:
        for layer in virtual_stage_layers(run, virtual_stage):
            kind = run.model.all_layer_kinds[layer]
            own = layer_records(run, kind, comm_types[layer])
            if layer < run.frozen_layers:
                own = tuple(frozen(run, record) for record in own)
            if layer < run.layers_without_backward:
                own = tuple(replace(r, flops_backward=0, backward=(), saved_bytes=0) for r in own)
            records += own
        records += end_records(run, virtual_stage)
    return records


def recompute_groups(layers: int, method: str, number: int) -> list[range]:
    """Return the layers recomputed together: all (uniform) or each from the first (block)."""
    if method == "block":
        return [range(i, i + 1) for i in range(min(number, layers))]
    return [range(i, min(i + number, layers)) for i in range(0, layers, number)]


HEAD = "final norm, with an untied head"
EMBEDDING = "embeddings"
TIED = "word embedding that another stage also has"
Unit = int | str  # a layer's number, or one of these


def holds_tied_copy(run: RunConfig, stage: int) -> bool:
    first = FIRST_STAGE
    last = run.placement.last_stage
    shared = run.model.tied or run.model.predictions > 0
    return shared and not run.freezes_embedding and first != last and stage in (first, last)


def is_frozen(run: RunConfig, unit: Unit) -> bool:
    """Return True if --freeze or --freeze-first-layers leaves a whole unit out of training."""
    if isinstance(unit, int):
        return unit < run.frozen_layers
    return run.freezing.has(freezing.HEAD if unit == HEAD else freezing.EMBEDDING)


def units(run: RunConfig, stage: int) -> list[Unit]:
    """Return a stage's units in backward order, the tied copy last."""
    placement = run.placement
    found: list[Unit] = []
    if stage == placement.last_stage:
        found.append(HEAD)
    for model_chunk in reversed(stage_layers(run, stage)):
        found += reversed(model_chunk)
    if stage == FIRST_STAGE:
        found.append(EMBEDDING)
    if holds_tied_copy(run, stage):
        found.append(TIED)
    return found


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
        for virtual_stage in run.placement.virtual_stages_of[stage]
    )


def model_parameters(run: RunConfig) -> int:
    """Count parameters: a tied embedding once, the vocabulary padded for one rank."""
    return stage_parameters(run.on_one_rank, 0)


def active_parameters(run: RunConfig) -> int:
    """Count only the experts to which a token is routed."""
    model = run.model
    layers = [kind.mlp for kind in run.model.all_layer_kinds].count("experts")
    if not layers or model.num_experts is None:
        return model_parameters(run)
    experts = sum(r.parameters for r in layer_records(run.on_one_rank) if r.grouped)
    return (
        model_parameters(run)
        - layers * experts * (model.num_experts - model.moe_router_topk) // model.num_experts
    )
