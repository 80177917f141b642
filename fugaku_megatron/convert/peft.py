"""Adapters as peft has them: adapter_config.json, and A and B of every matrix in adapter_model.safetensors, both ways.

One A of ours that several matrices of theirs share is written for each of them. Needs no peft. Left out: what adapters compute
(`nn.adapters`), names and places of the matrices (architectures.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_files import write_tensors
from ..config.checks import check
from ..config.lora import MATRICES, LoraConfig
from ..config.model_config import ModelConfig
from .architectures import Architecture, conv_query_key_value, transposed
from .hugging_face import Part, TensorDirectory, architecture_of, carried_config, header, in_their_shape, parts, read_json
from .weights import Adapters, Weights, adapter_shapes, layer_of

CONFIG, TENSORS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
TURNED = (transposed, conv_query_key_value)  # of a module that holds its weight as (inputs, outputs)
# What a field of adapter_config.json may be; others change what adapters compute.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",), "bias": ("none", None), "use_dora": (False, None), "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None), "modules_to_save": (None, []), "lora_bias": (False, None), "layer_replication": (None,),
    "use_qalora": (False, None), "target_parameters": (None, [])}


@dataclass(frozen=True)
class Place:
    """A matrix of theirs. module: its name. ours: the weight that holds it. target: its name in --lora-target."""

    module: str
    ours: str
    target: str
    part: Part


def places(architecture: Architecture, model: ModelConfig) -> Iterator[Place]:
    """Every matrix of the layers' linear layers."""
    table = parts(architecture, model)
    several = {part.ours for part in table.values() if part.number}
    for theirs, part in table.items():
        linear, kind = part.ours.split(".")[-2:]
        if linear in MATRICES and kind == "weight" and layer_of(part.ours) is not None:
            target = MATRICES[linear][part.number] if part.ours in several or len(MATRICES[linear]) == 1 else linear
            yield Place(theirs.removesuffix(".weight"), part.ours, target, part)


def save_peft(weights: Weights, directory: Path) -> None:
    """Write the adapters of `weights`. ValueError where an architecture keeps in one matrix what has several A here."""
    adapters, model = weights.adapters, weights.model
    check(adapters is not None, "--to-peft writes adapters, and --load holds a whole model: pass a checkpoint of --lora-rank")
    assert adapters is not None
    tensors: dict[str, Tensor] = {}
    modules, turned = set(), False
    for place in places(architecture_of(model, carried_config(weights.carried)), model):
        names = adapters.parts(place.ours)
        linear = place.ours.split(".")[-2]
        check(place.target != linear or names in ((), (linear,)), f"--to-peft: {place.module} is one matrix, and has adapters "
              f"{', '.join(names)}: train them with --lora-target {linear}")
        if place.target not in names and linear not in names:
            continue
        a, b = adapters.of(place.ours)
        own = _matrix(b, place.part, model)
        number = names.index(place.target) if place.target in names else 0
        tensors[f"{PREFIX}{place.module}.lora_A.weight"] = a[number].contiguous()
        tensors[f"{PREFIX}{place.module}.lora_B.weight"] = own
        modules.add(place.module.rsplit(".", 1)[-1])
        turned = turned or place.part.arranged in TURNED
    write_tensors(directory / TENSORS, tensors)
    config = _config(adapters.lora, sorted(modules), turned, carried_config(weights.carried).get("_name_or_path"))
    (directory / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _matrix(b: Tensor, part: Part, model: ModelConfig) -> Tensor:
    """The rows of B that belong to a matrix of theirs, (out, r)."""
    own = in_their_shape(b, part, model)
    return own.t().contiguous() if part.arranged in TURNED else own


def _config(lora: LoraConfig, modules: list[str], turned: bool, base: Any) -> dict[str, Any]:
    alpha = int(lora.lora_alpha) if lora.lora_alpha == int(lora.lora_alpha) else lora.lora_alpha
    return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": lora.rank, "lora_alpha": alpha,
            "lora_dropout": lora.lora_dropout, "use_rslora": lora.lora_use_rslora, "target_modules": modules, "bias": "none",
            "fan_in_fan_out": turned, "inference_mode": True, "modules_to_save": None, "init_lora_weights": True}


def open_peft(directory: str, weights: Weights, base: dict[str, Any]) -> Weights:
    """`weights` with the adapters of a directory of peft in them. base: what a checkpoint of the adapters says of `weights`."""
    path = Path(directory)
    check(path.is_dir(), f"--from-peft {directory} is not a directory: pass one that holds {CONFIG} and {TENSORS}")
    try:
        return _open(path, weights, base)
    except ValueError as error:
        raise ValueError(f"--from-peft {directory}: {error}") from error


def _open(path: Path, weights: Weights, base: dict[str, Any]) -> Weights:
    config, model = read_json(path / CONFIG), weights.model
    for name, built in ONLY.items():
        given = config.get(name, built[0])
        check(given in built, f"{CONFIG}: {name} is {given!r:.80}, and what is built is {built[0]!r}")
    for name, kind in (("r", int), ("lora_alpha", (int, float)), ("lora_dropout", (int, float))):
        value = config.get(name, 0)
        check(isinstance(value, kind) and not isinstance(value, bool), f"{CONFIG}: {name} is {value!r:.60}, not a number")
    check((path / TENSORS).is_file(), f"{path / TENSORS} is missing")
    files = TensorDirectory(path, header(path / TENSORS))
    rows = [*places(architecture_of(model, carried_config(weights.carried)), model)]
    there = [row for row in rows if f"{PREFIX}{row.module}.lora_A.weight" in files.tensors]
    known = {f"{PREFIX}{row.module}.lora_{kind}.weight" for row in rows for kind in "AB"}
    extra = next((name for name in files.tensors if name not in known), None)
    check(extra is None, f"{TENSORS} holds {extra}, which this model has no adapter for")
    targets = list(dict.fromkeys(row.target for row in there))
    check(bool(targets), f"{TENSORS} holds no adapter of this model")
    lora = LoraConfig(lora_rank=config.get("r"), lora_alpha=float(config.get("lora_alpha", 8)), lora_target=",".join(targets),
                      lora_dropout=float(config.get("lora_dropout", 0.0)), lora_use_rslora=bool(config.get("use_rslora")))
    lora.check_model(model)
    wanted = adapter_shapes(model, lora)

    def read(name: str) -> Tensor:
        kind, ours = name.split(".")[-2].removeprefix("lora_"), f"{name.rsplit('.', 2)[0]}.weight"
        tensor = torch.zeros(wanted[name])
        for row in (row for row in there if row.ours == ours):
            theirs = f"{PREFIX}{row.module}.lora_{kind}.weight"
            check(theirs in files.tensors, f"{TENSORS} does not hold {theirs}")
            number = lora.parts(ours.split(".")[-2], model).index(row.target)
            _fill(tensor, number, files.read(theirs), row.part, model, theirs, kind)
        return tensor

    adapters = Adapters(lora, model, read, base)
    for row in there:  # a file that does not fit is told before anything is written
        adapters.of(row.ours)
    return adapters.added_to(weights)


def _fill(ours: Tensor, number: int, theirs: Tensor, part: Part, model: ModelConfig, name: str, kind: str) -> None:
    """Copy an A or B of theirs to where it lies in ours."""
    if kind == "A":
        views, shape = [ours[number]], tuple(ours[number].shape)
    else:
        views, shape = part.arranged(ours, part.number, model)
        shape = shape[::-1] if part.arranged in TURNED else shape
    check(tuple(theirs.shape) == tuple(shape), f"{name} has shape {list(theirs.shape)}, and this model needs {list(shape)}")
    values = theirs.t() if kind == "B" and part.arranged in TURNED else theirs
    begin = 0
    for view in views:
        view.copy_(values.reshape(-1)[begin : begin + view.numel()].view(view.shape))
        begin += view.numel()
