"""Read and write adapters in peft's format, adapter_config.json and adapter_model.safetensors,
without peft.

Our shared A is written for each matrix. transformers 5 has a layer's experts in two parameters, (e,
2 f, h) and (e, h, f): expert rank R gives A (e R, in) and B (out, R e), columns rank-major; gate
and value adapters become one with twice the rank. transformers 4's files, with a linear layer per
matrix and expert, are only read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_files import write_tensors
from ..config.fields import check, is_off
from ..config.layer_kinds import FC1, FC2, IN_PROJ
from ..config.lora import MATRICES, LoraConfig
from ..config.model import ModelConfig
from ..nn.adapters import expanded, row_mask
from ..text.named_files import JsonObject, about
from .config_json import architecture_of, carried_config
from .tensor_directory import TensorDirectory, header, read_json, write_json
from .tensor_mapping import TensorMapping, copy_flat, in_their_shape, tensor_mappings
from .tensor_views import conv_query_key_value, transposed
from .weights import Adapters, Weights, adapter_shapes, layer_of, linear_of

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
FAN_IN_FAN_OUT = (
    transposed,
    conv_query_key_value,
)  # of a module that holds its weight as (inputs, outputs)
# The fields of adapter_config.json. A value that is off, such as null or {}, is plain LoRA for each.
READ = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "use_rslora",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
)
IGNORED = {
    "the file's tensors say which matrices have adapters": (
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
    ),
    "it describes the file or the program that wrote it": (
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "runtime_config",
        "task_type",
    ),
    "A and B are stored alike for both orders of the base weight": ("fan_in_fan_out",),
    "it says how A and B began, next to unchanged base weights": ("eva_config",),
    "it has no effect without a field that is refused": (
        "ensure_weight_tying",
        "megatron_core",
        "qalora_group_size",
    ),
}
# The values with which peft computes plain LoRA; a field that stands nowhere here must be off.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Others, such as pissa, olora, corda, loftq and lora_ga, subtract the adapters from the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
PARAMETERS = {
    FC1: "gate_up_proj",
    FC2: "down_proj",
}  # of `mlp.experts`, in their order, in which peft wraps one around the other
PATTERN = rf".*\.{PARAMETERS[FC1]}"


@dataclass(frozen=True)
class PeftMatrix:
    """Matrix in their model.

    ours: our weight that contains it
    target: its name in --lora-target
    expert: its number, in transformers 4's files
    """

    module: str
    ours: str
    target: str
    mapping: TensorMapping
    expert: int | None = None


def peft_matrices(weights: Weights) -> Iterator[PeftMatrix]:
    architecture = architecture_of(weights.model, carried_config(weights.carried))
    table = tensor_mappings(architecture, weights.model)
    several = {mapping.ours for mapping in table.values() if mapping.number}
    for theirs, mapping in table.items():
        linear = linear_of(mapping.ours)
        if (
            linear in MATRICES
            and mapping.ours.endswith(".weight")
            and layer_of(mapping.ours) is not None
        ):
            expert = None
            number = mapping.number
            if ".mlp.experts." in mapping.ours:
                expert, number = divmod(mapping.number, len(MATRICES[linear]))
            module = theirs.removesuffix(".weight")
            target = linear
            if module.rsplit(".", 1)[-1] in MATRICES[linear]:
                target = module.rsplit(".", 1)[-1]
            elif mapping.ours in several or len(MATRICES[linear]) == 1:
                target = MATRICES[linear][number]
            yield PeftMatrix(module, mapping.ours, target, mapping, expert)


def _key(module: str, kind: str) -> str:
    return f"{PREFIX}{module}.lora_{kind}.weight"


def _of_experts(rows: list[PeftMatrix], linears: list[str]) -> dict[str, str]:
    weights = dict.fromkeys(row.ours for row in rows if row.expert is not None)
    both = linears == [FC1, FC2]
    return {
        ours: f"model.layers.{layer_of(ours)}.mlp.experts"
        + (".base_layer" if both and FC1 in ours else "")
        for ours in weights
        if linear_of(ours) in linears
    }


def save_peft(weights: Weights, directory: Path) -> None:
    """Write the adapters. Raise ValueError for an architecture that fuses matrices with several A."""
    adapters = weights.adapters
    model = weights.model
    if adapters is None:
        raise ValueError(
            "--to-peft writes adapters, and --load holds a whole model: pass a checkpoint of --lora-rank"
        )
    tensors: dict[str, Tensor] = {}
    modules = set()
    parameters = set()
    fan_in_fan_out = False
    rows = [*peft_matrices(weights)]
    for ours, module in _of_experts(
        rows, [name for name in PARAMETERS if adapters.lora.parts(name, model)]
    ).items():
        tensors |= zip((_key(module, kind) for kind in "AB"), _fused(adapters, ours))
        parameters.add(f"mlp.experts.{PARAMETERS[linear_of(ours)]}")
    _check_matrices(adapters, rows)
    for place in (row for row in rows if row.expert is None):
        names = adapters.parts(place.ours)
        linear = linear_of(place.ours)
        check(
            place.target != linear or names in ((), (linear,)),
            f"--to-peft: {place.module} is one matrix, and has adapters "
            f"{', '.join(names)}: train them with --lora-target {linear}",
        )
        if place.target not in names and linear not in names:
            continue
        a, b = adapters.of(place.ours)
        own = in_their_shape(b, place.mapping, model)  # B's rows for their matrix, (out, r)
        if place.mapping.arranged in FAN_IN_FAN_OUT:
            own = own.t().contiguous()
        number = names.index(place.target) if place.target in names else 0
        tensors[_key(place.module, "A")] = a[number].contiguous()
        tensors[_key(place.module, "B")] = own
        # peft takes a module of this name for an expert's
        if model.num_experts and linear in PARAMETERS:
            parameters.add(".".join([*place.module.split(".")[3:], "weight"]))
        else:
            modules.add(place.module.rsplit(".", 1)[-1])
        fan_in_fan_out = fan_in_fan_out or place.mapping.arranged in FAN_IN_FAN_OUT
    write_tensors(directory / TENSORS, tensors)
    config = _config(
        adapters.lora,
        sorted(modules),
        fan_in_fan_out,
        carried_config(weights.carried).get("_name_or_path"),
    )
    if parameters:
        config |= {"target_parameters": sorted(parameters)} | _patterns(
            config, len(adapters.lora.parts(FC1, model))
        )
    write_json(directory / CONFIG, config)


def _check_matrices(adapters: Adapters, rows: list[PeftMatrix]) -> None:
    """Raise ValueError for an adapter of a matrix that the architecture stores otherwise."""
    targets: dict[str, set[str]] = {}
    for row in rows:
        linear = linear_of(row.ours)
        targets.setdefault(linear, {linear}).add(row.target)
    for linear, known in targets.items():
        other = [name for name in adapters.lora.parts(linear, adapters.model) if name not in known]
        check(
            linear != IN_PROJ or not other,
            f"--to-peft: {''.join(other[:1])} is no matrix of this model's files, which have "
            f"{', '.join(sorted(known - {linear}))}: train those with --lora-target, or {linear}",
        )


def _fused(adapters: Adapters, ours: str) -> tuple[Tensor, Tensor]:
    """Return A (e p r, in) and B (out, p r e) for a parameter that stacks all experts."""
    a, b = adapters.of(ours)
    mask = row_mask(linear_of(ours), adapters.parts(ours), a, b, adapters.model)
    whole = expanded(b, mask, 1.0)
    return a.flatten(0, 2).contiguous(), whole.view(len(a), -1, whole.shape[-1]).permute(
        1, 2, 0
    ).flatten(1).contiguous()


def _patterns(config: JsonObject, several: int) -> JsonObject:
    """Return rank and alpha for the experts' first parameter; their scale equals the others'."""
    if several < 2:
        return {}
    factor = several**0.5 if config["use_rslora"] else several
    return {
        "rank_pattern": {PATTERN: config["r"] * several},
        "alpha_pattern": {PATTERN: config["lora_alpha"] * factor},
    }


def _config(lora: LoraConfig, modules: list[str], fan_in_fan_out: bool, base: Any) -> JsonObject:
    alpha = int(lora.lora_alpha) if lora.lora_alpha == int(lora.lora_alpha) else lora.lora_alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.lora_use_rslora,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "inference_mode": True,
        "modules_to_save": None,
        "init_lora_weights": True,
    }


def open_peft(directory: str, weights: Weights, base: JsonObject) -> Weights:
    """Add a peft directory's adapters. base: model that an adapter checkpoint names."""
    path = Path(directory)
    check(
        path.is_dir(),
        f"--from-peft {directory} is not a directory: pass one that holds {CONFIG} and {TENSORS}",
    )
    with about(f"--from-peft {directory}"):
        return _open(path, weights, base)


def check_config(config: JsonObject) -> None:
    """Raise ValueError for an unknown field, or one that changes plain LoRA."""
    harmless = {*READ, *itertools.chain(*IGNORED.values())}
    check("peft_type" in config, f"{CONFIG}: peft_type is missing: pass a directory of peft's LoRA")
    for name, value in config.items():
        if name in ONLY:
            built = ONLY[name]
            check(
                any(value is one or (isinstance(one, str) and value == one) for one in built),
                f"{CONFIG}: {name} is {value!r:.80}, and only {built[0]!r} is supported",
            )
        else:
            check(
                name in harmless or is_off(value),
                f"{CONFIG}: {name} is {value!r:.80}, with which the adapter is not plain LoRA: "
                "merge it with peft (merge_and_unload), and pass --from-hf the merged model",
            )


def _open(path: Path, weights: Weights, base: JsonObject) -> Weights:
    config = read_json(path / CONFIG)
    model = weights.model
    check_config(config)
    for name, kind in (("r", int), ("lora_alpha", (int, float)), ("lora_dropout", (int, float))):
        value = config.get(name, 0)
        check(
            isinstance(value, kind) and not isinstance(value, bool),
            f"{CONFIG}: {name} is {value!r:.60}, not a number",
        )
    check((path / TENSORS).is_file(), f"{path / TENSORS} is missing")
    files = TensorDirectory(path, header(path / TENSORS))
    rows = [*peft_matrices(weights)]
    there = [row for row in rows if _key(row.module, "A") in files.tensors]
    adapted = str(config.get("target_parameters") or "")
    fused = _of_experts(
        rows, [name for name, parameter in PARAMETERS.items() if f"experts.{parameter}'" in adapted]
    )
    known = {
        _key(module, kind)
        for module in (*(row.module for row in rows), *fused.values())
        for kind in "AB"
    }
    extra = next((name for name in files.tensors if name not in known), None)
    check(extra is None, f"{TENSORS} holds {extra}, which this model has no adapter for")
    several = _adapters_of_gates(config, any(row.target in MATRICES[FC1] for row in there))
    of_gates = MATRICES[FC1] if several == 2 else (FC1,)
    of_fused = [name for ours in fused for name in (of_gates if FC1 in ours else MATRICES[FC2])]
    targets = list(dict.fromkeys([*(row.target for row in there), *of_fused]))
    check(bool(targets), f"{TENSORS} holds no adapter of this model")
    lora = LoraConfig(
        lora_rank=config.get("r"),
        lora_alpha=float(config.get("lora_alpha", 8)),
        lora_target=",".join(targets),
        lora_dropout=float(config.get("lora_dropout", 0.0)),
        lora_use_rslora=bool(config.get("use_rslora")),
    )
    lora.check_model(model)
    wanted = adapter_shapes(model, lora)

    def stored(module: str, kind: str) -> tuple[str, Tensor]:
        name = _key(module, kind)
        check(name in files.tensors, f"{TENSORS} does not hold {name}")
        return name, files.read(name)

    def read(name: str) -> Tensor:
        place, adapter, _ = name.rsplit(".", 2)
        kind = adapter.removeprefix("lora_")
        ours = f"{place}.weight"
        tensor = torch.zeros(wanted[name])
        if ours in fused:
            _fill_fused(tensor, *stored(fused[ours], kind), kind, lora)
        for row in (row for row in there if row.ours == ours):
            number = lora.parts(place.split(".")[-1], model).index(row.target)
            of_expert = kind == "A" and row.expert is not None
            target = tensor[row.expert] if of_expert else tensor
            if kind == "A":
                target = target[number]
            _fill(target, *stored(row.module, kind), kind, row.mapping, model)
        return tensor

    adapters = Adapters(lora, model, read, base)
    for ours in dict.fromkeys(
        (*fused, *(row.ours for row in there))
    ):  # what does not fit is told before anything is written
        adapters.of(ours)
    return adapters.added_to(weights)


def _adapters_of_gates(config: JsonObject, apart: bool) -> int:
    """Return the adapters for expert gates and values: 2 if theirs has twice the rank.

    apart: other matrices in the file have two
    """
    given = {name: config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    built = _patterns({"r": 8, "lora_alpha": 8, "use_rslora": False, **config}, 2)
    check(
        given in (dict.fromkeys(given, {}), built),
        f"{CONFIG}: rank_pattern is {given['rank_pattern']!r:.80} and alpha_pattern "
        f"{given['alpha_pattern']!r:.80}, and only one rank is supported, or {built!r}",
    )
    return 2 if apart or given["rank_pattern"] else 1


def _fill_fused(ours: Tensor, name: str, theirs: Tensor, kind: str, lora: LoraConfig) -> None:
    """Copy their A (e R, in) or B (out, R e) into ours, A (e, p, r, in) or B (e, out or 2, f, r)."""
    experts = len(ours)
    r = lora.rank
    shape = ours.shape
    rank = theirs.shape[kind == "B"] // experts
    expected = [experts * rank, shape[-1]] if kind == "A" else [shape[1:-1].numel(), rank * experts]
    check(
        rank in (r, 2 * r) and list(theirs.shape) == expected,
        f"{name} has shape {list(theirs.shape)}, and this model needs "
        f"{[experts * r, shape[-1]] if kind == 'A' else [expected[0], r * experts]}",
    )
    if kind == "A":
        ours.copy_(
            theirs.view(experts, -1, r, shape[-1])
        )  # both parts of ours have the A that theirs has once
        return
    matrices = theirs.view(-1, rank, experts).permute(2, 0, 1).reshape(*shape[:-1], rank)
    if rank > r:
        halves = matrices.unflatten(-1, (2, r))  # (e, 2, f, 2, r)
        check(
            not halves[:, 0, :, 1].any() and not halves[:, 1, :, 0].any(),
            f"{name}: the gate reads the adapter of what it "
            f"multiplies, and only two adapters of rank {r}, or one of rank {rank}, are supported",
        )
        matrices = torch.stack((halves[:, 0, :, 0], halves[:, 1, :, 1]), 1)
    ours.copy_(matrices)


def _fill(
    ours: Tensor, name: str, theirs: Tensor, kind: str, mapping: TensorMapping, model: ModelConfig
) -> None:
    """Copy their A, or their B into the rows of ours that are theirs."""
    views = [ours]
    shape = tuple(ours.shape)
    fan_in_fan_out = kind == "B" and mapping.arranged in FAN_IN_FAN_OUT
    if kind == "B":
        views, shape = mapping.arranged(ours, mapping.number, model)
        shape = shape[::-1] if fan_in_fan_out else shape
    check(
        tuple(theirs.shape) == shape,
        f"{name} has shape {list(theirs.shape)}, and this model needs {list(shape)}",
    )
    copy_flat(theirs.t() if fan_in_fan_out else theirs, views)
