"""Weights under this program's names and shapes, from any format, one tensor at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.base import SoloComm
from ..comm.grid import Grid
from ..config.fields import check
from ..config.lora import LoraConfig
from ..config.model import ModelConfig
from ..config.precision import PrecisionConfig
from ..config.run_config import RunConfig
from ..config.training import BatchConfig
from ..nn.adapters import merged, row_mask
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.parameter import ParameterSpec, parameters_of

Shapes = dict[str, tuple[int, ...]]  # by global name, whole tensors
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NO_ADAPTERS = LoraConfig()
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_MODULE = re.compile(r"mtp\.layers\.(\d+)\.(transformer_layer\.)?")


@dataclass(frozen=True)
class Adapters:
    """A model's adapters (`nn.adapters`).

    read: returns an FP32 tensor by name, any shape
    base: as in a checkpoint
    """

    lora: LoraConfig
    model: ModelConfig
    read: Callable[[str], Tensor]
    base: Mapping[str, Any] = field(default_factory=dict)

    def parts(self, name: str) -> tuple[str, ...]:
        return self.lora.parts(linear_of(name), self.model) if name.endswith(".weight") else ()

    def of(self, name: str) -> tuple[Tensor, Tensor]:
        """Return A (p, r, in), for experts (e, p, r, in), and B with the weight's rows and r
        columns.
        """
        place = name.removesuffix(".weight")
        return self.read(f"{place}.lora_A.weight"), self.read(f"{place}.lora_B.weight")

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight, any shape, plus its adapters' product."""
        parts = self.parts(name)
        if not parts:
            return weight
        a, b = self.of(name)
        mask = row_mask(linear_of(name), parts, a, b, self.model)
        return merged(weight, a, b, mask, self.lora.scale)

    def added_to(self, weights: Weights) -> Weights:
        return replace(
            weights, read=lambda name: self.merged(name, weights.read(name)), adapters=self
        )


@dataclass(frozen=True)
class Weights:
    """Source for a conversion.

    dtypes: by global name, in the model's order
    read: returns a whole tensor by name, without vocabulary padding
    carried: directory with other files that belong to the model, such as Hugging Face's tokenizer
    config: the checkpoint's flags, by group
    adapters: already merged into `read`
    notes: parts of the source that are left out
    """

    model: ModelConfig
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    carried: Path | None = None
    config: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    adapters: Adapters | None = None
    notes: tuple[str, ...] = ()

    @property
    def precision(self) -> PrecisionConfig:
        """Precision for a run: FP32 only if all weights are."""
        for name, dtype in DTYPES.items():
            if name != "fp32" and dtype in self.dtypes.values():
                return PrecisionConfig(**{name: True})
        return PrecisionConfig()

    def cast(self, dtype: torch.dtype | None) -> Weights:
        if dtype is None:
            return self
        return replace(
            self,
            dtypes=dict.fromkeys(self.dtypes, dtype),
            read=lambda name: self.read(name).to(dtype),
        )

    def without_predictions(self) -> Weights:
        """Return the weights without MTP modules, and a note about the modules."""
        if not self.model.predictions:
            return self
        note = f"the modules of --mtp-num-layers {self.model.mtp_num_layers} are left out"
        return replace(
            self,
            model=replace(self.model, mtp_num_layers=None),
            dtypes={name: dtype for name, dtype in self.dtypes.items() if not predicts(name)},
            notes=(*self.notes, note),
        )

    def like(self) -> dict[str, Tensor]:
        return {
            name: torch.empty(shape, dtype=self.dtypes[name], device="meta")
            for name, shape in shapes(self.model).items()
        }


def shapes(model: ModelConfig) -> Shapes:
    """Return global name -> shape for every weight in order, without vocabulary padding."""
    return {name: spec.shape for name, spec in specs(model).items()}


def specs(model: ModelConfig, lora: LoraConfig = NO_ADAPTERS) -> dict[str, ParameterSpec]:
    """Return global name -> spec for every weight and adapter, as `shapes`."""
    run = RunConfig(
        model=replace(model, make_vocab_size_divisible_by=1),
        batch=BatchConfig(micro_batch_size=1),
        lora=lora,
    )
    stage = Stage(run, Grid(1).groups(SoloComm()), Ops.build())
    return {parameter.spec.name: parameter.spec for parameter in parameters_of(stage)}


def adapter_shapes(model: ModelConfig, lora: LoraConfig) -> Shapes:
    return {name: spec.shape for name, spec in specs(model, lora).items() if not spec.frozen}


def check_elements(path: Path, spec: ParameterSpec, found: int) -> None:
    """Raise ValueError for another number of elements; a vocabulary may be padded."""
    needed = torch.Size(spec.shape).numel()
    check(
        found == needed or spec.name in VOCABULARY and found > needed,
        f"{path}: {spec.name} has {found} elements, and its shape {list(spec.shape)} has {needed}",
    )


def check_rest(path: Path, rest: set[str]) -> None:
    check(
        not rest,
        f"{path} holds {len(rest)} tensors that the block does not have, such as {sorted(rest)[:1]}",
    )


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def as_layer(name: str, layers: int) -> str:
    """Return the name of an MTP module's tensor in a layer behind the others, and other names as they are."""
    return _MODULE.sub(lambda module: f"decoder.layers.{layers + int(module[1])}.", name)


def predicts(name: str) -> bool:
    """Return True for a tensor of an MTP module."""
    return name.startswith("mtp.")


def linear_of(name: str) -> str:
    return name.split(".")[-2]


def at_layer(name: str, layer: int | str) -> str:
    return _LAYER.sub(f"decoder.layers.{layer}.", name)


def without_layer(name: str) -> str:
    return _LAYER.sub("decoder.layers.", name)


def place_of(name: str) -> tuple[str, str]:
    """Return (place with {} for the layer, "weight" or "bias") for a global name."""
    place, kind = at_layer(name, "{}").rsplit(".", 1)
    return place, kind
