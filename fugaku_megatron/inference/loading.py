"""A model with the weights of a checkpoint and nothing else: no gradients, no optimizer state."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.load import load_weights
from ..checkpoint.manifest import CARRIED
from ..checkpoint.shards import Shard
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..config.checks import check
from ..config.layout import Layout
from ..config.run_config import ModelConfig, RunConfig
from ..data.library_tokenizers import HuggingFaceTokenizer, has_tokenizer
from ..data.tokenizer import Tokenizer, build_tokenizer
from ..data.tokenizer_flags import TokenizerFlags, add_tokenizer_flags, identity, mismatch
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from ..nn.passes import Pass
from ..nn.replay import RecordingKernels

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


@torch.no_grad()
def through_stages(loaded: LoadedModel, tokens: Tensor, at: Pass) -> Tensor | None:
    """What the last layer makes of tokens (s, b), (s, b, h), on the ranks of the last stage; None elsewhere.

    Collective over the pipeline.
    """
    stage, pp, x = loaded.stage, loaded.groups.pp, tokens
    for number, chunk in enumerate(stage.chunks):
        previous, following = (stage.placement.neighbour(pp.rank, number, step) for step in (-1, 1))  # (stage, chunk) or None
        if previous and previous[0] != pp.rank:
            x = pp.recv(torch.empty(*tokens.shape, loaded.run.model.hidden_size, dtype=loaded.dtype), previous[0])
        x = chunk.decode(chunk.embedding(x, at) if chunk.is_first else x, at)
        if following and following[0] != pp.rank:
            pp.send(x.contiguous(), following[0])
    return x if stage.last else None


def add_model_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a tokenizer, for commands with a --load."""
    add_tokenizer_flags(parser, "the tokenizer that the model of --load was trained with")


def open_tokenizer(options: argparse.Namespace, manifest: dict[str, Any]) -> Tokenizer:
    """The tokenizer of parsed flags, or where they name none, the checkpoint's: of the run that wrote it, or one that came along.

    Raises ValueError when neither names one, for unreadable files, and for more tokens than the model has.
    """
    saved, size = manifest["config"].get("data", {}), manifest["config"]["model"]["vocab_size"]
    flags = TokenizerFlags.of(options, size)
    if not flags.named:
        flags = TokenizerFlags.of(SimpleNamespace(**saved), size)
    if not flags.named and has_tokenizer(Path(options.load) / CARRIED):
        flags = TokenizerFlags(HuggingFaceTokenizer.name, tokenizer_model=str(Path(options.load) / CARRIED))
    check(flags.named, f"the tokenizer is unknown, the checkpoint in --load {options.load} was trained without one: give "
          "--vocab-file and --merge-file, or --tokenizer-type and --tokenizer-model")
    tokenizer = build_tokenizer(*flags)
    named = f"--tokenizer-model {flags.tokenizer_model}" if flags.tokenizer_model else f"--vocab-file {flags.vocab_file}"
    check(tokenizer.vocab_size <= size, f"{named} has {tokenizer.vocab_size} tokens, the model of --load {options.load} {size}: "
          "give the files it was trained with")
    return tokenizer


def tokenizer_note(tokenizer: Tokenizer, manifest: dict[str, Any]) -> str:
    """A line where the checkpoint was trained with another tokenizer; "" otherwise."""
    other = mismatch(identity(tokenizer), manifest["state"].get("tokenizer"))
    return f"note: the model was trained with {other}: its tokens mean different texts" if other else ""
