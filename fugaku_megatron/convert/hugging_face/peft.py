"""Read and write adapters in peft's format, adapter_config.json and adapter_model.safetensors,
without peft.

Our shared A is written for each matrix. transformers 5 has a layer's experts in two parameters, (e,
2 f, h) and (e, h, f): expert rank R gives A (e R, in) and B (out, R e), columns rank-major; gate
and value adapters become one with twice the rank. transformers 4's files, with a linear layer per
matrix and expert, are only read.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...checkpoint.tensor_files import write_tensors
from ...config.fields import check, is_off
from ...config.layer_kinds import FC1, FC2, IN_PROJ
from ...config.lora import MATRICES, LoraConfig
from ...config.model import ModelConfig
from ...nn.adapters import expanded, row_mask
from ...text.named_files import JsonObject, about
from ..weights import Adapters, Weights, adapter_shapes, layer_of, linear_of, shapes
from .architectures import Architecture
from .config_json import architecture_of, carried_config, has_text_config
from .conversion import TOWER
from .tensor_directory import ADAPTER_CONFIG as CONFIG
from .tensor_directory import TensorDirectory, header, read_json, write_json
from .tensor_mapping import TensorMapping, copy_flat, in_their_shape, tensor_mappings
from .tensor_views import INPUTS_FIRST

TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."
RANK = 8  # of a config without r
# The fields of adapter_config.json. A value that is off, such as null or {}, is plain LoRA for each.
# Those that are read, with their defaults.
READ: JsonObject = {
    "r": RANK,
    "lora_alpha": 8,
    "lora_dropout": 0.0,
    "use_rslora": False,
    "target_modules": None,
    "target_parameters": None,
    "rank_pattern": None,
    "alpha_pattern": None,
}
IGNORED = {
    reason: tuple(names.split())
    for reason, names in {
        "the file's tensors say which matrices have adapters": (
            "exclude_modules layers_to_transform layers_pattern"
        ),
        "it describes the file or the program that wrote it": (
            "auto_mapping base_model_name_or_path inference_mode peft_version revision runtime_config "
            "task_type"
        ),
        "A and B are stored alike for both orders of the base weight": "fan_in_fan_out",
        "it says how A and B began, next to unchanged base weights": "eva_config",
        "it has no effect without a field that is refused": (
            "ensure_weight_tying megatron_core qalora_group_size"
        ),
    }.items()
}
# The values with which peft computes plain LoRA; a field that stands nowhere here must be off.
ONLY: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    # Others, such as pissa, olora, corda, loftq and lora_ga, subtract the adapters from the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
PATTERN = r".*\.gate_up_proj"  # of the parameter with all gates and values
# Prefixes of a text model in a model with images, in transformers 5 and 4.
WRAPPED = ("model.language_model.", "language_model.model.")
# A key of rank_pattern or alpha_pattern: a module's name or the end of one, also written as peft does.
_PATTERN = re.compile(r"(\^|\.\*\\?\.)?((?:[\w.]|\\\.)+)\$?")


@dataclass(frozen=True)
class PeftMatrix:
    """Matrix in their model.

    name: of their linear module, or of the parameter that stacks all experts of a layer
    ours: our weight that contains it
    target: its name in --lora-target
    expert: its number, in transformers 4's files
    stacked: all experts are in a parameter
    """

    name: str
    ours: str
    target: str
    mapping: TensorMapping
    expert: int | None = None
    stacked: bool = False

    @property
    def inputs_first(self) -> bool:
        return self.mapping.arranged in INPUTS_FIRST


def _architecture(weights: Weights, prefix: str | None = None) -> Architecture:
    """Return the model's row. prefix: of their names, in place of the row's"""
    row = architecture_of(weights.model, carried_config(weights.carried))
    return row if prefix is None else replace(row, prefix=prefix)


def peft_matrices(architecture: Architecture, model: ModelConfig) -> Iterator[PeftMatrix]:
    """Yield all matrices with possible adapters; expert matrices stacked and also one by one."""
    table = tensor_mappings(architecture, model)
    several = {mapping.ours for mapping in table.values() if mapping.number}
    for theirs, mapping in (
        table | tensor_mappings(architecture.with_stacked_experts, model)
    ).items():
        ours = mapping.ours
        linear = linear_of(ours)
        if linear not in MATRICES or not ours.endswith(".weight") or layer_of(ours) is None:
            continue
        name = theirs.removesuffix(".weight")
        of_experts = ".mlp.experts." in ours
        stacked = of_experts and name == theirs
        expert = None
        number = mapping.number
        if of_experts and not stacked:
            expert, number = divmod(number, len(MATRICES[linear]))
        target = linear
        last = name.rpartition(".")[2]
        if linear == FC1 and not model.gated:
            target = FC1
        elif last in MATRICES[linear]:
            target = last
        elif len(MATRICES[linear]) == 1 or ours in several and not stacked:
            target = MATRICES[linear][number]
        yield PeftMatrix(name, ours, target, mapping, expert, stacked)


def _modules(rows: Sequence[PeftMatrix]) -> dict[str, str]:
    """Return adapted matrices' modules in peft's files, by their names.

    A module is wrapped once for each of its adapted parameters, the first of them innermost.
    """
    modules = {}
    wrappers: Counter[str] = Counter()
    for row in reversed(rows):
        modules[row.name] = row.name
        if row.stacked:
            module = row.name.rpartition(".")[0]
            modules[row.name] = module + ".base_layer" * wrappers[module]
            wrappers[module] += 1
    return modules


def _key(module: str, kind: str) -> str:
    return f"{PREFIX}{module}.lora_{kind}.weight"


def save_peft(weights: Weights, directory: Path) -> None:
    """Write the adapters. Raise ValueError for an architecture that fuses matrices with several A."""
    adapters = weights.adapters
    model = weights.model
    if adapters is None:
        raise ValueError(
            "--to-peft writes adapters, and --load holds a whole model: pass a checkpoint of --lora-rank"
        )
    carried = carried_config(weights.carried)
    wrapped = has_text_config(carried)
    architecture = _architecture(weights, WRAPPED[0] if wrapped else None)
    tensors: dict[str, Tensor] = {}
    targets = set()
    parameters = set()
    fan_in_fan_out = False
    rows = [
        row
        for row in peft_matrices(architecture, model)
        if row.expert is None and (not row.stacked or adapters.parts(row.ours))
    ]
    modules = _modules(rows)
    _check_matrices(adapters, rows)
    for row in rows:
        names = adapters.parts(row.ours)
        linear = linear_of(row.ours)
        check(
            row.stacked or row.target != linear or names in ((), (linear,)),
            f"--to-peft: {row.name} is one matrix, and has adapters "
            f"{', '.join(names)}: train them with --lora-target {linear}",
        )
        if not row.stacked and row.target not in names and linear not in names:
            continue
        for kind, tensor in zip("AB", _pair(adapters, row)):
            tensors[_key(modules[row.name], kind)] = tensor
        # In whole, because towers have modules of the same names.
        inside = row.name if wrapped else row.name.partition(f".{layer_of(row.ours)}.")[2]
        if row.stacked:
            parameters.add(inside)
        # peft takes a module of this name for an expert's
        elif model.num_experts and linear in (FC1, FC2):
            parameters.add(f"{inside}.weight")
        else:
            targets.add(row.name if wrapped else row.name.rpartition(".")[2])
            fan_in_fan_out = fan_in_fan_out or row.inputs_first
    write_tensors(directory / TENSORS, tensors)
    config = _config(
        adapters.lora, sorted(targets), fan_in_fan_out, base=carried.get("_name_or_path")
    )
    if parameters:
        config |= {"target_parameters": sorted(parameters)} | _patterns(
            config, len(adapters.lora.parts(FC1, model))
        )
    write_json(directory / CONFIG, config)


def _check_matrices(adapters: Adapters, rows: Sequence[PeftMatrix]) -> None:
    """Raise ValueError for an adapter of a matrix that the architecture stores otherwise."""
    known = {row.target for row in rows if linear_of(row.ours) == IN_PROJ}
    names = adapters.lora.parts(IN_PROJ, adapters.model) if known else ()
    other = [name for name in names if name not in {*known, IN_PROJ}]
    check(
        not other,
        f"--to-peft: {''.join(other[:1])} is no matrix of this model's files, which have "
        f"{', '.join(sorted(known - {IN_PROJ}))}: train those with --lora-target, or {IN_PROJ}",
    )


def _pair(adapters: Adapters, row: PeftMatrix) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of a matrix, or A (e p r, in) and B (out, p r e) of all experts."""
    a, b = adapters.of(row.ours)
    parts = adapters.parts(row.ours)
    if row.stacked:
        mask = row_mask(linear_of(row.ours), parts, a, b, adapters.model)
        b = expanded(b, mask, 1.0).view(*b.shape[:-1], -1)
        a = a.flatten(0, 2)
    else:
        a = a[parts.index(row.target) if row.target in parts else 0]
    own = in_their_shape(b, row.mapping, adapters.model)  # with B's columns for the inputs
    if row.inputs_first:
        own = own.mT
    if row.stacked:
        own = own.permute(1, 2, 0).flatten(1)
    return a.contiguous(), own.contiguous()


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
        config = read_json(path / CONFIG)
        model = weights.model
        check_config(config)
        config = {**READ, **config}
        for name in ("lora_alpha", "lora_dropout"):
            check(
                _is_number(config[name]), f"{CONFIG}: {name} is {config[name]!r:.60}, not a number"
            )
        rslora = config["use_rslora"]
        check(
            rslora is None or isinstance(rslora, bool),
            f"{CONFIG}: use_rslora is {rslora!r:.60}, not true or false",
        )
        check((path / TENSORS).is_file(), f"{path / TENSORS} is missing")
        files = TensorDirectory(path, header(path / TENSORS))
        read = _Reader(config, files, weights)
        adapters = Adapters(read.lora, model, read, base)
        for ours in dict.fromkeys(row.ours for row in read.rows):
            adapters.of(ours)  # raises before anything is written
        return adapters.added_to(replace(weights, notes=(*weights.notes, *read.notes)))


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


class _Reader:
    """Reader that builds our adapters from peft's files.

    Every adapter has the rank of the largest, with zeros behind its own.

    rows: matrices with an adapter
    """

    def __init__(self, config: JsonObject, files: TensorDirectory, weights: Weights) -> None:
        self.files = files
        self.model = weights.model
        self.weight_shapes = shapes(weights.model)
        prefix = next(
            (p for p in WRAPPED if any(PREFIX + p in name for name in files.tensors)), None
        )
        architecture = _architecture(weights, prefix)
        parameters = _names(config, "target_parameters")
        matrices = [
            row
            for row in peft_matrices(architecture, self.model)
            if not row.stacked or _named(row.name, parameters)
        ]
        self.modules = _modules(matrices)
        self.rows = [
            row
            for row in matrices
            if row.stacked or any(key in files.tensors for key in self._keys(row))
        ]
        self.notes = self._check_names(architecture)
        self._check_targets(config, matrices)
        self.ranks, self.scales = _ranks_and_scales(config, self.rows)
        self.divided = {row.name for row in self.rows if self._is_divided(row, config)}
        self.lora = self._lora(config)
        self.lora.check_model(self.model)
        self.adapter_shapes = adapter_shapes(self.model, self.lora)

    def _keys(self, row: PeftMatrix) -> tuple[str, str]:
        module = self.modules[row.name]
        return _key(module, "A"), _key(module, "B")

    def _check_names(self, architecture: Architecture) -> tuple[str, ...]:
        """Raise ValueError for half an adapter and for unknown ones; return notes about those left out."""
        left_out = 0
        known = {key for row in self.rows for key in self._keys(row)}
        for name in self.files.tensors:
            if TOWER.fullmatch(name.removeprefix(PREFIX)):
                left_out += 1
            elif name not in known:
                raise ValueError(_unknown(name, architecture, self.model))
        lacking = next((name for name in known if name not in self.files.tensors), None)
        check(lacking is None, f"{TENSORS} does not hold {lacking}")
        check(bool(self.rows), f"{TENSORS} holds no adapter of this model")
        note = f"{left_out} adapter tensors of images are left out: the text model is converted"
        return (note,) if left_out else ()

    def _check_targets(self, config: JsonObject, matrices: Sequence[PeftMatrix]) -> None:
        """Raise ValueError for a target without an adapter in the file.

        matrices: of the model; a module that the model lacks has no adapter in peft either
        """
        for field, others in (("target_modules", matrices), ("target_parameters", ())):
            for target in _names(config, field):
                ending = target.removesuffix(".weight")
                check(
                    any(_named(row.name, [ending]) for row in self.rows)
                    or bool(others)
                    and not any(_named(row.name, [ending]) for row in others),
                    f"{CONFIG}: {field} has {target!r:.80}, of which {TENSORS} holds no adapter: "
                    "copy the directory again, or remove the name",
                )

    def _is_divided(self, row: PeftMatrix, config: JsonObject) -> bool:
        """Return True if gates and values of experts have adapters of their own, with half the rank each."""
        if not row.stacked or row.target != FC1 or self.ranks[row.name] != 2 * config["r"]:
            return False
        halves = self._b(row).unflatten(-1, (2, -1))  # (e, 2, f, 2, r)
        return not halves[:, 0, :, 1].any() and not halves[:, 1, :, 0].any()

    def _lora(self, config: JsonObject) -> LoraConfig:
        of_gates = any(row.target in MATRICES[FC1] for row in self.rows) or bool(self.divided)
        targets: dict[str, None] = {}
        for row in self.rows:
            both = row.target == FC1 and of_gates
            targets |= dict.fromkeys(MATRICES[FC1] if both else (row.target,))
        rank = max(rank // (1 + (name in self.divided)) for name, rank in self.ranks.items())
        rslora = bool(config["use_rslora"])
        return LoraConfig(
            lora_rank=rank,
            lora_alpha=float(config["lora_alpha"])
            * (rank / config["r"]) ** (0.5 if rslora else 1.0),
            lora_target=",".join(targets),
            lora_dropout=float(config["lora_dropout"]),
            lora_use_rslora=rslora,
        )

    def _read(self, row: PeftMatrix, kind: str, shape: Sequence[int]) -> Tensor:
        name = _key(self.modules[row.name], kind)
        theirs = self.files.read(name)
        check(
            list(theirs.shape) == [*shape],
            f"{name} has shape {list(theirs.shape)}, and this model needs {[*shape]} "
            f"with the rank {self.ranks[row.name]} of {CONFIG}",
        )
        return theirs

    def _b(self, row: PeftMatrix) -> Tensor:
        """Return B in our shape, with zeros for other matrices' rows."""
        rank = self.ranks[row.name]
        ours = torch.zeros(*self.weight_shapes[row.ours][:-1], rank)
        views, shape = row.mapping.arranged(ours, row.mapping.number, self.model)
        *experts, rows, columns = shape[:-2] + shape[:-3:-1] if row.inputs_first else shape
        theirs = self._read(row, "B", (rows, columns * math.prod(experts)))
        if row.stacked:
            theirs = theirs.view(rows, rank, -1).permute(2, 0, 1)
        copy_flat(theirs.mT if row.inputs_first else theirs, views)
        return ours * self.scales[row.name]

    def __call__(self, name: str) -> Tensor:
        place, adapter, _ = name.rsplit(".", 2)
        tensor = torch.zeros(self.adapter_shapes[name])
        for row in self.rows:
            if row.ours == f"{place}.weight":
                fill = self._fill_a if adapter == "lora_A" else self._fill_b
                fill(row, tensor)
        return tensor

    def _fill_a(self, row: PeftMatrix, ours: Tensor) -> None:
        """Copy their A (r, in), or (e r, in) of all experts, into ours (p, r, in) or (e, p, r, in)."""
        rank = self.ranks[row.name]
        experts = len(ours) if row.stacked else 1
        theirs = self._read(row, "A", (experts * rank, ours.shape[-1]))
        if row.stacked:
            parts = 2 if row.name in self.divided else 1
            theirs = theirs.view(experts, parts, rank // parts, -1)
            ours[:, :, : theirs.shape[2]] = theirs
            return
        own = ours if row.expert is None else ours[row.expert]
        number = self.lora.parts(linear_of(row.ours), self.model).index(row.target)
        own[number, :rank] = theirs

    def _fill_b(self, row: PeftMatrix, ours: Tensor) -> None:
        b = self._b(row)
        if row.name in self.divided:
            halves = b.unflatten(-1, (2, -1))
            b = torch.stack((halves[:, 0, :, 0], halves[:, 1, :, 1]), 1)
        ours[..., : b.shape[-1]] += b


def _names(config: JsonObject, field: str) -> list[str]:
    """Return the names in a field, none for a regular expression or "all-linear" in target_modules."""
    names = config[field] or []
    if field == "target_modules" and isinstance(names, str):
        return []
    check(
        isinstance(names, list) and all(isinstance(name, str) for name in names),
        f"{CONFIG}: {field} is {names!r:.80}, not a list of names",
    )
    return list(names)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _named(name: str, targets: Iterable[object]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _unknown(name: str, architecture: Architecture, model: ModelConfig) -> str:
    """Return the reason for refusing a tensor."""
    module = name.removeprefix(PREFIX).partition(".lora_")[0]
    table = tensor_mappings(architecture, model) | tensor_mappings(
        architecture.with_stacked_experts, model
    )
    if mapping := table.get(f"{module}.weight"):
        return (
            f"{TENSORS} holds {name}, and adapters of {linear_of(mapping.ours)} are not supported: "
            "merge it with peft (merge_and_unload), and pass --from-hf the merged model"
        )
    return f"{TENSORS} holds {name}, which this model has no adapter for"


def _ranks_and_scales(
    config: JsonObject, rows: Sequence[PeftMatrix]
) -> tuple[dict[str, int], dict[str, float]]:
    """Return ranks and factors of B x A that differ from r and lora_alpha, by matrix."""
    r = config["r"]
    alpha = config["lora_alpha"]
    ranks = _by_pattern(config, "rank_pattern", rows, r)
    alphas = _by_pattern(config, "alpha_pattern", rows, alpha)
    for field, rank in (("r", r), *(("rank_pattern", rank) for rank in ranks.values())):
        check(
            isinstance(rank, int) and _is_number(rank) and rank > 0,
            f"{CONFIG}: {field} is {rank!r:.60}, not a number above 0",
        )
    check(
        alpha != 0 or not any(alphas.values()),
        f"{CONFIG}: lora_alpha is 0, and alpha_pattern has other values: merge it with peft "
        "(merge_and_unload), and pass --from-hf the merged model",
    )
    power = 0.5 if config["use_rslora"] else 1.0
    scales = {
        name: alphas[name] / ranks[name] ** power / (alpha / r**power) if alpha else 1.0
        for name in ranks
    }
    return ranks, scales


def _by_pattern(
    config: JsonObject, field: str, rows: Sequence[PeftMatrix], default: float
) -> dict[str, Any]:
    """Return the value of the first matching pattern, or the default, by matrix."""
    patterns = config[field] or {}
    check(isinstance(patterns, dict), f"{CONFIG}: {field} is {patterns!r:.80}, not an object")
    values: dict[str, Any] = {}
    for pattern, value in patterns.items():
        match = _PATTERN.fullmatch(pattern)
        if match is None:
            raise ValueError(
                f"{CONFIG}: {field} has {pattern!r:.80}: write the name of a module, or its end"
            )
        check(
            _is_number(value),
            f"{CONFIG}: {field} has {value!r:.60} for {pattern!r:.80}, not a number",
        )
        ending = match[2].replace("\\.", ".")
        found = [
            row.name
            for row in rows
            if (row.name == ending if match[1] == "^" else _named(row.name, [ending]))
        ]
        check(
            bool(found),
            f"{CONFIG}: {field} has {pattern!r:.80}, which names no adapter in {TENSORS}: remove it",
        )
        for name in found:
            values.setdefault(name, value)
    return {row.name: values.get(row.name, default) for row in rows}
