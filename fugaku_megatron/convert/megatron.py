"""Checkpoints of Megatron-LM, without optimizer states and experts.

DIR/latest_checkpointed_iteration.txt     an iteration, or "release"
DIR/iter_0000100/.metadata, common.pt, __0_0.distcp ...
                                          torch_dist: global tensors; equal layers are stacked
DIR/iter_0000100/mp_rank_01[_002]/model_optim_rng.pt
                                          legacy: tensor-parallel rank 1 [of stage 2] with
                                          "args", "checkpoint_version", "model" or "model0" ...
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ..checkpoint.manifest import TRACKER, write_text
from ..checkpoint.shards import Box
from ..config.fields import check
from ..config.model import ModelConfig
from ..costs.accounting import round_up
from ..nn.model import OUTPUT, VOCABULARY, WORD_EMBEDDINGS
from ..nn.parameter import ParameterSpec
from .megatron_files import (
    VERSION,
    arguments_of,
    load_metadata,
    load_pickled,
    model_of,
    our_name,
    transformer_engine_name,
)
from .weights import Weights, check_elements, check_rest, layer_of, place_of, specs, widest

COMMON = "common.pt"
FILE = "model_optim_rng.pt"
_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?")
_LAYER = "decoder.layers."

Names = dict[str, Tensor]  # our names, of a rank's part of a chunk


def _model(
    path: Path, args: Any, rows: int, vocab_size: int | None, ignored: Collection[str]
) -> ModelConfig:
    try:
        return model_of(args, rows, vocab_size, ignored)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


# torch_dist ----------------------------------------------------------------------------------------------------------------------


def open_dist(file: Path, vocab_size: int | None, ignored: Collection[str] = ()) -> Weights:
    """Open one iteration. Raise ValueError, one line."""
    path = file.parent
    metadata = load_metadata(file)
    common = load_pickled(path / COMMON)
    check("args" in common, f"{path / COMMON} holds no arguments of Megatron-LM")
    tensors = {
        key: value
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    stored = {name: key for key in tensors if "optimizer" not in key and (name := our_name(key))}
    check(WORD_EMBEDDINGS in stored, f"{path} holds no {WORD_EMBEDDINGS}")
    rows = tensors[stored[WORD_EMBEDDINGS]].size[0]
    model = _model(path, common["args"], rows, vocab_size, ignored)
    reader = _DistReader(path, metadata.storage_data, tensors, specs(model), stored)
    reader.check({OUTPUT} if model.tied else set())
    return Weights(model, {name: reader.dtype(name) for name in reader.specs}, reader)


@dataclass(frozen=True)
class _DistReader:
    """Reader that assembles global tensors.

    stored: our names, stacked layers without number -> their keys
    """

    path: Path
    places: dict[MetadataIndex, Any]
    tensors: dict[str, TensorStorageMetadata]
    specs: dict[str, ParameterSpec]
    stored: dict[str, str]

    def _places(self, name: str) -> list[tuple[str, int | None]]:
        stacked = place_of(name)[0].replace("layers.{}.", "layers.") + name[name.rindex(".") :]
        for own, layer in ((name, None), (stacked, layer_of(name))):
            for names in ((own,), (own + "_w", own + "_v")):
                if all(part in self.stored for part in names):
                    return [(self.stored[part], layer) for part in names]
        raise ValueError(f"{self.path} holds no {name}")

    def check(self, unused: set[str]) -> None:
        read = set()
        for name, spec in self.specs.items():
            places = self._places(name)
            check_elements(
                self.path, spec, sum(torch.Size(self._shape(*place)).numel() for place in places)
            )
            read |= {key for key, _ in places}
        check_rest(
            self.path,
            {key for name, key in self.stored.items() if key not in read and name not in unused},
        )

    def _shape(self, key: str, layer: int | None) -> tuple[int, ...]:
        size = tuple(self.tensors[key].size)
        return size if layer is None else size[1:]

    def dtype(self, name: str) -> torch.dtype:
        return widest(self.tensors[key].properties.dtype for key, _ in self._places(name))

    def __call__(self, name: str) -> Tensor:
        spec = self.specs[name]
        parts = [self._global(key, layer) for key, layer in self._places(name)]
        whole = (
            parts[0]
            if len(parts) == 1
            else torch.stack([part.to(self.dtype(name)) for part in parts])
        )
        return whole[: spec.shape[0]].contiguous() if name in VOCABULARY else whole.view(spec.shape)

    def _global(self, key: str, layer: int | None) -> Tensor:
        shape = self._shape(key, layer)
        whole = torch.empty(shape, dtype=self.tensors[key].properties.dtype)
        filled = 0
        for chunk in self.tensors[key].chunks:
            offsets = tuple(chunk.offsets)
            if layer is not None and not offsets[0] <= layer < offsets[0] + chunk.sizes[0]:
                continue
            piece = self._piece(key, chunk.offsets).view(tuple(chunk.sizes))
            if layer is not None:
                piece = piece[layer - offsets[0]]
                offsets = offsets[1:]
            whole[Box(offsets, piece.shape).slices] = piece
            filled += piece.numel()
        check(
            filled == whole.numel(),
            f"{self.path}: the pieces of {key} hold {filled} of its {whole.numel()} elements",
        )
        return whole

    def _piece(self, key: str, offsets: torch.Size) -> Tensor:
        place = self.places.get(MetadataIndex(key, offsets))
        if place is None:
            raise ValueError(
                f"the metadata in {self.path} do not say where {key} at {list(offsets)} lies"
            )
        file = self.path / place.relative_path
        check(
            Path(place.relative_path).name == place.relative_path and file.is_file(),
            f"{file} is missing",
        )
        with open(file, "rb") as stream:
            stream.seek(place.offset)
            data = stream.read(place.length)
        try:
            piece: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (ValueError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"{file} is damaged at byte {place.offset}, where a piece of {key} should be"
            ) from error
        return piece


# Legacy --------------------------------------------------------------------------------------------------------------------------


def open_legacy(path: Path, vocab_size: int | None, ignored: Collection[str] = ()) -> Weights:
    """Open an iteration directory. Raise ValueError, one line."""
    stages = _stages(path)
    first = stages[0][0]
    check(
        "args" in first, f"{path} holds no arguments of Megatron-LM: it was saved before version 2"
    )
    version = float(first.get("checkpoint_version", 0))
    chunks = list(_chunks(path, stages))
    rows = sum(len(rank.get(WORD_EMBEDDINGS, ())) for rank in chunks[0])
    model = _model(path, first["args"], rows, vocab_size, ignored)
    reader = _LegacyReader(path, model, version, specs(model), _numbered(chunks))
    reader.check()
    return Weights(
        model,
        {name: widest(part.dtype for part in reader.ranks[name]) for name in reader.specs},
        reader,
    )


def _stages(path: Path) -> list[list[dict[str, Any]]]:
    found = {}
    for folder in sorted(path.glob("mp_rank_*")):
        match = _RANK.fullmatch(folder.name)
        if match is None:
            raise ValueError(f"{folder} is not part of a dense model: experts are not supported")
        found[int(match[2] or 0), int(match[1])] = folder / FILE
    pp, tp = (1 + max(numbers) for numbers in zip(*found))
    lacking = next(((p, t) for p in range(pp) for t in range(tp) if (p, t) not in found), None)
    check(
        lacking is None,
        f"{path} has no file of pipeline stage and tensor-parallel rank {lacking}, of {pp} x {tp}",
    )
    return [[load_pickled(found[p, t]) for t in range(tp)] for p in range(pp)]


def _chunks(path: Path, stages: list[list[dict[str, Any]]]) -> Iterator[list[Names]]:
    keys = [key for key in stages[0][0] if re.fullmatch(r"model\d*", key)]
    check(bool(keys), f"{path} holds no model")
    for key in sorted(keys, key=lambda key: int(key[5:] or 0)):
        for ranks in stages:
            check(
                all(isinstance(rank.get(key), dict) for rank in ranks),
                f"{path}: a rank holds no {key}",
            )
            yield [dict(_named(rank[key])) for rank in ranks]


def _named(state: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _named(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and (name := our_name(prefix + key)):
            yield name, value


def _numbered(chunks: list[list[Names]]) -> dict[str, list[Tensor]]:
    """Return global name -> tensor-parallel shards, layers numbered over all model chunks."""
    ranks: dict[str, list[Tensor]] = {}
    before = 0
    for chunk in chunks:
        for name in chunk[0]:
            local = layer_of(name)
            number = (
                name
                if local is None
                else name.replace(f"{_LAYER}{local}.", f"{_LAYER}{before + local}.", 1)
            )
            ranks.setdefault(number, [rank[name] for rank in chunk if name in rank])
        layers = (layer_of(name) for name in chunk[0])
        before += max((1 + layer for layer in layers if layer is not None), default=0)
    return ranks


@dataclass(frozen=True)
class _LegacyReader:
    path: Path
    model: ModelConfig
    version: float
    specs: dict[str, ParameterSpec]
    ranks: dict[str, list[Tensor]]

    def check(self) -> None:
        for name, spec in self.specs.items():
            check(name in self.ranks, f"{self.path} holds no {name}")
            parts = self.ranks[name]
            check_elements(
                self.path,
                spec,
                sum(
                    part.numel()
                    for part in (parts if spec.partition_dim is not None else parts[:1])
                ),
            )
        check_rest(
            self.path, set(self.ranks) - set(self.specs) - ({OUTPUT} if self.model.tied else set())
        )

    def __call__(self, name: str) -> Tensor:
        spec = self.specs[name]
        parts = self.ranks[name]
        if spec.partition_dim is None:
            return parts[0].contiguous()
        if name in VOCABULARY:
            return torch.cat(parts)[: spec.shape[0]].contiguous()
        shape = list(spec.shape)
        shape[spec.partition_dim] //= len(parts)
        if ".linear_qkv." in name:
            parts = [self._by_head(part) for part in parts]
        return torch.cat([part.reshape(shape) for part in parts], spec.partition_dim)

    def _by_head(self, part: Tensor) -> Tensor:
        """Return a rank's queries, keys and values per head, as versions since 2 have them."""
        heads = part.shape[0] // (3 * self.model.kv_channels)
        d = self.model.kv_channels
        if self.version >= 2:
            return part
        if self.version >= 1:
            return part.view(heads, d, 3, -1).transpose(1, 2).reshape(part.shape)
        return part.view(3, heads, d, -1).transpose(0, 1).reshape(part.shape)


def save_legacy(
    weights: Weights, directory: Path, tp: int, pp: int, fused: bool, multiple: int
) -> None:
    """Write the weights as a release checkpoint of tp x pp ranks, one rank's shard at a time.

    fused: use transformer engine's names. multiple: pad the vocabulary to a multiple of this x tp.
        Raise ValueError if sizes do not divide.
    """
    model = replace(weights.model, make_vocab_size_divisible_by=multiple)
    weights = replace(weights, model=model)
    for name, value, size in (
        ("attention heads", model.num_attention_heads, tp),
        ("query groups", model.query_groups, tp),
        ("MLP width", model.ffn_hidden_size, tp),
        ("layers", model.num_layers, pp),
    ):
        check(
            value % size == 0,
            f"{value} {name} are not divisible by {size} ranks: change --tensor-model-parallel-size or "
            "--pipeline-model-parallel-size",
        )
    for stage in range(pp):
        for rank in range(tp):
            name = f"mp_rank_{rank:02d}_{stage:03d}" if pp > 1 else f"mp_rank_{rank:02d}"
            folder = directory / "release" / name
            folder.mkdir(parents=True)
            torch.save(_rank_contents(weights, rank, tp, stage, pp, fused), folder / FILE)
    write_text(directory / TRACKER, "release")


def _rank_contents(
    weights: Weights, rank: int, tp: int, stage: int, pp: int, fused: bool
) -> dict[str, Any]:
    model = weights.model
    each = weights.model.num_layers // pp
    assert model.vocab_size is not None, "weights say it"
    rows = round_up(model.vocab_size, model.make_vocab_size_divisible_by * tp)
    state = {}
    for name, spec in specs(model).items():
        if (theirs := _name_on_stage(name, stage, pp, each, model.tied)) is not None:
            part = _part(weights.read(name), spec, rank, tp, rows if name in VOCABULARY else None)
            state[transformer_engine_name(theirs) if fused else theirs] = part
    if model.tied and stage == pp - 1 > 0:
        spec = specs(model)[WORD_EMBEDDINGS]
        state[OUTPUT] = _part(weights.read(WORD_EMBEDDINGS), spec, rank, tp, rows)
    dtype = next(iter(weights.dtypes.values()))
    return {
        "args": arguments_of(model, rows, dtype, tp, pp),
        "checkpoint_version": VERSION,
        "iteration": 0,
        "model": state,
    }


def _name_on_stage(name: str, stage: int, pp: int, each: int, tied: bool) -> str | None:
    layer = layer_of(name)
    if layer is None:
        return name if stage == (0 if name.startswith("embedding.") else pp - 1) else None
    return (
        name.replace(f"{_LAYER}{layer}.", f"{_LAYER}{layer % each}.", 1)
        if layer // each == stage
        else None
    )


def _part(whole: Tensor, spec: ParameterSpec, rank: int, tp: int, rows: int | None) -> Tensor:
    """Copy a rank's shard. rows: vocabulary rows; the last one pads it, as in Megatron-LM."""
    if rows is not None:
        whole = torch.cat([whole, whole[-1:].expand(rows - len(whole), -1)])
    part = whole if spec.partition_dim is None else whole.chunk(tp, spec.partition_dim)[rank]
    gated = ".linear_fc1." in spec.name and spec.partition_dim == 1
    return (part.flatten(0, 1) if gated else part).clone(memory_format=torch.contiguous_format)
