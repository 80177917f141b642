"""Weights of Megatron-LM's checkpoints in the format torch_dist.

DIR/latest_checkpointed_iteration.txt     an iteration, or "release"
DIR/iter_0000100/...                      `torch_dist.py`: the weights, and common state with "args"
DIR/iter_0000100/tokenizer/...            files of the tokenizer

A GPTModel's equal layers are stacked, and experts too. Layers that differ have keys of their own, and
so have a HybridModel's, where attention and MLP are layers.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checkpoint.manifest import RELEASE, TORCH_DIST_COMMON, TRACKER
from ...config.fields import check
from ...config.hybrid import parse_pattern
from ...config.layer_kinds import EH_PROJ, MIXERS, LayerKind
from ...config.model import ModelConfig
from ...config.rows import MLP_OF_EXPERTS
from ...costs.sizes import round_up
from ...nn.model import OUTPUT, VOCABULARY, WORD_EMBEDDINGS
from ...nn.parameter import ParameterSpec
from ...text.named_files import about
from ...text.written_files import write_text
from ..weights import (
    Weights,
    as_layer,
    at_layer,
    check_elements,
    check_rest,
    layer_of,
    specs,
    widest,
    without_layer,
)
from .arguments import (
    VERSION,
    arguments_of,
    by_name,
    check_pattern,
    checked_model,
    model_pattern,
    pattern_of,
)
from .delta_net import is_shifted, joined_parts, parts_of, shifted, split_parts
from .names import MLP_NORM, fused_norms, our_name, their_name
from .pickles import save_pickled
from .torch_dist import COMMON_STATE, DistFiles, DistWriter, GlobalPiece, Shape, object_key

TOKENIZER = "tokenizer"
STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_HYBRID_LAYER = re.compile(r"(?<=decoder\.layers\.)(\d+)(?=\.)")
# Linear layers with extra state, of a layer with an MLP and with experts; Transformer Engine's have more.
_EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
_SHARED = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")


class LayerKey(NamedTuple):
    """Key of a tensor, and the layer in it if layers are stacked."""

    key: str
    layer: int | None


def open_dist(path: Path, vocab_size: int | None, ignored: Collection[str] = ()) -> Weights:
    reader, common = dist_reader(path, vocab_size, ignored)
    dtypes = {name: reader.dtype(name) for name in reader.specs}
    carried: Path | None = path / TOKENIZER
    # Its tokenizer.json has tiktoken's tokens, and would be read as Hugging Face's.
    other = common["args"].get("tokenizer_type") == "TikTokenizer"
    if other or not (path / TOKENIZER).is_dir():
        carried = None
    return Weights(reader.model, dtypes, reader, carried)


def dist_reader(
    path: Path, vocab_size: int | None, ignored: Collection[str] = ()
) -> tuple[DistReader, dict[str, Any]]:
    """Open one iteration; return a reader of its weights, and the common state."""
    files = DistFiles.open(path)
    common = files.common()
    check("args" in common, f"{path} holds no arguments of Megatron-LM")
    given = by_name(common["args"])
    pattern = pattern_of(given)
    owners: Sequence[int] = () if pattern is None else owners_of(path, pattern)
    stored: dict[str, str] = {}
    for key in files.tensors:
        name = our_name(gpt_key(key, owners) if owners else key)
        if name is not None and STATE.fullmatch(key) is None and "optimizer" not in key:
            stored[name] = key
    check(WORD_EMBEDDINGS in stored, f"{path} holds no {WORD_EMBEDDINGS}")
    shape = files.shape(stored[WORD_EMBEDDINGS])
    check(len(shape) > 0, f"{path}: {stored[WORD_EMBEDDINGS]} has no rows")
    model = checked_model(path, given, shape[0], vocab_size, ignored)
    reader = DistReader(files, model, specs(model), stored)
    reader.check({OUTPUT} if model.tied else set())
    return reader, {**common, "args": given}


def owners_of(path: Path, pattern: str) -> list[int]:
    """Return the layer here of each layer of a HybridModel. Raise ValueError for an unknown symbol."""
    with about(str(path)):
        layers = parse_pattern(pattern).layers
    return [number for number, symbols in enumerate(layers) for _ in symbols]


def gpt_key(key: str, owners: Sequence[int]) -> str:
    """Return a HybridModel's key with the number of the layer here, after the last one for a layer that the pattern lacks."""

    def number(theirs: re.Match[str]) -> str:
        place = int(theirs[0])
        if place < len(owners):
            return str(owners[place])
        return str(place + owners[-1] + 1)

    return _HYBRID_LAYER.sub(number, key, count=1)


@dataclass(frozen=True)
class DistReader:
    """Reader that assembles global tensors.

    stored: our names, stacked layers without number -> their keys
    """

    files: DistFiles
    model: ModelConfig
    specs: dict[str, ParameterSpec]
    stored: dict[str, str]

    def places(self, name: str) -> list[LayerKey]:
        """Return the tensors that a tensor consists of: layers or experts, gates and values."""
        experts = [
            name.replace(".mlp.experts.", f".mlp.experts.{expert}.")
            for expert in range(self.model.num_experts or 0)
            if ".mlp.experts." in name
        ]
        choices: list[list[tuple[str, int | None]]] = [
            [(name, None)],
            [(without_layer(name), layer_of(name))],
            [(each, None) for each in experts],
            [(each, None) for each in parts_of(name)],
        ]
        for choice in choices:
            for halves in (("",), ("_w", "_v")):
                spelled = [(own + half, layer) for own, layer in choice for half in halves]
                if spelled and all(own in self.stored for own, _ in spelled):
                    return [LayerKey(self.stored[own], layer) for own, layer in spelled]
        raise ValueError(f"{self.files.path} holds no {name}")

    def check(self, unused: set[str]) -> None:
        """Raise ValueError for a wrong shape, or a stored tensor that is neither read nor in `unused`."""
        read = set()
        for name, spec in self.specs.items():
            places = self.places(name)
            elements = sum(torch.Size(self.files.shape(*place)).numel() for place in places)
            check_elements(self.files.path, spec, elements)
            read |= {place.key for place in places}
            for place in places:
                shape = self.files.shape(place.key)
                check(
                    place.layer is None or shape[:1] == (self.model.num_layers,),
                    f"{self.files.path}: {place.key} has shape {list(shape)}, and num_layers is "
                    f"{self.model.num_layers}",
                )
        check_rest(
            self.files.path,
            {key for name, key in self.stored.items() if key not in read and name not in unused},
        )

    def dtype(self, name: str) -> torch.dtype:
        if is_shifted(name, self.model):
            return self(name).dtype
        return widest(self.files.dtype(place.key) for place in self.places(name))

    def __call__(self, name: str) -> Tensor:
        spec = self.specs[name]
        parts = [self.files.tensor(*place) for place in self.places(name)]
        whole = self.weight(name, parts)
        return whole[: spec.shape[0]].contiguous() if name in VOCABULARY else whole

    def weight(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return a weight as `joined`, and add a subtracted 1 in the format of the layer's other weights."""
        whole = self.joined(name, parts)
        if is_shifted(name, self.model):
            whole = shifted(whole, 1.0, self.dtype(name.replace(".out_norm.", ".out_proj.")))
        return whole

    def joined(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return a tensor with all rows of the vocabulary from the tensors at its places."""
        whole = parts[0]
        if len(parts) > 1:
            dtype = widest(part.dtype for part in parts)
            parts = [part.to(dtype) for part in parts]
            whole = joined_parts(parts, self.model) if parts_of(name) else torch.stack(parts)
        return whole if name in VOCABULARY else whole.view(self.specs[name].shape)


@dataclass(frozen=True)
class DistFormat:
    """Names and files of a written checkpoint.

    transformer_engine: name norms and extra states as its layers do
    multiple: pad the vocabulary to a multiple of this
    pattern: layers of a HybridModel, None for a GPTModel unless the model has layers of an attention or an MLP alone
    common_file: write common.pt, which every version reads, in place of the object of megatron-core
        since 0.19
    """

    transformer_engine: bool
    multiple: int
    pattern: str | None = None
    common_file: bool = True


def save_dist(weights: Weights, directory: Path, form: DistFormat) -> None:
    """Write the weights as a release checkpoint, one tensor at a time, for any layout of ranks.

    Raise ValueError for a model that Megatron-LM cannot describe.
    """
    model = weights.model
    if model.layer_types is not None and form.pattern is None:
        form = replace(form, pattern="".join(model_pattern(model).layers))
    if form.pattern is not None:
        check_pattern(form.pattern, model)
        check(
            not model.predictions,
            f"--hybrid-layer-pattern {form.pattern!r:.60} with --mtp-num-layers {model.mtp_num_layers}: the MTP modules of a "
            "HybridModel are not converted: leave --hybrid-layer-pattern out",
        )
    assert model.vocab_size is not None, "weights say it"
    rows = round_up(model.vocab_size, form.multiple)
    args = arguments_of(model, rows, next(iter(weights.dtypes.values())), 1, 1)
    names = _Names(model, form)
    names.describe(args)
    path = directory / RELEASE
    path.mkdir(parents=True)
    writer = DistWriter(path)
    common = {"args": args, "checkpoint_version": VERSION, "iteration": 0}
    if form.common_file:
        with open(path / TORCH_DIST_COMMON, "wb") as stream:
            save_pickled(common, stream)
    else:
        writer.add_object(object_key(COMMON_STATE), common)
    for key in names.extra_states():
        writer.add_object(key, None)
    for name, spec in specs(model).items():
        layer = layer_of(name)
        file = 0 if layer is None else 1 + layer
        for piece in names.pieces(spec, weights.read(name), rows):
            writer.add(file, piece)
    writer.finish()
    write_text(directory / TRACKER, RELEASE)


@dataclass(frozen=True)
class _Names:
    """Keys that Megatron-LM expects for a model."""

    model: ModelConfig
    form: DistFormat

    @property
    def stacked(self) -> bool:
        """True if equal layers are one tensor, as in TransformerBlock.sharded_state_dict."""
        equal = self.model.moe_layer_freq == "1" and not self.model.has_delta_nets
        return equal and self.form.pattern is None

    def describe(self, args: argparse.Namespace) -> None:
        """Complete arguments with the model's class."""
        if self.form.pattern is not None:
            args.num_layers = self.model.residual_parts
            args.hybrid_layer_pattern = self.form.pattern
            args.experimental_attention_variant = None  # of a GPTModel
            args.linear_attention_freq = None
            args.is_hybrid_model = True
        if self.model.num_experts is not None:
            args.moe_grouped_gemm = self.form.transformer_engine

    def _fused(self, name: str) -> dict[str, str]:
        """Return the norms with a key of the next matmul.

        Transformer Engine has no such matmul for experts; a local GPTModel maps both norms.
        """
        layer = layer_of(as_layer(name, self.model.num_layers))
        if layer is None:
            return {}
        engine = self.form.transformer_engine or self.form.pattern is not None
        return fused_norms(self.model.all_layer_kinds[layer], engine, experts_apart=engine)

    def key(self, name: str) -> str:
        layer = layer_of(name)
        theirs = their_name(name, self._fused(name)).replace(
            ".mlp.experts.", ".mlp.experts.experts."
        )
        if self.stacked:
            return without_layer(theirs)
        if self.form.pattern is None:
            return theirs
        if layer is not None:
            kinds = self.model.layer_kinds
            number = sum(self.model.layer_parts[:layer])
            if kinds[layer].mixer is not None:
                number += int(".mlp." in theirs or MLP_NORM in theirs)
            theirs = at_layer(theirs, number)
        return theirs.replace("decoder.final_layernorm.", "decoder.final_norm.")

    def pieces(self, spec: ParameterSpec, whole: Tensor, rows: int) -> Iterator[GlobalPiece]:
        """Yield a tensor in pieces that a rank may ask for: experts, gates and values."""
        name = spec.name
        layer = layer_of(name)
        if parts := parts_of(name):
            for part, values in zip(parts, split_parts(name, whole, self.model), strict=True):
                yield GlobalPiece(self.key(part), tuple(values.shape), (0,) * values.dim(), values)
            return
        if is_shifted(name, self.model):
            whole = shifted(whole, -1.0, whole.dtype)
        if name in VOCABULARY:
            whole = padded(whole, rows)
        dim = int(".mlp.experts." in name)  # of the rows
        gated = ".linear_fc1." in name and spec.partition_dim == dim + 1
        if gated:
            whole = whole.flatten(dim, dim + 1)
        size = tuple(whole.shape)
        steps = list(size)
        if dim:
            steps[0] = 1
        if gated:
            steps[dim] //= 2
        front: Shape = ()
        if self.stacked and layer is not None:
            front = (layer,)
            size = (self.model.num_layers, *size)
        for offsets, values in _split(whole, steps):
            yield GlobalPiece(
                self.key(name), size, (*front, *offsets), values[(None,) * len(front)]
            )

    def extra_states(self) -> Iterator[str]:
        """Yield the keys of extra states, all empty: of FP8, which the weights here do not have."""
        layers = self.model.num_layers
        for layer, kind in enumerate(self.model.all_layer_kinds):
            place = f"decoder.layers.{layer}."
            if kind.predicts:
                module = f"mtp.layers.{layer - layers}"
                place = f"{module}.transformer_layer."
                norms = ("enorm", "hnorm", "final_layernorm")
                for part in (EH_PROJ, *(norms if self.form.transformer_engine else ())):
                    yield object_key(f"{module}.{part}._extra_state")
            for part in self._stateful_modules(kind):
                yield from self._extra_state(place, part)
        if self.form.pattern is not None:
            yield object_key("output_layer._extra_state")
        if self.form.transformer_engine:
            name = "final_layernorm" if self.form.pattern is None else "final_norm"
            yield object_key(f"decoder.{name}._extra_state")

    def _stateful_modules(self, kind: LayerKind) -> Iterator[str]:
        engine = self.form.transformer_engine
        if kind.mixer is not None:
            mixer = MIXERS[kind.mixer]
            linears = (*mixer.linears, *mixer.replicated)
            modules = [name for name in linears if name in self.model.mixer_linears]
            if engine:
                modules += mixer.stateful
                if self.model.qk_layernorm:
                    modules += mixer.norms
                if "input_layernorm" not in mixer.fused:
                    yield "input_layernorm"
            yield from (f"self_attention.{module}" for module in modules)
        if kind.mlp is None:
            return
        if kind.mlp != MLP_OF_EXPERTS:
            yield from _MLP
            return
        yield from _EXPERTS
        if self.model.moe_shared_expert_intermediate_size is not None:
            yield from _SHARED
        if engine:
            yield "pre_mlp_layernorm"

    def _extra_state(self, place: str, module: str) -> Iterator[str]:
        """Yield the keys of a module's extra state. place: of its layer, such as decoder.layers.0."""
        layer = layer_of(place)
        name = self.key(f"{place}{module}._extra_state")
        index: Shape = ()
        shape: Shape = ()
        if self.stacked and layer is not None:
            index = (layer,)
            shape = (self.model.num_layers,)
        if module not in _EXPERTS:
            yield object_key(name, index or (0,), shape or (1,))
            return
        count = self.model.num_experts or 0
        for expert in range(count):
            yield object_key(name, (*index, expert), (*shape, count))


def _split(whole: Tensor, steps: list[int]) -> Iterator[tuple[Shape, Tensor]]:
    """Yield (offsets, part) of the parts with at most `steps` elements in each dimension."""
    places = (range(0, n, step) for n, step in zip(whole.shape, steps, strict=True))
    for offsets in itertools.product(*places):
        yield offsets, whole[tuple(slice(o, o + step) for o, step in zip(offsets, steps))]


def padded(whole: Tensor, rows: int) -> Tensor:
    """Return a vocabulary of `rows` rows; the last one pads it, as in Megatron-LM."""
    return torch.cat([whole, whole[-1:].expand(rows - len(whole), -1)])
