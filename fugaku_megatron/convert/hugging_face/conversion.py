"""Hugging Face model directories, read and written without transformers. Memory: one tensor on each side."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoint.tensor_files import DTYPES
from ...config.fields import check
from ...config.model import ModelConfig
from ...text.foreign_models import hub_note
from ...text.named_files import about
from ..weights import Weights, shapes, widest
from .architectures import ARCHITECTURES, Architecture
from .carried_files import carry
from .config_json import (
    OF_FP8,
    OF_MXFP4,
    architecture_of,
    carried_config,
    config_of,
    has_text_config,
    plain_config,
    quant_method,
    read_config,
    text_config,
)
from .fp8 import FP8, block_size, without_scales
from .mxfp4 import unpacked
from .rules import FILE
from .tensor_directory import (
    ADAPTER_CONFIG,
    INDEX,
    SAVE_AS,
    SINGLE,
    TensorDirectory,
    read_json,
    write_json,
    write_tensor_files,
)
from .tensor_mapping import (
    TensorMapping,
    constants,
    copies,
    copy_flat,
    in_their_shape,
    tensor_mappings,
)
from .tensor_views import Shape, whole


def open_hugging_face(
    directory: str, adapters: str | None = None, drop_mtp: bool = False
) -> Weights:
    """Open a model directory, or raise ValueError.

    adapters: directory whose adapters are added to the model
    drop_mtp: leave MTP modules out, whose tensors are then not looked at
    """
    path = Path(directory)
    check(
        path.is_dir(),
        f"--from-hf {directory} is not a directory: pass one that holds {FILE} and safetensors"
        + hub_note(directory),
    )
    with about(f"--from-hf {directory}"):
        _check_adapters(path, adapters)
        config = read_json(path / FILE)
        files = TensorDirectory.open(path)
        notes = []
        if has_text_config(config):
            files, note = _without_towers(files)
            notes.append(note)
            config = text_config(config)
        architecture, model = read_config(plain_config(config))
        drops = architecture.leaves_predictions_out or drop_mtp
        files, model, note = _with_stored_modules(files, model, drops)
        notes.append(note)
        method = quant_method(config)
        if method == OF_MXFP4:
            files = unpacked(files)
        elif method == OF_FP8:
            files = without_scales(files, block_size(config["quantization_config"]))
        if any(map(_STACKED.fullmatch, files.tensors)):
            architecture = architecture.with_stacked_experts
        reader = _reader(files, architecture, model)
    dtypes = {name: reader.dtype(name) for name in reader.shapes}
    return Weights(model, dtypes, reader, path, notes=tuple(filter(None, notes)))


def _check_adapters(path: Path, adapters: str | None) -> None:
    """Raise ValueError for peft's adapters without a model, and next to one, to which transformers adds them."""
    file = path / ADAPTER_CONFIG
    if not file.is_file() or adapters is not None and Path(adapters).resolve() == path.resolve():
        return
    model: object = path
    what = f"has {ADAPTER_CONFIG} next to the weights, and transformers adds such adapters to the model"
    remedy = f", or move {ADAPTER_CONFIG} away"
    if not any((path / name).exists() for name in (SINGLE, INDEX)):
        named = read_json(file).get("base_model_name_or_path")
        model = named or "MODEL"
        what = f"holds peft's adapters of the model {named!s:.200}, and no model"
        if not named:
            what = f"holds peft's adapters, whose {ADAPTER_CONFIG} names no model, and no model"
        remedy = ""
    raise ValueError(
        f"{what}: pass fugaku-megatron convert --from-hf {model!s:.200} --from-peft {path} --merge "
        f"--save NEW{remedy}"
    )


TOWER = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector|audio_tower)\..*")


def _without_towers(files: TensorDirectory) -> tuple[TensorDirectory, str]:
    """Return the language model's tensors by the names of a text model, and a note about the others."""
    tensors = {}
    left_out = 0
    for name, tensor in files.tensors.items():
        if TOWER.fullmatch(name):
            left_out += 1
            continue
        name = name.replace("language_model.", "", 1)
        tensors[name if name.startswith(("model.", "lm_head.")) else f"model.{name}"] = tensor
    note = f"{left_out} tensors of images are left out: the text model is converted"
    return replace(files, tensors=tensors), note if left_out else ""


_STACKED = re.compile(r".*\.mlp\.experts\.(gate_up_proj|down_proj)")
_MTP = re.compile(r"(model\.)?mtp\..*")
_NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\..*")


def _with_stored_modules(
    files: TensorDirectory, model: ModelConfig, drops: bool
) -> tuple[TensorDirectory, ModelConfig, str]:
    """Return the tensors and the model, both with the MTP modules that the files hold, and a note about others.

    drops: leave the modules out
    """
    tensors = {}
    for name, tensor in files.tensors.items():
        match = _NUMBERED.fullmatch(name)
        behind = match is not None and int(match[1]) >= model.num_layers
        if not (behind or _MTP.fullmatch(name)):
            tensors[name] = tensor
    left_out = len(files.tensors) - len(tensors)
    alone = replace(model, mtp_num_layers=None)
    if drops:
        note = f"{left_out} tensors of multi-token-prediction layers are left out"
        return replace(files, tensors=tensors), alone, note if left_out else ""
    if model.predictions and not left_out:
        note = (
            f"{FILE} says num_nextn_predict_layers {model.predictions}, and the files hold no such layers: "
            "the model has none"
        )
        return files, alone, note
    return files, model, ""


@dataclass(frozen=True)
class _Reader:
    """Reader that builds our tensors.

    stored: our names -> mappings by their names in the files
    """

    files: TensorDirectory
    model: ModelConfig
    shapes: dict[str, Shape]
    stored: dict[str, dict[str, TensorMapping]]

    def dtype(self, name: str) -> torch.dtype:
        return widest(self.files.tensors[their][1].dtype for their in self.stored[name])

    def __call__(self, name: str) -> Tensor:
        ours = torch.empty(self.shapes[name], dtype=self.dtype(name))
        for their, mapping in self.stored[name].items():
            if mapping.arranged is whole:
                return self.files.read(their)
            views, _ = mapping.arranged(ours, mapping.number, self.model)
            copy_flat(self.files.read(their), views)
        return ours


def _reader(files: TensorDirectory, architecture: Architecture, model: ModelConfig) -> _Reader:
    ours = shapes(model)
    table = tensor_mappings(architecture, model)
    fixed = constants(architecture, model)
    files = _without_copies(files, architecture, model)
    names = _stored_names(files, architecture, [*table, *fixed])
    for name, value in fixed.items():
        stored_value = files.read(names[name])
        check(
            torch.equal(stored_value, torch.full_like(stored_value, value)),
            f"{name} is {stored_value.tolist()}, and the block computes {value}",
        )
    stored: dict[str, dict[str, TensorMapping]] = defaultdict(dict)
    for their, mapping in table.items():
        empty = torch.empty(ours[mapping.ours], device="meta")
        _, expected = mapping.arranged(empty, mapping.number, model)
        file, found = files.tensors[names[their]]
        check(
            found.shape == expected,
            f"{their} has shape {list(found.shape)}, and {FILE} says {list(expected)}",
        )
        check(
            found.dtype.is_floating_point and found.dtype != FP8,
            f"{file.path}: {their} has the format {DTYPES[found.dtype]}, which is not "
            f"supported for weights: {SAVE_AS}",
        )
        stored[mapping.ours][names[their]] = mapping
    return _Reader(files, model, ours, stored)


def _stored_names(
    files: TensorDirectory, architecture: Architecture, names: list[str]
) -> dict[str, str]:
    """Return their names -> names in the files, which may lack the prefix. Raise ValueError for
    others.
    """
    stored = {name: found for name in names if (found := _spelled(files, architecture, name))}
    embedding = architecture.embedding
    head = architecture.head
    if embedding not in stored and head not in names and head in files.tensors:
        stored[embedding] = head  # one matrix for both, which some programs store under this name
    lacking = next((name for name in names if name not in stored), None)
    check(lacking is None, f"{files.path} holds no tensor {lacking}, which {FILE} asks for")
    others = set(files.tensors) - set(stored.values())
    if head in others:
        remedy = f"{FILE} says tie_word_embeddings true: correct one of them"
        _check_equal(files, head, next(iter(stored.values())), remedy)
    rest = sorted(name for name in others - {head} if not architecture.unused.fullmatch(name))
    check(
        not rest,
        f"{files.path} holds {len(rest)} tensors that {architecture.name} does not have here, such as {rest[:1]}",
    )
    return stored


def _check_equal(files: TensorDirectory, name: str, other: str, remedy: str) -> None:
    first = files.read(name)
    second = files.read(other)
    both = widest((first.dtype, second.dtype))
    check(
        torch.equal(first.to(both), second.to(both)), f"{name} differs from {other}, and {remedy}"
    )


def _without_copies(
    files: TensorDirectory, architecture: Architecture, model: ModelConfig
) -> TensorDirectory:
    """Return the tensors without the MTP modules' own embeddings and heads, which must equal the model's."""
    tensors = dict(files.tensors)
    for copy, original in copies(architecture, model).items():
        found = _spelled(files, architecture, copy)
        same = _spelled(files, architecture, original)
        if found is not None and same is not None:
            _check_equal(files, found, same, "MTP modules share it here: pass --drop-mtp")
            del tensors[found]
    return replace(files, tensors=tensors)


def _spelled(files: TensorDirectory, architecture: Architecture, name: str) -> str | None:
    """Return a name as the files have it, which may lack the prefix."""
    spelled = (name, name.removeprefix(architecture.prefix))
    return next((each for each in spelled if each in files.tensors), None)


def with_architecture(weights: Weights) -> Weights:
    """Return the weights, without MTP modules if no architecture has them next to this block."""
    if any(row.fits(weights.model) for row in ARCHITECTURES):
        return weights
    return weights.without_predictions()


def save_hugging_face(weights: Weights, directory: Path, max_bytes: int) -> None:
    """Write config.json, safetensors files of at most `max_bytes` each, and carried files."""
    model = weights.model
    before = carried_config(weights.carried)
    architecture = architecture_of(model, before)
    table = tensor_mappings(architecture, model)
    like = weights.like()
    read = lru_cache(maxsize=1)(weights.read)
    theirs = {
        name: in_their_shape(like[mapping.ours], mapping, model) for name, mapping in table.items()
    }
    fixed = constants(architecture, model)
    for name in fixed:
        theirs[name] = torch.empty((), dtype=widest(weights.dtypes.values()), device="meta")

    originals = copies(architecture, model)
    theirs |= {copy: theirs[original] for copy, original in originals.items()}

    def value(name: str) -> Tensor:
        name = originals.get(name, name)
        if name in fixed:
            return torch.tensor(fixed[name], dtype=theirs[name].dtype)
        return in_their_shape(read(table[name].ours), table[name], model)

    write_tensor_files(directory, theirs, value, max_bytes)
    carry(weights.carried, directory)
    config = config_of(architecture, model, {*weights.dtypes.values()}, before)
    write_json(directory / FILE, config)
