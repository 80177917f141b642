"""A model with the weights of a checkpoint and nothing else: no gradients, no optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.shards import Shard
from ..checkpoint.weights import load_weights
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.replay import RecordingKernels
from ..run.config import GROUPS, ModelConfig, RunConfig
from ..run.layout import Layout
from ..training.optim import PARAMETER_DTYPES

FEW_ROWS = 4  # of a product that is faster without packing its weight (measured)


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


def saved_run(manifest: dict[str, Any], sizes: tuple[int, int] | None = None) -> RunConfig:
    """The run that wrote the checkpoint, one sample at a time. sizes: (tensor, pipeline) parallel; None: its own layout."""
    groups = {}
    for name, config in GROUPS.items():
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in manifest["config"].get(name, {}).items()}
        if name == "batch":
            values = {"micro_batch_size": 1}
        if name == "training":  # numbers of layers to recompute belong to that layout
            values["recompute_part_layers"] = None
        if name == "parallel" and sizes:
            values = dict(zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), sizes))
        if name == "parallel":  # a prompt of any length is not cut into parts, and the weights are the same
            values |= {"sequence_parallel": False, "tp_comm_overlap": False}
        groups[name] = config(**values)
    return RunConfig(**groups)


def operations(model: ModelConfig) -> Ops:
    """What a model without a backward runs on: recorded kernels, or torch's attention for heads that the kernels do not take."""
    if model.kernels_take_heads:
        return Ops.build(kernels=RecordingKernels(), few_rows=FEW_ROWS)
    return Ops.build({"attention": "torch"}, few_rows=FEW_ROWS)


def load_model(run: RunConfig, world: Comm, directory: str, iteration: int, manifest: dict[str, Any]) -> LoadedModel:
    """The model of `run` with the weights of the checkpoint. Collective; ValueError on every rank where one cannot read."""
    layout = Layout.from_run(run, world.size)
    groups = Grid(world.size, layout.tp, layout.pp).groups(world)
    loaded = LoadedModel(run, groups, Stage(run, groups, operations(run.model)))
    _give_memory(loaded.stage, loaded.dtype)
    load_weights(directory, iteration, manifest, [_target(p) for p in loaded.stage.parameters()], world, VOCABULARY)
    return loaded


def _target(parameter: nn.Parameter) -> Shard:
    """Where a parameter's weights go; a tied copy is not in the checkpoint of every layout, and what it copies is."""
    spec = parameter.spec
    copied = f"weight/{spec.init_name}" if spec.init_name != spec.name else None
    return Shard(key=f"weight/{spec.name}", tensor=parameter.data, global_shape=spec.shape, offset=spec.offset,
                 slice_shape=tuple(parameter.shape), alias=copied)


def _give_memory(stage: Stage, dtype: torch.dtype) -> None:
    """Zeros in the place of the meta parameters, which keep their `spec`."""
    new = {}
    for meta in stage.parameters():
        new[meta] = nn.Parameter(torch.zeros(meta.shape, dtype=dtype), requires_grad=False)
        new[meta].spec = meta.spec
    for module in stage.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            setattr(module, name, new[meta])
