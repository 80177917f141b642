"""Peak memory on one rank, for each software style, in bytes or MiB.

This project's kernels save the tensors that `costs.memory` counts. Eager PyTorch and Megatron on
CUDA save sbh (10 + 24/t + 5 a s / (h t)) bytes per layer with 2-byte elements and byte masks:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), equation
2. Full recompute saves only a layer's input. Left out: fragmentation beyond one factor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import lru_cache

from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import run_schedule
from ..costs.attention import attention_workspace_bytes
from ..costs.buckets import zero_shards
from ..costs.memory import stage_memory
from ..costs.stages import (
    stage_layers,
    stage_parameters,
    stage_recompute_groups,
    virtual_stage_layers,
    virtual_stage_sizes,
    whole_layers,
)
from ..pipeline.instructions import InFlight
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import row
from .machine import MIB
from .software import MemoryParameters, Software
from .system import System
from .work import tensors

PEERS = 256  # peers that get a large receive buffer (common_tofu_max_fastmode_procs)


@lru_cache(maxsize=4096)
def kinds(run: RunConfig) -> tuple[int, ...]:
    """Return, for each stage, the first stage with the same layers, embedding and head."""
    alike = virtual_stage_kinds(run)
    features = [
        tuple(alike[virtual_stage] for virtual_stage in run.placement.virtual_stages_of[stage])
        for stage in range(run.placement.stages)
    ]
    return tuple(map(features.index, features))


@lru_cache(maxsize=4096)
def virtual_stage_kinds(run: RunConfig) -> tuple[int, ...]:
    sizes = virtual_stage_sizes(run)
    recomputed = run.training.recompute_part_layers
    features = []
    for n, layers in enumerate(sizes):
        own = virtual_stage_layers(run, n)
        kinds = run.model.all_layer_kinds[own.start : own.stop]
        again = recomputed and min(recomputed[n], layers)
        features.append((kinds, n == 0, n == len(sizes) - 1, again))
    return tuple(map(features.index, features))


_in_flight = lru_cache(maxsize=4096)(Schedule.in_flight)


def layer_saved_bytes(run: RunConfig) -> float:
    """Return the bytes that a layer saves for backward if attention scores are materialised."""
    sizes = tensors(run)
    is_fp32 = run.precision.name == "fp32"
    return (
        (6 if is_fp32 else 5) * sizes["hidden"]
        + sizes["qkv"]
        + sizes["context"]
        + 2 * sizes["mlp"]
        + (3 if is_fp32 else 2.5) * sizes["scores"]
    )


def _activations(
    run: RunConfig,
    layout: Layout,
    stage: int,
    moments: Sequence[InFlight],
    parameters: MemoryParameters,
) -> float:
    training = run.training
    sizes = tensors(run)
    hidden = sizes["hidden"]
    scores = sizes["scores"]
    saved = layer_saved_bytes(run)
    layers = sum(whole_layers(run.model, own) for own in stage_layers(run, stage))
    in_flight = max(sum(moment.activations) for moment in moments)
    temporary: float = 2 * scores + 4 * hidden  # of a backward
    if training.recompute_granularity == "full":
        groups = [group for chunk in stage_recompute_groups(run, stage) for group in chunk]
        kept_bytes = in_flight * (len(groups) * hidden + (layers - sum(map(len, groups))) * saved)
        temporary += max(map(len, groups)) * saved
    elif training.recompute_granularity == "selective":
        kept_bytes = in_flight * layers * (saved - 3 * scores)
        temporary += 3 * scores
    else:
        kept_bytes = in_flight * layers * saved
    boundary = in_flight * (parameters.in_flight if layout.pp > 1 else 0) * hidden
    return parameters.activation * kept_bytes + boundary + parameters.working * temporary


@lru_cache(maxsize=4096)
def stage_mib(
    run: RunConfig,
    layout: Layout,
    stage: int,
    code: Software,
    nodes: int,
    parameters: MemoryParameters,
) -> float:
    """Return the peak MiB of one of the stage's ranks, runtime and MPI buffers included."""
    moments = _in_flight(run_schedule.full_batch_schedule(run, layout), stage)
    fixed = _fixed_mib(run, layout, code, nodes, parameters)
    if code.style == "native":
        return fixed + stage_memory(run, layout, stage, moments).total / MIB
    count = stage_parameters(run, stage)
    sharded = parameters.sharded_bytes / zero_shards(run, layout)
    bytes = count * (parameters.state_bytes + sharded) + _activations(
        run, layout, stage, moments, parameters
    )
    if stage == layout.pp - 1:
        bytes += parameters.logits * tensors(run)["logits"]
    return fixed + bytes / MIB


def _fixed_mib(
    run: RunConfig, layout: Layout, code: Software, nodes: int, parameters: MemoryParameters
) -> float:
    fixed = parameters.base_mib + parameters.peer_mib * min(nodes - 1, PEERS)
    ranks = max(1, layout.world_size // nodes)
    if code.style == "native":
        fixed += attention_workspace_bytes(run, max(1, int(parameters.threads / ranks))) / MIB
    glibc = parameters.glibc_mib / ranks  # it has an arena for each thread
    return fixed if code.page_faults == "none" else fixed + glibc


def with_recompute(run: RunConfig, layout: Layout, system: System) -> RunConfig:
    if not run.training.recompute_auto:
        return run
    plain = replace(run, training=replace(run.training, recompute_auto=False))
    space = tensor_room(run, layout, system)
    fixed = _fixed_mib(run, layout, system.software, system.nodes, system.memory)
    if (peak_mib(plain, layout, system) - fixed) * MIB <= space:
        return plain  # checks one stage of each kind, not all as `run_schedule.with_recompute`
    lists = run_schedule.full_batch_schedule(run, layout)
    return run_schedule.with_recompute(run, layout, space, lambda stage: _in_flight(lists, stage))


def tensor_room(run: RunConfig, layout: Layout, system: System) -> float:
    """Return the bytes for a rank's tensors in the machine's memory or --memory-per-rank."""
    limit = run.training.memory_per_rank or system.limit_mib
    return (limit - _fixed_mib(run, layout, system.software, system.nodes, system.memory)) * MIB


def peak_mib(
    run: RunConfig, layout: Layout, system: System, parameters: MemoryParameters | None = None
) -> float:
    """Return the MiB on the fullest rank. If backward is whole, each kind's first stage is fullest."""
    parameters = parameters or system.memory
    stages: Collection[int] = range(layout.pp)
    if not row(run.parallel.schedule).splits_backward:
        stages = set(kinds(run))
    return max(
        stage_mib(run, layout, stage, system.software, system.nodes, parameters) for stage in stages
    )
