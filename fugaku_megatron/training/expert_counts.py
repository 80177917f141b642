"""Each expert's tokens, gathered over the ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm.grid import Groups
from ..config.run_config import RunConfig
from ..nn.experts import Experts
from ..nn.model import Stage
from ..nn.router import Router


def routers(stage: Stage) -> dict[int, Router]:
    return {
        layer.layer - 1: layer.mlp.router
        for layer in stage.layers
        if isinstance(layer.mlp, Experts)
    }


def reset_loads(stage: Stage) -> None:
    for router in routers(stage).values():
        router.loads.clear()


def gather_loads(stage: Stage, run: RunConfig, groups: Groups, microbatches: int) -> Tensor | None:
    """Return an iteration's expert loads on every rank, (l, e + 2) in FP64; None without experts.
    Collective.

    A row has each expert's tokens, the balancing loss and the z-loss, both means over
    micro-batches; zeros for a dense layer.
    """
    model = run.model
    if model.num_experts is None:
        return None
    layers = len(model.all_layer_kinds)
    table = torch.zeros(layers, model.num_experts + 2, dtype=torch.float64)
    for layer, router in routers(stage).items():
        table[layer] = router.take_load()
    if run.parallel.sequence_parallel:  # a rank routes its shard of the sequence
        groups.tp.all_reduce(table)
    groups.dp.all_reduce(table)
    groups.pp.all_reduce(table)
    table[:, -2:] /= microbatches * groups.data_size  # shares of the ranks of a sequence add up
    return table
