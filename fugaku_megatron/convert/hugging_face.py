"""Read and write Hugging Face model directories without transformers.

A directory has config.json and model.safetensors, or several files with an index:
model-00001-of-00002.safetensors ... and model.safetensors.index.json. Memory: one tensor on each
side.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.tensor_files import DTYPES, write_tensors
from ..config.fields import check, check_type
from ..config.model import MASKED, ModelConfig
from ..config.model import architecture as shape_values
from ..data.library_tokenizers import CHAT_TEMPLATE, TEMPLATES, TOKENIZER_CONFIG
from ..text.named_files import JsonObject, about, unreadable
from .architectures import (
    ARCHITECTURES,
    ONLY,
    OUTPUT,
    PACKED,
    REFUSED,
    REQUIRED,
    TEXT_OF,
    Architecture,
    Arrangement,
    Shape,
    whole,
)
from .config_fields import check_fields
from .mxfp4 import is_mxfp4, unpacked
from .rules import FILE
from .tensor_directory import INDEX, SAVE_AS, SINGLE, TensorDirectory, read_json, write_json
from .weights import Weights, layer_of, place_of, shapes, widest


def write(
    directory: Path, like: Mapping[str, Tensor], values: Callable[[str], Tensor], max_bytes: int
) -> None:
    """Write tensors into files with at most `max_bytes`, or one tensor, and an index for several
    files.

    like: shapes and dtypes, also on the meta device
    values: computes a tensor when it is written
    """
    parts = list(_parts(like, max_bytes))
    files = [
        f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)
    ]
    for file, part in zip(files if len(parts) > 1 else [SINGLE], parts):
        write_tensors(directory / file, part, values)
    if len(parts) > 1:
        weight_map = {name: file for file, part in zip(files, parts) for name in part}
        total = sum(tensor.nbytes for tensor in like.values())
        (directory / INDEX).write_text(
            json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
            + "\n"
        )


def _parts(like: Mapping[str, Tensor], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in like.items():
        size += tensor.nbytes
        if part and size > max_bytes:
            yield part
            part = {}
            size = tensor.nbytes
        part[name] = tensor
    yield part


# What belongs to a model in addition to its weights, as patterns of names: the files of every tokenizer of transformers, and of others.
CARRIED = (
    FILE,
    "generation_config.json",
    "tokenizer*",
    "tokenization_*.py",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "*_vocab.json",
    "merges*",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "*.tokenizer",
    "tekken.json",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "normalizer.json",
    "word_*.json",
    "sentencepiece*",
    "chat_template*",
    f"{TEMPLATES}/*",
    "processor_config.json",
    "LICENSE*",
    "NOTICE*",
)
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Part:
    """Tensor in their files: piece `number` in our tensor `ours`, and its arrangement."""

    ours: str
    number: int
    arranged: Arrangement


def parts(architecture: Architecture, model: ModelConfig) -> dict[str, Part]:
    """Return the parts by their names, piece after piece of our tensors in the model's order."""
    found = {}
    for ours in shapes(model):
        place, kind = place_of(ours)
        ending = f".{kind}"
        if f"{place}.{kind}" in architecture.places:  # a name of its own, without weight or bias
            place = f"{place}.{kind}"
            ending = ""
        check(place in architecture.places, f"{architecture.name} has no place for {ours}")
        names, arranged = architecture.places[place]
        prefix = "" if place == OUTPUT else architecture.prefix
        experts = range(model.num_experts or 1) if "{expert}" in names[0] else (0,)
        for number, (expert, name) in enumerate(itertools.product(experts, names)):
            theirs = name.format(layer_of(ours), expert=expert)
            found[f"{prefix}{theirs}{ending}"] = Part(ours, number, arranged)
    return found


def constants(architecture: Architecture, model: ModelConfig) -> dict[str, float]:
    """Return the stored constants of all layers by their names."""
    return {
        f"{architecture.prefix}{name.format(layer)}": value
        for layer in range(model.num_layers)
        for name, value in architecture.constants.items()
    }


def copy_flat(theirs: Tensor, views: list[Tensor]) -> None:
    """Fill views of ours, one after another, with the elements of their tensor."""
    elements = theirs.flatten().split([view.numel() for view in views])
    for view, values in zip(views, elements, strict=True):
        view.copy_(values.view(view.shape))


# From Hugging Face ------------------------------------------------------------------------------------------------------------


def open_hugging_face(directory: str) -> Weights:
    """Open a model directory, or raise ValueError."""
    path = Path(directory)
    check(
        path.is_dir(),
        f"--from-hf {directory} is not a directory: pass one that holds {FILE} and safetensors",
    )
    with about(f"--from-hf {directory}"):
        config = read_json(path / FILE)
        files = TensorDirectory.open(path)
        notes = []
        if config.get("model_type") in TEXT_OF:
            files, note = _without_towers(files)
            notes.append(note)
        if _is_packed(config):
            files = unpacked(files)
        architecture, model = read_config(plain_config(config))
        if architecture.stores_single_experts:
            files = _with_single_experts(files, model)
        if architecture.predicts_more_tokens:
            files, note = _without_later_layers(files, model.num_layers)
            notes.append(note)
        reader = _reader(files, architecture, model)
    dtypes = {name: reader.dtype(name) for name in reader.shapes}
    return Weights(model, dtypes, reader, path, notes=tuple(filter(None, notes)))


def _is_packed(config: JsonObject) -> bool:
    return config.get("model_type") in PACKED and is_mxfp4(config.get("quantization_config"))


def plain_config(config: JsonObject) -> JsonObject:
    """Return the text model's config.json, without a quantization that is unpacked."""
    if config.get("model_type") in TEXT_OF:
        config = text_config(config)
    if _is_packed(config):
        config = {**config, "quantization_config": None}
    return config


def text_config(config: JsonObject) -> JsonObject:
    """Return the config.json of the language model in a multimodal config.json."""
    kinds = TEXT_OF[config["model_type"]]
    text = config.get("text_config")
    found = text.get("model_type") if isinstance(text, dict) else text
    if not isinstance(text, dict) or found not in kinds:
        raise ValueError(
            f"{FILE}: text_config has the model_type {found!r:.60}: it can be {' or '.join(kinds)}"
        )
    tied = {name: config[name] for name in ("tie_word_embeddings",) if name in config}
    return {**tied, **text, "architectures": None}


_TOWER = re.compile(r"(model\.)?(vision_tower|visual|multi_modal_projector|audio_tower)\..*")


def _without_towers(files: TensorDirectory) -> tuple[TensorDirectory, str]:
    """Return the language model's tensors by the names of a text model, and a note about the others."""
    tensors = {}
    left_out = 0
    for name, tensor in files.tensors.items():
        if _TOWER.fullmatch(name):
            left_out += 1
            continue
        name = name.replace("language_model.", "", 1)
        tensors[name if name.startswith(("model.", "lm_head.")) else f"model.{name}"] = tensor
    note = f"{left_out} tensors of images are left out: the text model is converted"
    return TensorDirectory(files.path, tensors), note if left_out else ""


_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def _with_single_experts(files: TensorDirectory, model: ModelConfig) -> TensorDirectory:
    """Return the tensors with each expert's matrices on their own, where a file has those of all experts as one."""
    tensors = {}
    for name, (file, stored) in files.tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or len(stored.shape) != 3 or stored.shape[0] != model.num_experts:
            tensors[name] = file, stored
            continue
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
        experts, rows, columns = stored.shape
        shape = (rows // len(parts), columns)
        numel = shape[0] * columns
        for number, (expert, part) in enumerate(itertools.product(range(experts), parts)):
            start = stored.start + number * numel * stored.dtype.itemsize
            single = replace(stored, shape=shape, start=start, numel=numel)
            tensors[f"{match[1]}.{expert}.{part}.weight"] = file, single
    return TensorDirectory(files.path, tensors)


_PREDICTS = re.compile(r"(model\.)?mtp\..*")
_NUMBERED = re.compile(r"(?:model\.)?layers\.(\d+)\..*")


def _without_later_layers(files: TensorDirectory, layers: int) -> tuple[TensorDirectory, str]:
    """Return the tensors of the first layers and outside layers, and a note about the others."""
    tensors = {}
    for name, tensor in files.tensors.items():
        match = _NUMBERED.fullmatch(name)
        if match is None and not _PREDICTS.fullmatch(name) or match and int(match[1]) < layers:
            tensors[name] = tensor
    left_out = len(files.tensors) - len(tensors)
    note = f"{left_out} tensors of multi-token-prediction layers are left out"
    return TensorDirectory(files.path, tensors), note if left_out else ""


def read_config(config: JsonObject) -> tuple[Architecture, ModelConfig]:
    """Return a config.json's model. Raise ValueError with field and value if it is unsupported."""
    known = {row.model_type: row for row in ARCHITECTURES}
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        reason = f"{REFUSED[kind]}; " if isinstance(kind, str) and kind in REFUSED else ""
        raise ValueError(
            f"{FILE}: model_type is {kind!r:.60}: {reason}it can be {', '.join(known)}"
        )
    architecture = known[kind]
    named = config.get("architectures") or [architecture.name]
    right = isinstance(named, list) and not {
        architecture.name,
        architecture.without_head,
    }.isdisjoint(map(str, named))
    check(right, f"{FILE}: architectures is {named!r:.80}, and the block is {architecture.name}")
    check_fields(architecture, config)
    config = {**architecture.defaults, **config}
    for name, built in {**ONLY, **architecture.only}.items():
        given = config.get(name, built[0])
        check(
            given in built,
            f"{FILE}: {name} is {given!r:.80}, and the block computes {' or '.join(map(repr, built))}",
        )
    values = {**architecture.block, **_fields(architecture, config)}
    for rule in architecture.rules:
        values |= rule.read(config)
    with about(FILE):
        return architecture, ModelConfig(
            **{"seq_length": values["max_position_embeddings"], **values}, mask_vocab_padding=MASKED
        )


def _fields(architecture: Architecture, config: JsonObject) -> JsonObject:
    values: JsonObject = {}
    ours = {f.name: f for f in fields(ModelConfig)}
    for row in architecture.fields:
        value = config.get(row.theirs, row.default)
        check(value is not REQUIRED, f"{FILE} has no {row.theirs}")
        try:
            check_type(ours[row.ours], value)
        except ValueError:
            raise ValueError(
                f"{FILE}: {row.theirs} is {value!r:.60}, not {ours[row.ours].type}"
            ) from None
        values[row.ours] = value
    return values


@dataclass(frozen=True)
class _Reader:
    """Reader that builds our tensors.

    stored: our names -> parts by their names in the files
    """

    files: TensorDirectory
    model: ModelConfig
    shapes: dict[str, Shape]
    stored: dict[str, dict[str, Part]]

    def dtype(self, name: str) -> torch.dtype:
        return widest(self.files.tensors[their][1].dtype for their in self.stored[name])

    def __call__(self, name: str) -> Tensor:
        ours = torch.empty(self.shapes[name], dtype=self.dtype(name))
        for their, part in self.stored[name].items():
            if part.arranged is whole:
                return self.files.read(their)
            views, _ = part.arranged(ours, part.number, self.model)
            copy_flat(self.files.read(their), views)
        return ours


def _reader(files: TensorDirectory, architecture: Architecture, model: ModelConfig) -> _Reader:
    ours = shapes(model)
    table = parts(architecture, model)
    fixed = constants(architecture, model)
    names = _stored_names(files, architecture, [*table, *fixed])
    for name, value in fixed.items():
        stored_value = files.read(names[name])
        check(
            torch.equal(stored_value, torch.full_like(stored_value, value)),
            f"{name} is {stored_value.tolist()}, and the block computes {value}",
        )
    stored: dict[str, dict[str, Part]] = defaultdict(dict)
    for their, part in table.items():
        empty = torch.empty(ours[part.ours], device="meta")
        _, expected = part.arranged(empty, part.number, model)
        file, found = files.tensors[names[their]]
        check(
            found.shape == expected,
            f"{their} has shape {list(found.shape)}, and {FILE} says {list(expected)}",
        )
        check(
            found.dtype.is_floating_point,
            f"{file.path}: {their} has the format {DTYPES[found.dtype]}, which is not "
            f"supported for weights: {SAVE_AS}",
        )
        stored[part.ours][names[their]] = part
    return _Reader(files, model, ours, stored)


def _stored_names(
    files: TensorDirectory, architecture: Architecture, names: list[str]
) -> dict[str, str]:
    """Return their names -> names in the files, which may lack the prefix. Raise ValueError for
    others.
    """
    stored = {
        name: n
        for name in names
        for n in (name.removeprefix(architecture.prefix), name)
        if n in files.tensors
    }
    embedding = f"{architecture.prefix}{architecture.embedding}"
    head = architecture.head
    if embedding not in stored and head not in names and head in files.tensors:
        stored[embedding] = head  # one matrix for both, which some programs store under this name
    lacking = next((name for name in names if name not in stored), None)
    check(lacking is None, f"{files.path} holds no tensor {lacking}, which {FILE} asks for")
    others = set(files.tensors) - set(stored.values())
    if head in others:
        _check_tied(files, head, next(iter(stored.values())))
    rest = sorted(name for name in others - {head} if not architecture.unused.fullmatch(name))
    check(
        not rest,
        f"{files.path} holds {len(rest)} tensors that {architecture.name} does not have here, such as {rest[:1]}",
    )
    return stored


def _check_tied(files: TensorDirectory, name: str, embedding: str) -> None:
    head = files.read(name)
    weight = files.read(embedding)
    both = widest((head.dtype, weight.dtype))
    check(
        torch.equal(head.to(both), weight.to(both)),
        f"{name} differs from {embedding}, and {FILE} says "
        "tie_word_embeddings true: correct one of them",
    )


# To Hugging Face --------------------------------------------------------------------------------------------------------------


def save_hugging_face(weights: Weights, directory: Path, max_bytes: int) -> None:
    model = weights.model
    before = carried_config(weights.carried)
    architecture = architecture_of(model, before)
    table = parts(architecture, model)
    like = weights.like()
    read = lru_cache(maxsize=1)(weights.read)
    theirs = {name: in_their_shape(like[part.ours], part, model) for name, part in table.items()}
    fixed = constants(architecture, model)
    for name in fixed:
        theirs[name] = torch.empty((), dtype=widest(weights.dtypes.values()), device="meta")

    def value(name: str) -> Tensor:
        if name in fixed:
            return torch.tensor(fixed[name], dtype=theirs[name].dtype)
        return in_their_shape(read(table[name].ours), table[name], model)

    write(directory, theirs, value, max_bytes)
    carry(weights.carried, directory)
    config = config_of(architecture, model, {*weights.dtypes.values()}, before)
    write_json(directory / FILE, config)


def in_their_shape(ours: Tensor, part: Part, model: ModelConfig) -> Tensor:
    views, shape = part.arranged(ours, part.number, model)
    joined = views[0] if len(views) == 1 else torch.cat([view.flatten() for view in views])
    return joined.reshape(shape).contiguous()


def architecture_of(model: ModelConfig, before: JsonObject) -> Architecture:
    """Return the original model's architecture, or else the first that fits."""
    fitting = [row for row in ARCHITECTURES if row.fits(model)]
    check(
        bool(fitting),
        f"no architecture of Hugging Face has this block: {', '.join(row.name for row in ARCHITECTURES)} do not",
    )
    return next((row for row in fitting if row.model_type == before.get("model_type")), fitting[0])


def carried_config(carried: Path | None) -> JsonObject:
    if carried is None or not (carried / FILE).exists():
        return {}
    config = read_json(carried / FILE)
    # The files were quantized, the weights read from them are not.
    if is_mxfp4(config.get("quantization_config")):
        del config["quantization_config"]
    return config


def config_of(
    architecture: Architecture, model: ModelConfig, dtypes: set[torch.dtype], before: JsonObject
) -> JsonObject:
    """Return a model's config.json. before: the original, whose other fields are kept."""
    if before.get("model_type") != architecture.model_type:
        before = {}
    config = dict(before)
    if not before or shape_values(read_config(before)[1]) != shape_values(model):
        config |= {row.theirs: getattr(model, row.ours) for row in architecture.fields}
        config.pop(
            "rope_parameters", None
        )  # of transformers 5, which reads what is written as well
        for rule in architecture.rules:
            config |= rule.write(model)
        config |= {
            name: values[0]
            for name, values in architecture.only.items()
            if config.get(name) not in values
        }
    config |= {"architectures": [architecture.name], "model_type": architecture.model_type}
    if len(dtypes) == 1:
        names = [name for name in ("torch_dtype", "dtype") if name in before]
        config |= dict.fromkeys(names or ["torch_dtype"], _DTYPE_NAMES.get(*dtypes))
    return config


def carried_files(source: Path | None) -> list[Path]:
    if source is None:
        return []
    found = (file for pattern in CARRIED for file in sorted(source.glob(pattern)))
    return [*dict.fromkeys(file for file in found if file.is_file())]


def check_carried(source: Path | None) -> None:
    """Raise ValueError for an unreadable CARRIED file, before writing anything."""
    for file in carried_files(source):
        if reason := unreadable(file):
            raise ValueError(f"{file} cannot be read ({reason}): correct it, or remove it")


def carry(source: Path | None, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    for file in carried_files(source):
        assert source is not None
        copy = directory / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def set_chat_template(folder: Path, template: Path) -> None:
    """Make a file a tokenizer folder's template; named templates are kept.

    transformers reads the templates in tokenizer_config.json only without a template file.
    """
    config = read_json(folder / TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    named = config.get("chat_template")
    for row in named if isinstance(named, list) else []:
        name = str(row.get("name"))
        check(
            re.fullmatch(r"[\w-]+", name) is not None,
            f"{folder / TOKENIZER_CONFIG} has a chat template named {name!r:.40}: name it by letters",
        )
        file = folder / TEMPLATES / f"{name}.jinja"
        if name != "default" and not file.exists():
            file.parent.mkdir(exist_ok=True)
            file.write_text(str(row.get("template")), encoding="utf-8")
    shutil.copyfile(template, folder / CHAT_TEMPLATE)
