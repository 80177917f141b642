"""Matrices that Muon orthogonalizes, and their shapes.

Legend: m and n the smaller and the larger side of a matrix.
"""

from __future__ import annotations

import itertools
from collections import Counter

from ..config.layer_kinds import LayerKind
from ..config.model import ModelConfig
from ..config.rows import MLP_OF_EXPERTS
from ..config.run_config import RunConfig
from .layers import per_layer
from .linear_layers import mlp_linears
from .mixers import Matrices, mixer_costs
from .stages import stage_layers


def layer_matrices(run: RunConfig, kind: LayerKind) -> Matrices:
    matrices = [] if kind.mixer is None else mixer_costs(kind.mixer).matrices(run)
    for linear in [] if kind.mlp is None else mlp_linears(run, kind.mlp):
        count = run.model.num_experts or 0 if linear.in_experts else 1
        matrices.append((count, linear.widths * linear.outputs, linear.inputs))
    return matrices


def _replicated(model: ModelConfig, mlp: str | None) -> Matrices:
    if mlp != MLP_OF_EXPERTS:
        return []
    matrices = [(1, model.num_experts or 0, model.hidden_size)]
    if model.moe_shared_expert_gate:
        matrices.append((1, 1, model.hidden_size))
    return matrices


def matrix_elements(run: RunConfig) -> tuple[int, ...]:
    """Return every layer's Muon matrix elements on one rank; zeros with AdamW."""
    if not run.optimizer.muon:
        return tuple(0 for _ in run.model.mlps)

    def total(matrices: Matrices) -> int:
        return sum(count * rows * columns for count, rows, columns in matrices)

    return per_layer(
        run,
        lambda kind: (
            total(layer_matrices(run, kind)) // run.tp + total(_replicated(run.model, kind.mlp))
        ),
    )


def orthogonalized(run: RunConfig, stage: int) -> Counter[tuple[int, int]]:
    """Count the matrices (m, n) that a stage's data-parallel ranks orthogonalize; none with AdamW.

    Tensor-parallel ranks compute whole matrices alike, or with --muon-tp-mode blockwise their shards, here as if row-sharded.
    """
    shards = run.tp if run.optimizer.muon_tp_mode == "blockwise" else 1
    found = Counter[tuple[int, int]]()
    if not run.optimizer.muon:
        return found
    for layer in itertools.chain(*stage_layers(run, stage)):
        kind = run.model.layer_kinds[layer]
        for count, rows, columns in [*layer_matrices(run, kind), *_replicated(run.model, kind.mlp)]:
            m, n = sorted((max(1, rows // shards), columns))
            found[m, n] += count
    return found
