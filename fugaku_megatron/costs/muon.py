"""What Muon costs: the matrices whose updates it makes orthogonal, and their shapes. Pure integers, no torch.

Legend: h hidden, f width of the MLP, e experts, m and n the smaller and the larger side of a matrix.
"""

from __future__ import annotations

import itertools
from collections import Counter

from ..config.layout import Layout
from ..config.run_config import ModelConfig, RunConfig
from .accounting import stage_layers

Matrices = list[tuple[int, int, int]]  # (how many, rows, columns)


def _mlp_matrices(model: ModelConfig, mlp: str) -> Matrices:
    h = model.hidden_size
    widths = model.fc1_widths
    if mlp != "experts":
        return [(1, widths * model.ffn_hidden_size, h), (1, h, model.ffn_hidden_size)]
    e = model.num_experts or 0
    f = model.moe_ffn_hidden_size or 0
    shared = model.moe_shared_expert_intermediate_size or 0
    return [
        (e, widths * f, h),
        (e, h, f),
        *([(1, widths * shared, h), (1, h, shared)] if shared else []),
    ]


def layer_matrices(run: RunConfig, mlp: str) -> Matrices:
    """Those of one layer that tensor-parallel ranks share, whole."""
    model = run.model
    queries = model.context_width
    keys = (model.qkv_width - model.context_width) // 2
    h = model.hidden_size
    qkv = (
        [(1, model.qkv_width, h)]
        if run.optimizer.muon_no_split_qkv
        else [(1, queries, h), (2, keys, h)]
    )
    return [*qkv, (1, h, queries), *_mlp_matrices(model, mlp)]


def _replicated(model: ModelConfig, mlp: str) -> Matrices:
    """Those of one layer that every tensor-parallel rank has: the router, and the gate of the shared expert."""
    if mlp != "experts":
        return []
    return [
        (1, model.num_experts or 0, model.hidden_size),
        *[(1, 1, model.hidden_size)] * model.moe_shared_expert_gate,
    ]


def matrix_elements(run: RunConfig, tp: int) -> tuple[int, ...]:
    """Elements of every layer's matrices on one rank that Muon updates; zeros with AdamW."""

    def total(matrices: Matrices) -> int:
        return sum(count * rows * columns for count, rows, columns in matrices)

    sizes = {
        mlp: (total(layer_matrices(run, mlp)) // tp + total(_replicated(run.model, mlp)))
        * run.optimizer.muon
        for mlp in set(run.model.mlps)
    }
    return tuple(sizes[mlp] for mlp in run.model.mlps)


def orthogonalized(run: RunConfig, layout: Layout, stage: int) -> Counter[tuple[int, int]]:
    """(m, n) of every matrix that the data-parallel ranks of a stage share, and how many there are; none with AdamW.

    Tensor-parallel ranks compute whole ones alike, or with --muon-tp-mode blockwise their parts, here as if of all rows.
    """
    parts = layout.tp if run.optimizer.muon_tp_mode == "blockwise" else 1
    found = Counter[tuple[int, int]]()
    for layer in itertools.chain(*stage_layers(run, stage)) if run.optimizer.muon else ():
        mlp = run.model.mlps[layer]
        for count, rows, columns in [*layer_matrices(run, mlp), *_replicated(run.model, mlp)]:
            m, n = sorted((max(1, rows // parts), columns))
            found[m, n] += count
    return found
