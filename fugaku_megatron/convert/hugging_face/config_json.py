"""config.json of Hugging Face, read into a ModelConfig and written from it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from ...config.architecture import architecture as shape_values
from ...config.fields import check, check_type
from ...config.model import ModelConfig
from ...config.rows import MASKED
from ...text.named_files import JsonObject, about
from .architectures import (
    ARCHITECTURES,
    MXFP4_MODELS,
    ONLY,
    REFUSED,
    REQUIRED,
    TEXT_OF,
    Architecture,
)
from .config_fields import OF_THE_WHOLE, check_fields, check_outer_fields
from .mxfp4 import is_mxfp4
from .rules import FILE
from .tensor_directory import read_json

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def has_mxfp4_experts(config: JsonObject) -> bool:
    return config.get("model_type") in MXFP4_MODELS and is_mxfp4(config.get("quantization_config"))


def has_text_config(config: JsonObject) -> bool:
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in TEXT_OF


def plain_config(config: JsonObject) -> JsonObject:
    """Return the text model's config.json, without a quantization that is unpacked."""
    if has_text_config(config):
        config = text_config(config)
    if has_mxfp4_experts(config):
        config = {**config, "quantization_config": None}
    return config


def text_config(config: JsonObject) -> JsonObject:
    """Return the language model's part of a multimodal config.json."""
    kinds = TEXT_OF[config["model_type"]]
    text = config.get("text_config")
    found = text.get("model_type") if isinstance(text, dict) else text
    if not isinstance(text, dict) or found not in kinds:
        raise ValueError(
            f"{FILE}: text_config has the model_type {found!r:.60}: it can be {' or '.join(kinds)}"
        )
    check_outer_fields(config, text)
    outer = {name: config[name] for name in OF_THE_WHOLE if config.get(name) is not None}
    return {**text, **outer, "architectures": None}


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
