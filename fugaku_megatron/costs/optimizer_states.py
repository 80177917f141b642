"""Blocks of 8-bit moments, and matrices that Muon orthogonalizes.

A segment is a range of consecutive elements of a global tensor that no layout divides: a dimension of n sharded rows is divided
at multiples of n / gcd(n, query groups). Segments are cut into equal blocks of at most MOMENT_BLOCK elements, which share a
scale, so blocks do not depend on the layout. m and n are the smaller and the larger side of a matrix.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ..config.freezing import EXPERTS
from ..config.layer_kinds import LayerKind, column_parallel, replicated, row_parallel
from ..config.model import ModelConfig
from ..config.optimizer import MOMENT_BLOCK
from ..config.rows import ACTIVATIONS, MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from .layers import per_layer, without_first
from .linear_layers import Linear, linears, other_linears
from .mixers import Matrices, Segments, mixer_costs
from .sizes import padded_vocab_size, vocabulary_rows
from .stages import EMBEDDING, HEAD, TIED, Unit, holds_tied_copy, is_frozen, stage_layers, units


def undivided_rows(model: ModelConfig, rows: int, vocabulary: bool = False) -> int:
    """Return the rows at whose multiples tensor-parallel ranks divide a dimension. vocabulary: of the padded vocabulary."""
    if vocabulary and not model.padded_vocab_size:
        return model.make_vocab_size_divisible_by
    return rows // math.gcd(rows, model.query_groups)


def block_length(length: int) -> int:
    """Return the elements of a block in a segment of `length`; the last block may be shorter."""
    return math.ceil(length / math.ceil(length / MOMENT_BLOCK))


def shared_segments(
    model: ModelConfig, rows: int, ranks: int, inner: int = 1, outer: int = 1
) -> tuple[int, int]:
    """Return a rank's segments of a tensor (outer, rows, inner) whose rows `ranks` share."""
    unit = undivided_rows(model, rows)
    return outer * (rows // ranks // unit), unit * inner


def _of_outputs(model: ModelConfig, linear: Linear, inner: int) -> tuple[int, int]:
    """Return a rank's segments of a tensor (experts, widths, outputs, inner) next to a linear layer."""
    if linear.name not in column_parallel():
        return linear.experts, linear.outputs * inner
    outer = linear.experts * linear.widths
    return shared_segments(model, linear.outputs, linear.ranks, inner=inner, outer=outer)


def _of_inputs(model: ModelConfig, linear: Linear, outer: int) -> tuple[int, int]:
    """Return a rank's segments of a tensor (experts, outer, inputs) next to a linear layer."""
    if linear.name not in row_parallel():
        return linear.experts, outer * linear.inputs
    return shared_segments(model, linear.inputs, linear.ranks, outer=linear.experts * outer)


def _weight(model: ModelConfig, linear: Linear) -> Segments:
    if linear.name in row_parallel():
        return [_of_inputs(model, linear, linear.outputs)]
    return [_of_outputs(model, linear, linear.inputs)]


def _adapters(run: RunConfig, linear: Linear) -> Segments:
    rank = run.lora.rank
    rows = len(run.lora.parts(linear.name, run.model)) * rank
    if not rows:
        return []
    return [_of_inputs(run.model, linear, rows), _of_outputs(run.model, linear, rank)]


def _router(model: ModelConfig) -> Segments:
    experts = model.expert_count
    biases = int(model.moe_router_enable_expert_bias) + int(not model.disable_bias_linear)
    gates = int(model.moe_shared_expert_gate)
    return [(1, experts * model.hidden_size), (biases, experts), (gates, model.hidden_size)]


def _mlp_vectors(run: RunConfig) -> Segments:
    model = run.model
    segments: Segments = [(len(ACTIVATIONS[model.activation].parameters), 1)]
    if not model.disable_bias_linear:
        segments.append(
            shared_segments(model, model.ffn_hidden_size, run.tp, outer=model.fc1_widths)
        )
        segments.append((1, model.hidden_size))
    return segments


@lru_cache(maxsize=64)  # each layer asks for the same
def layer_segments(run: RunConfig, kind: LayerKind) -> tuple[Segments, Segments]:
    """Return a layer's trained segments on one rank: (divided experts, others)."""
    model = run.model
    divided: Segments = []
    others: Segments = []
    for linear in linears(run, kind):
        if linear.in_experts and run.freezing.has(EXPERTS):
            continue
        segments = divided if linear.divided else others
        segments += _adapters(run, linear) if run.lora.on else _weight(model, linear)
        if linear.in_experts and not run.lora.on and not model.disable_bias_linear:
            segments.append(_of_outputs(model, linear, 1))
    if run.lora.on:
        return divided, others
    norms = len(model.norms_of(kind)) + 3 * kind.predicts
    others += [(norms * model.norm.vectors, model.hidden_size)]
    if kind.mixer is not None:
        others += mixer_costs(kind.mixer).vectors(run)
    if kind.mlp == MLP_OF_EXPERTS:
        others += _router(model)
    elif kind.mlp is not None:
        others += _mlp_vectors(run)
    return divided, others


def unit_segments(run: RunConfig, stage: int) -> dict[Unit, tuple[Segments, Segments]]:
    """Return a stage's trained segments on one rank by unit: (divided experts, others)."""
    model = run.model
    others: dict[str, Segments] = {HEAD: [], EMBEDDING: []}
    if not run.lora.on:
        rows = undivided_rows(model, padded_vocab_size(model, run.tp), vocabulary=True)
        table = (vocabulary_rows(run) // rows, rows * model.hidden_size)
        others[TIED] = [table]
        others[HEAD] = [(model.norm.vectors, model.hidden_size)]
        if not model.tied:
            others[HEAD].append(table)
        if not holds_tied_copy(run, stage):
            others[EMBEDDING].append(table)
        if model.learned_positions:
            others[EMBEDDING].append((1, model.max_position_embeddings * model.hidden_size))
    segments: dict[Unit, tuple[Segments, Segments]] = {}
    for unit in units(run, stage):
        if is_frozen(run, unit):
            segments[unit] = ([], [])
        elif isinstance(unit, int):
            segments[unit] = layer_segments(run, model.all_layer_kinds[unit])
        else:
            segments[unit] = ([], others[unit])
    return segments


def scales(segments: Iterable[tuple[int, int]], elements: int) -> int:
    """Return the most scales that `elements` consecutive elements of these segments need."""
    held = [
        (count, length, math.ceil(length / block_length(length)))
        for count, length in segments
        if count
    ]
    total = sum(count * blocks for count, _, blocks in held)
    found = 2  # the blocks at both ends may be cut
    left = elements
    for count, length, blocks in sorted(held, key=lambda each: each[1] / each[2]):
        taken = min(left, count * length)
        found += math.ceil(taken * blocks / length)
        left -= taken
    return min(found, total)


def layer_matrices(run: RunConfig, kind: LayerKind) -> tuple[Matrices, Matrices]:
    """Return the whole matrices of a layer: (divided experts, others)."""
    divided: Matrices = []
    others = [] if kind.mixer is None else mixer_costs(kind.mixer).matrices(run)
    for linear in other_linears(run, kind):
        if linear.in_experts and run.freezing.has(EXPERTS):
            continue
        count = run.model.expert_count if linear.in_experts else 1
        matrices = divided if linear.divided else others
        matrices.append((count, linear.widths * linear.outputs, linear.inputs))
    return divided, others


def _replicated(run: RunConfig, kind: LayerKind) -> Matrices:
    model = run.model
    matrices: Matrices = []
    for linear in linears(run, kind):
        if linear.name in replicated():
            matrices.append((1, linear.outputs, linear.inputs))
    if kind.mlp != MLP_OF_EXPERTS:
        return matrices
    matrices.append((1, model.expert_count, model.hidden_size))
    if model.moe_shared_expert_gate:
        matrices.append((1, 1, model.hidden_size))
    return matrices


def matrix_elements(run: RunConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return every layer's Muon matrix elements on one rank: (divided experts, others)."""
    expert_ranks = run.ep * run.etp

    def total(matrices: Matrices) -> int:
        return sum(count * rows * columns for count, rows, columns in matrices)

    divided = per_layer(run, lambda kind: total(layer_matrices(run, kind)[0]) // expert_ranks)
    others = per_layer(
        run,
        lambda kind: total(layer_matrices(run, kind)[1]) // run.tp + total(_replicated(run, kind)),
    )
    first = run.frozen_layers
    return without_first(divided, first), without_first(others, first)


Matmuls = list[tuple[int, int, int, int]]  # (how many, m, n, k), of (m, k) by (k, n)


def muon_matmuls(run: RunConfig, stage: int) -> Matmuls:
    """Return the matmuls with which a stage's data-parallel ranks orthogonalize in a step.

    Ranks that share a matrix compute the whole one alike, or with --muon-tp-mode blockwise their shards, here as if row-sharded.
    A divided expert is updated by more ranks than the data-parallel ones if fewer ranks share an expert.
    """
    blockwise = run.optimizer.muon_tp_mode == "blockwise"
    matrices = Counter[tuple[int, int]]()
    for layer in itertools.chain(*stage_layers(run, stage)):
        if layer < run.frozen_layers:
            continue
        kind = run.model.all_layer_kinds[layer]
        divided, others = layer_matrices(run, kind)
        others += _replicated(run, kind)
        for group, ranks in ((divided, run.etp), (others, run.tp)):
            for count, rows, columns in group:
                m, n = sorted((max(1, rows // ranks) if blockwise else rows, columns))
                matrices[m, n] += -(-count * ranks // run.tp)
    return [
        (count * run.optimizer.muon_num_ns_steps, *sides)
        for (m, n), count in matrices.items()
        for sides in ((m, m, n), (m, m, m), (m, n, m))
    ]
