"""Memory of one rank at the peak of a step, for each style of software. Values are in bytes or, where the name says so, in MiB.

This project's kernels keep what `costs.memory` counts. Eager PyTorch and Megatron on CUDA keep more. In units of one
(s, b, h) tensor a layer keeps 6 (inputs and outputs of two layer norms, two dropout masks) and 12/t (qkv, context, two of width
4h), and 3 more tensors of scores (softmax, the mask and the output of its dropout). With 2-byte elements and byte masks this is
equation 2 of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022),
sbh (10 + 24/t + 5 a s / (h t)). With full recompute a layer keeps only its input, and one layer's activations exist while it is
recomputed (table 2 of that paper).
Left out: fragmentation beyond one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from ..config.layout import Layout, placement
from ..config.run_config import RunConfig
from ..costs import accounting, run_schedule
from ..costs.memory import attention_bytes, stage_memory
from ..pipeline.instructions import InFlight
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import SPLITS_BACKWARD
from .machine import MIB, Machine
from .software import MemoryParameters, Software
from .work import tensors

PEERS = 256  # peers that get a large receive buffer (common_tofu_max_fastmode_procs)


@lru_cache(maxsize=4096)
def kinds(run: RunConfig) -> tuple[int, ...]:
    """For each stage the first stage of its kind: the same numbers of layers in its parts, embedding and head."""
    where = placement(run)
    alike = part_kinds(run)
    features = [
        tuple(alike[where.virtual_stage(stage, chunk)] for chunk in range(where.model_chunks))
        for stage in range(where.stages)
    ]
    return tuple(map(features.index, features))


@lru_cache(maxsize=4096)
def part_kinds(run: RunConfig) -> tuple[int, ...]:
    """For each part of the model the first part of its kind: the same layers, recomputed or not, embedding and head."""
    sizes = accounting.pipeline_split(run)
    again = run.training.recompute_part_layers
    features = [
        (layers, part == 0, part == len(sizes) - 1, again and min(again[part], layers))
        for part, layers in enumerate(sizes)
    ]
    return tuple(map(features.index, features))


@lru_cache(maxsize=4096)
def _held(lists: Schedule, stage: int) -> tuple[InFlight, ...]:
    return lists.in_flight(stage)


def layer_saved_bytes(run: RunConfig, tp: int) -> float:
    """Bytes that one layer keeps for its backward in software that materialises the attention scores."""
    sizes = tensors(run, tp)
    if run.precision.name == "fp32":
        return (
            6 * sizes["hidden"]
            + sizes["qkv"]
            + sizes["context"]
            + 2 * sizes["mlp"]
            + 3 * sizes["scores"]
        )
    return (
        5 * sizes["hidden"]
        + sizes["qkv"]
        + sizes["context"]
        + 2 * sizes["mlp"]
        + 2.5 * sizes["scores"]
    )


def _activations(
    run: RunConfig,
    layout: Layout,
    stage: int,
    held: Sequence[InFlight],
    parameters: MemoryParameters,
) -> float:
    """Bytes of the kept and temporary tensors of one stage, without the logits."""
    training = run.training
    hidden = tensors(run, layout.tp)["hidden"]
    saved = layer_saved_bytes(run, layout.tp)
    layers = sum(map(len, accounting.stage_layers(run, stage)))
    in_flight = max(sum(moment.activations) for moment in held)
    temporary: float = 2 * tensors(run, layout.tp)["scores"] + 4 * hidden  # of a backward
    if training.recompute_granularity == "full":
        groups = [
            group
            for part in accounting.stage_virtual_stages(run, stage)
            for group in accounting.virtual_stage_recompute_groups(run, part)
        ]
        kept_bytes = in_flight * (len(groups) * hidden + (layers - sum(map(len, groups))) * saved)
        temporary += max(map(len, groups)) * saved
    elif training.recompute_granularity == "selective":
        scores = 3 * tensors(run, layout.tp)["scores"]
        kept_bytes = in_flight * layers * (saved - scores)
        temporary = temporary + scores
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
    """MiB that one rank of `stage` uses at its peak. nodes: of the job, for MPI's buffers and the ranks that share its threads."""
    held = _held(run_schedule.full_batch_schedule(run, layout), stage)
    fixed = _fixed_mib(run, layout, code, nodes, parameters)
    if code.style == "native":
        return fixed + stage_memory(run, layout, stage, held).total / MIB
    count = accounting.stage_parameters(run, layout, stage)
    sharded = parameters.sharded_bytes / accounting.zero_shards(run, layout)
    bytes = count * (parameters.state_bytes + sharded) + _activations(
        run, layout, stage, held, parameters
    )
    if stage == layout.pp - 1:
        bytes += parameters.logits * tensors(run, layout.tp)["logits"]
    return fixed + bytes / MIB


def _fixed_mib(
    run: RunConfig, layout: Layout, code: Software, nodes: int, parameters: MemoryParameters
) -> float:
    """MiB of a rank that holds no tensor."""
    fixed = parameters.base_mib + parameters.peer_mib * min(nodes - 1, PEERS)
    ranks = max(1, layout.world_size // nodes)
    if code.style == "native":
        fixed += attention_bytes(run, layout.tp, max(1, int(parameters.threads / ranks))) / MIB
    glibc = parameters.glibc_mib / ranks  # it has an arena for each thread
    return fixed if code.page_faults == "none" else fixed + glibc


def with_recompute(
    run: RunConfig, layout: Layout, machine: Machine, code: Software, nodes: int
) -> RunConfig:
    """The run with what --recompute-auto chooses in the machine's memory, or in --memory-per-rank; unchanged without the flag."""
    if not run.training.recompute_auto:
        return run
    plain = replace(run, training=replace(run.training, recompute_auto=False))
    space = tensor_room(run, layout, machine, code, nodes)
    fixed = _fixed_mib(run, layout, code, nodes, code.memory(machine))
    if (peak_mib(plain, layout, code, nodes, code.memory(machine)) - fixed) * MIB <= space:
        return (
            plain  # found from one stage of each kind, where `run_schedule.with_recompute` asks all
        )
    lists = run_schedule.full_batch_schedule(run, layout)
    return run_schedule.with_recompute(run, layout, space, lambda stage: _held(lists, stage))


def tensor_room(
    run: RunConfig, layout: Layout, machine: Machine, code: Software, nodes: int
) -> float:
    """Bytes that the tensors of a rank may have: what the machine's memory, or --memory-per-rank, leaves for them."""
    limit = run.training.memory_per_rank or limit_mib(machine, code, layout.world_size // nodes)
    return (limit - _fixed_mib(run, layout, code, nodes, code.memory(machine))) * MIB


def peak_mib(
    run: RunConfig, layout: Layout, code: Software, nodes: int, parameters: MemoryParameters
) -> float:
    """MiB of the rank that uses most. Where backward is whole, the first stage of each kind holds most micro-batches."""
    stages = range(layout.pp) if run.parallel.schedule in SPLITS_BACKWARD else set(kinds(run))
    return max(stage_mib(run, layout, stage, code, nodes, parameters) for stage in stages)


def limit_mib(machine: Machine, code: Software, ranks_per_node: int) -> float:
    """MiB that a rank may use before it is out of memory; a caching allocator first returns what it holds unused (`reclaimed`)."""
    return machine.node_memory_bytes / MIB / ranks_per_node / (1 - code.counts["reclaimed"])
