"""Memory of one rank at the peak of a step, for each style of software.

This project's kernels keep what `fugaku_megatron.run.memory` counts. Eager PyTorch and Megatron on CUDA keep more: per
layer, in elements of (s, b, h), 6 (two layer norms' inputs and outputs, two dropout masks), 12/t (qkv, context, two of width 4h)
and 3 tensors of scores (softmax, its dropout's mask and output); with 2 bytes and byte masks this is equation 2 of Korthikanti et
al., "Reducing Activation Recomputation in Large Transformer Models" (2022), sbh (10 + 24/t + 5 a s / (h t)). With full recompute a
layer keeps its input alone, and one layer's activations are there while it is recomputed (table 2 there).
Left out: fragmentation beyond one factor. Test: pytest tests/test_perf_memory.py
"""

from __future__ import annotations

from functools import lru_cache

from ..run import accounting
from ..run.accounting import Layout
from ..run.config import RunConfig
from ..run.memory import stage_memory
from .machine import MIB, Machine
from .parameters import MemoryParameters
from .software import Software
from .work import tensors

PEERS = 256  # common_tofu_max_fastmode_procs: peers that get a large receive buffer


@lru_cache(maxsize=4096)
def kinds(run: RunConfig) -> tuple[int, ...]:
    """For each stage the first one like it: as many layers, embedding, head. Of equals the first holds most micro-batches."""
    split = accounting.pipeline_split(run)
    alike = [(layers, stage == 0, stage == len(split) - 1) for stage, layers in enumerate(split)]
    return tuple(map(alike.index, alike))


def layer_saved_bytes(run: RunConfig, tp: int) -> float:
    """What one layer keeps for its backward in software that materialises scores."""
    sizes = tensors(run, tp)
    if run.precision.name == "fp32":
        return 6 * sizes["hidden"] + sizes["qkv"] + sizes["context"] + 2 * sizes["mlp"] + 3 * sizes["scores"]
    return 5 * sizes["hidden"] + sizes["qkv"] + sizes["context"] + 2 * sizes["mlp"] + 2.5 * sizes["scores"]


def _activations(run: RunConfig, layout: Layout, stage: int, microbatches: int, parameters: MemoryParameters) -> float:
    """Kept and working tensors of one stage, logits apart."""
    training, hidden, saved = run.training, tensors(run, layout.tp)["hidden"], layer_saved_bytes(run, layout.tp)
    layers = len(accounting.stage_layers(run, stage))
    held = min(layout.pp - stage, microbatches)
    temporary = 2 * tensors(run, layout.tp)["scores"] + 4 * hidden  # of a backward
    if training.recompute_granularity == "full":
        again = accounting.recomputed_layers(layers, training.recompute_method, training.recompute_num_layers)
        groups = accounting.recompute_groups(layers, training.recompute_method, training.recompute_num_layers)
        kept = held * (len(groups) * hidden + (layers - again) * saved)
        temporary += max(map(len, groups)) * saved
    elif training.recompute_granularity == "selective":
        scores = 3 * tensors(run, layout.tp)["scores"]
        kept, temporary = held * layers * (saved - scores), temporary + scores
    else:
        kept = held * layers * saved
    boundary = held * (parameters.in_flight if layout.pp > 1 else 0) * hidden
    return parameters.activation * kept + boundary + parameters.working * temporary


def stage_mib(run: RunConfig, layout: Layout, stage: int, code: Software, nodes: int, parameters: MemoryParameters) -> float:
    """MiB of one rank of `stage`."""
    microbatches = layout.microbatches(run, layout.global_batch_size(run))
    fixed = parameters.base_mib + parameters.peer_mib * min(nodes - 1, PEERS)
    fixed += 0.0 if code.page_faults == "none" else parameters.glibc_mib
    if code.style == "native":
        held = min(layout.pp - stage, microbatches)
        return fixed + stage_memory(run, layout, stage, held).total / MIB
    count = accounting.stage_parameters(run, layout, stage)
    sharded = parameters.sharded_bytes / (layout.dp if run.parallel.zero_stage else 1)
    bytes = count * (parameters.state_bytes + sharded)
    bytes += _activations(run, layout, stage, microbatches, parameters)
    if stage == layout.pp - 1:
        bytes += parameters.logits * tensors(run, layout.tp)["logits"]
    return fixed + bytes / MIB


def peak_mib(run: RunConfig, layout: Layout, code: Software, nodes: int, parameters: MemoryParameters) -> float:
    """The fullest rank: the first stage holds most micro-batches, the last one the logits."""
    return max(stage_mib(run, layout, stage, code, nodes, parameters) for stage in set(kinds(run)))


def limit_mib(machine: Machine, code: Software, ranks_per_node: int) -> float:
    """What a rank may use before it ends out of memory; a caching allocator first gives back what it only keeps."""
    return machine.node_memory_bytes / MIB / ranks_per_node / (1 - code.counts["reclaimed"])
