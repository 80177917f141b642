"""A model with the weights of a checkpoint and nothing else: no gradients, no optimizer state.

Test: pytest tests/test_generate.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.shards import Shard
from ..checkpoint.weights import load_weights
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..nn.model import WORD_EMBEDDINGS, Stage
from ..nn.ops import Ops
from ..run.config import GROUPS, RunConfig
from ..run.layout import Layout
from ..training.optim import PARAMETER_DTYPES

PADDED = (f"weight/{WORD_EMBEDDINGS}",)  # its rows are a multiple that depends on the tensor-parallel size


@dataclass(frozen=True)
class LoadedModel:
    """This rank's stage of a run, with its weights."""

    run: RunConfig
    groups: Groups
    stage: Stage

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        return PARAMETER_DTYPES[self.run.precision.name]


def saved_run(manifest: dict[str, Any], alone: bool = False) -> RunConfig:
    """The run that wrote the checkpoint, one sample at a time; alone: on one rank instead of its own layout."""
    groups = {}
    for name, config in GROUPS.items():
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in manifest["config"].get(name, {}).items()}
        if name == "batch":
            values = {"micro_batch_size": 1}
        if name == "parallel":  # a prompt of any length is not cut into parts, and the weights are the same
            values = {} if alone else {**values, "sequence_parallel": False, "tp_comm_overlap": False}
        groups[name] = config(**values)
    return RunConfig(**groups)


def load_model(run: RunConfig, world: Comm, directory: str, iteration: int, manifest: dict[str, Any]) -> LoadedModel:
    """The model of `run` with the weights of the checkpoint. Collective; ValueError on every rank where one cannot read."""
    layout = Layout.from_run(run, world.size)
    groups = Grid(world.size, layout.tp, layout.pp).groups(world)
    loaded = LoadedModel(run, groups, Stage(run, groups, Ops.build()))
    _give_memory(loaded.stage, loaded.dtype)
    targets = [Shard(key=f"weight/{p.spec.name}", tensor=p.data, global_shape=p.spec.shape, offset=p.spec.offset,
                     slice_shape=tuple(p.shape)) for p in loaded.stage.parameters()]
    load_weights(directory, iteration, manifest, targets, world, PADDED if world.size == 1 else ())
    return loaded


def _give_memory(stage: Stage, dtype: torch.dtype) -> None:
    """Zeros in the place of the meta parameters, which keep their `spec`."""
    new = {}
    for meta in stage.parameters():
        new[meta] = nn.Parameter(torch.zeros(meta.shape, dtype=dtype), requires_grad=False)
        new[meta].spec = meta.spec
    for module in stage.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[meta])
