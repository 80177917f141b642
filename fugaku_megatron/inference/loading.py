"""A checkpoint's model for inference: no gradients, no optimizer state."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint import manifest as checkpoint
from ..checkpoint.load import load_weights, note_unsigned
from ..checkpoint.manifest import CARRIED
from ..checkpoint.schema import Manifest
from ..checkpoint.shards import WEIGHT, Shard, fill_shards
from ..checkpoint.trusted import iteration_to_load
from ..cli.parser import add_fields, from_options
from ..comm.agreement import on_root
from ..comm.base import Comm, SoloComm
from ..comm.grid import Grid, Groups
from ..config.fields import check, optional
from ..config.freezing import FreezingConfig
from ..config.layout import Layout
from ..config.lora import LoraConfig
from ..config.model import ModelConfig
from ..config.precision import PrecisionConfig
from ..config.run_config import RunConfig, saved_run
from ..host import kernels
from ..nn.forward_context import Pass
from ..nn.layers import LinearLayer
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops, quantize_activations
from ..nn.parameter import PARAMETER_DTYPES, ModelParameter, Q8Weight, parameters_of, scales_of
from ..text.foreign_models import no_checkpoint
from ..tokenizers.tokenizer import Tokenizer, TokenizerFlags, add_tokenizer_flags
from .recorded_step import RecordingKernels
from .tokenizer_choice import choose_tokenizer

Q8 = "q8"
WEIGHTS_FORMATS = (*PARAMETER_DTYPES, Q8)  # of --weights-format
FEW_ROWS = 16  # of a matmul that is faster without packing its weight (measured on Zen 4)


@dataclass(frozen=True)
class LoadedModel:
    """Checkpoint's model, sharded over `groups`: this rank's stage without optimizer state."""

    run: RunConfig
    groups: Groups
    stage: Stage

    @property
    def vocab_size(self) -> int:
        size = self.run.model.vocab_size
        assert size is not None, "a saved run knows it"
        return size

    @property
    def dtype(self) -> torch.dtype:
        return PARAMETER_DTYPES[self.run.precision.name]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return this rank's shards by global name."""
        return {parameter.spec.name: parameter.data for parameter in parameters_of(self.stage)}

    def logits(self, x: Tensor) -> Tensor:
        """Return this rank's columns of logits (s, b, v) from x (s, b, h) of the last stage."""
        assert self.stage.last is not None, "the head is on the last stage"
        return self.stage.last.logits(x)


def operations(model: ModelConfig) -> Ops:
    """Return recorded kernels if they cover the model, else torch.

    Matmuls with weights in eight bits quantize the activations, if there are more than a few rows.
    """
    library = quantize_activations(kernels)
    if model.kernels_alone:
        return Ops.build(kernels=RecordingKernels(library), few_rows=FEW_ROWS)
    choice = {} if model.kernels_take_heads else {"attention": "torch"}
    return Ops.build(choice, kernels=library, few_rows=FEW_ROWS)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Checkpoint, tokenizer and model parallel sizes.

    Without tokenizer flags the checkpoint's is used; None sizes mean the command's default.
    """

    load: str
    tokenizer: TokenizerFlags = TokenizerFlags()
    ckpt_step: int | None = optional("iteration to load (default: the latest)", range=None)
    tensor_model_parallel_size: int | None = optional(
        "tensor-parallel ranks of this command (default: the checkpoint's)"
    )
    pipeline_model_parallel_size: int | None = optional(
        "pipeline stages of this command (default: the checkpoint's)"
    )
    weights_format: str | None = optional(
        "format of the weights in memory: fp32, bf16 or fp16, also of the activations; or q8, the linear layers "
        "and the head in eight bits with a BF16 scale per 64 numbers, rounded on loading (default: as saved)",
        choices=WEIGHTS_FORMATS,
    )

    @classmethod
    def of(cls, options: argparse.Namespace) -> Source:
        return from_options(cls, options, tokenizer=TokenizerFlags.of(options))

    @property
    def q8(self) -> bool:
        return self.weights_format == Q8

    def run(self, manifest: Manifest, sizes: tuple[int, int] | None) -> RunConfig:
        run = saved_run(manifest, sizes)
        if self.weights_format is None or self.q8:
            return run
        return replace(run, precision=PrecisionConfig.of(self.weights_format))

    @property
    def sizes(self) -> tuple[int | None, int | None]:
        return self.tensor_model_parallel_size, self.pipeline_model_parallel_size

    def manifest(self, world: Comm) -> tuple[int, Manifest]:
        """Return (iteration, manifest). Collective; raises ValueError."""
        step = self.ckpt_step
        iteration = on_root(world, lambda: iteration_to_load(self.load) if step is None else step)
        if iteration is None:
            raise ValueError(f"--load {self.load} {no_checkpoint(self.load)}")
        return iteration, on_root(world, lambda: checkpoint.read_manifest(self.load, iteration))

    def open_tokenizer(self, manifest: Manifest) -> Tokenizer:
        saved = manifest["config"].get("data", {})
        size = manifest["config"]["model"]["vocab_size"]
        return choose_tokenizer(
            self.tokenizer, saved, Path(self.load) / CARRIED, size, f"--load {self.load}"
        )


def add_source_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", required=True, help="directory of checkpoints")
    add_tokenizer_flags(parser, "the tokenizer that the model of --load was trained with")
    add_fields(parser, Source)


def load_model(
    run: RunConfig,
    world: Comm,
    directory: str,
    iteration: int,
    manifest: Manifest,
    q8: bool = False,
) -> LoadedModel:
    """Load the model, LoRA adapters merged. Collective; raises ValueError.

    q8: store the linear layers and the head in eight bits.
    """
    trained = replace(run, lora=LoraConfig(), freezing=FreezingConfig())
    loaded = _empty_model(trained, world)
    base = (directory, iteration, manifest)
    adapters: dict[nn.Module, Any] = {}
    if manifest["state"].get("lora"):
        base = _base_of(directory, manifest, world)
        adapters = _load_adapters(loaded, run, world, (directory, iteration, manifest))
    note_unsigned(*base, world)

    def load(module: nn.Module | None, shards: list[Shard]) -> None:
        load_weights(*base, shards, world, VOCABULARY)
        for part in () if module is None else module.modules():
            if part in adapters:
                weight: Any = part.weight
                weight.data.copy_(adapters.pop(part).merged(weight.data))

    _fill(loaded, load, q8)
    return loaded


def model_of(
    run: RunConfig, names: Collection[str], read: Callable[[str], Tensor], q8: bool = False
) -> LoadedModel:
    """Build the whole model in this process; arguments as `fill_shards`, and q8 as `load_model`."""
    loaded = _empty_model(run, SoloComm())
    _fill(loaded, lambda _, shards: fill_shards(shards, names, read), q8)
    return loaded


def _fill(
    loaded: LoadedModel, load: Callable[[nn.Module | None, list[Shard]], None], q8: bool
) -> None:
    """Give the model memory and its weights; with q8 a layer at a time, so that the others are in eight bits.

    load: (module, its new shards) -> fills them; (None, []) for a layer of another stage. Collective.
    """
    stage = loaded.stage
    layers = {layer.layer: layer for layer in stage.layers}
    parts: list[nn.Module | None] = [stage]
    if q8:
        parts = [*map(layers.get, range(1, loaded.run.model.num_layers + 1)), stage]
    for part in parts:
        if part is None:
            load(None, [])
            continue
        new = _give_memory(part, loaded.dtype)
        load(part, [_target(parameter) for parameter in new])
        del new
        if q8:
            quantize(part)


def quantize(part: nn.Module) -> None:
    """Store the weights of linear layers and of a stage's head in eight bits. A tied embedding stays as it is, next to the head."""
    for module in part.modules():
        if isinstance(module, LinearLayer):
            module.weight = _quantized(module.weight)
    if isinstance(part, Stage) and part.last:
        part.last.output_weight = _quantized(part.last.output_weight)


def _quantized(weight: ModelParameter) -> ModelParameter:
    if scales_of(weight) is not None:
        return weight
    q8 = Q8Weight.of(weight.data)
    parameter = ModelParameter(q8.values, requires_grad=False)
    parameter.spec = weight.spec
    parameter.scales = q8.scales  # type: ignore[attr-defined]  # as in nn.parameter.Q8Weight
    return parameter


def _base_of(directory: str, manifest: Manifest, world: Comm) -> tuple[str, int, Manifest]:
    """Return directory, iteration and manifest of the model that adapters were trained on."""
    adapts = manifest["state"]["lora"]
    base = adapts.get("base")
    step = adapts.get("base_iteration")
    convert = f"fugaku-megatron convert --load {directory}"
    merge = f"{convert} --pretrained-checkpoint MODEL --merge --save NEW"
    check(
        base is not None and step is not None,
        f"--load {directory} holds adapters, and their model in {base} is no checkpoint of this "
        f"program: merge them with {merge}",
    )
    read = partial(checkpoint.read_manifest, base, step)
    found = on_root(
        world,
        read,
        f"--load {directory} holds adapters of the model in {base}, which cannot be read: ",
        lambda: f". If the model is elsewhere, merge them with {merge}",
    )
    return base, step, found


def _load_adapters(
    loaded: LoadedModel, run: RunConfig, world: Comm, source: tuple[str, int, Manifest]
) -> dict[nn.Module, Any]:
    """Return the adapter of each linear layer of `loaded`. Collective."""
    adapted = Stage(run, loaded.groups, loaded.stage.ops)
    modules = ((path, getattr(module, "adapter", None)) for path, module in adapted.named_modules())
    adapters = {path: adapter for path, adapter in modules if adapter is not None}
    new = [each for adapter in adapters.values() for each in _give_memory(adapter, torch.float32)]
    note_unsigned(*source, world)
    load_weights(*source, [_target(parameter) for parameter in new], world)
    return {loaded.stage.get_submodule(path): adapter for path, adapter in adapters.items()}


def _empty_model(run: RunConfig, world: Comm) -> LoadedModel:
    """Return this rank's stage without memory, and without expert capacity."""
    layout = Layout.from_run(run, world.size)
    groups = Grid(*layout.sizes).groups(world)
    # With a capacity a text's scores would depend on the texts next to it, and a token's on later ones.
    unlimited = replace(run, model=replace(run.model, moe_expert_capacity_factor=None))
    return LoadedModel(run, groups, Stage(unlimited, groups, operations(run.model)))


def _target(parameter: ModelParameter) -> Shard:
    """Return the shard. Tied copies load the original, which every layout saves."""
    spec = parameter.spec
    copied = WEIGHT + spec.init_name if spec.init_name != spec.name else None
    return Shard(
        key=WEIGHT + spec.name,
        tensor=parameter.data,
        global_shape=spec.shape,
        offset=spec.offset,
        slice_shape=tuple(parameter.shape),
        alias=copied,
    )


def _give_memory(module: nn.Module, dtype: torch.dtype) -> list[ModelParameter]:
    """Replace the parameters without memory by zeros, and return these."""
    new: dict[nn.Parameter, ModelParameter] = {}
    for meta in parameters_of(module):
        if meta.is_meta:
            new[meta] = ModelParameter(torch.zeros(meta.shape, dtype=dtype), requires_grad=False)
            new[meta].spec = meta.spec
    for part in module.modules():
        for name, own in list(part.named_parameters(recurse=False)):
            setattr(part, name, new.get(own, own))
    return list(new.values())


@torch.no_grad()
def through_stages(loaded: LoadedModel, tokens: Tensor, forward_pass: Pass) -> Tensor | None:
    """Return the last layer's output (s, b, h) for tokens (s, b) on last-stage ranks, else None.
    Collective.
    """
    stage = loaded.stage
    pp = loaded.groups.pp
    x = tokens
    for number, chunk in enumerate(stage.chunks):
        previous, following = (
            stage.placement.neighbour(pp.rank, number, step) for step in (-1, 1)
        )  # (stage, chunk) or None
        if previous and previous[0] != pp.rank:
            x = pp.recv(
                torch.empty(*tokens.shape, loaded.run.model.hidden_size, dtype=loaded.dtype),
                previous[0],
            )
        x = chunk.decode(chunk.embedding(x, forward_pass) if chunk.is_first else x, forward_pass)
        if following and following[0] != pp.rank:
            pp.send(x.contiguous(), following[0])
    return x if stage.last else None
