"""A transformer layer's linear layers: shapes on a rank, and bytes in eight bits."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..config.layer_kinds import EH_PROJ, FC1, FC2, LayerKind, column_parallel, replicated
from ..config.rows import MLP_OF_EXPERTS, Q8_BLOCK
from ..config.run_config import RunConfig
from .mixers import mixer_costs
from .sizes import vocabulary_rows
from .stages import units

SCALE_BYTES = 2  # BF16


class Linear(NamedTuple):
    """A linear layer.

    widths: 2 with a gate.
    ranks: share its outputs, or inputs.
    experts: on a rank; in_experts: one matrix for each.
    """

    name: str
    widths: int
    outputs: int
    inputs: int
    ranks: int
    experts: int = 1
    divided: bool = False
    in_experts: bool = False

    def shard(self) -> tuple[int, int]:
        """Return (rows, columns) of all the layer's matrices on a rank."""
        rows = self.experts * self.widths * self.outputs
        if self.name in column_parallel():
            return rows // self.ranks, self.inputs
        return rows, self.inputs // self.ranks


def linears(run: RunConfig, kind: LayerKind) -> list[Linear]:
    layers: list[Linear] = []
    if kind.mixer is not None:
        shapes = mixer_costs(kind.mixer).shapes(run.model)
        for name, (outputs, inputs) in shapes.items():
            ranks = 1 if name in replicated() else run.tp
            layers.append(Linear(name, 1, outputs, inputs, ranks))
    return layers + other_linears(run, kind)


def other_linears(run: RunConfig, kind: LayerKind) -> list[Linear]:
    """Return one rank's linear layers outside the mixer: of an MTP module, and in an MLP, or in routed and shared experts."""
    model = run.model
    h = model.hidden_size
    layers: list[Linear] = []
    if kind.predicts:
        layers.append(Linear(EH_PROJ, 1, h, 2 * h, run.tp))

    def add_mlp(f: int, ranks: int, experts: tuple[int, bool, bool] = (1, False, False)) -> None:
        layers.append(Linear(FC1, model.fc1_widths, f, h, ranks, *experts))
        layers.append(Linear(FC2, 1, h, f, ranks, *experts))

    if kind.mlp is None:
        return layers
    if kind.mlp != MLP_OF_EXPERTS:
        add_mlp(model.ffn_hidden_size, run.tp)
        return layers
    experts = (model.expert_count // run.ep, run.parallel.divides_experts, True)
    add_mlp(model.expert_width, run.etp, experts)
    if shared := model.moe_shared_expert_intermediate_size:
        add_mlp(shared, run.tp)
    return layers


def stored_bytes(rows: int, columns: int) -> int:
    """Return the bytes for a matrix in eight bits, with its scales."""
    return rows * (columns + SCALE_BYTES * math.ceil(columns / Q8_BLOCK))


def layer_savings(run: RunConfig, stage: int) -> int:
    saved = 0
    for unit in units(run, stage):
        if not isinstance(unit, int):
            continue
        for linear in linears(run, run.model.all_layer_kinds[unit]):
            rows, columns = linear.shard()
            saved += rows * columns * run.element_bytes - stored_bytes(rows, columns)
    return saved


def q8_inference_savings(run: RunConfig, stage: int) -> int:
    """Return the bytes that linear layers and a head in eight bits save on a rank, which keeps a tied embedding as it is."""
    saved = layer_savings(run, stage)
    if stage != run.placement.last_stage:
        return saved
    rows = vocabulary_rows(run)
    columns = run.model.hidden_size
    replaced = 0 if run.model.tied and stage == 0 else rows * columns * run.element_bytes
    return saved + replaced - stored_bytes(rows, columns)
