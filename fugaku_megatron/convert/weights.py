"""A model's weights under this program's names and shapes, whatever program wrote them, read one tensor at a time.

Left out: the formats (hugging_face.py, own.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comm.grid import Grid
from ..comm.solo import SoloComm
from ..config.checks import check
from ..config.model_config import ModelConfig
from ..config.run_config import BatchConfig, RunConfig
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.parameter import ParameterSpec, spec_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Weights:
    """What a conversion reads.

    dtypes: by global name, in the model's order. read: the whole tensor of a name, its vocabulary without padding. carried: a
    directory with files that belong to the model and that nothing here reads, such as Hugging Face's tokenizer. config: by
    group, the flags of the run that wrote a checkpoint of this program.
    """

    model: ModelConfig
    dtypes: Mapping[str, torch.dtype]
    read: Callable[[str], Tensor]
    carried: Path | None = None
    config: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def precision(self) -> str:
        """What a run of these weights computes in: "fp32" only where all of them are."""
        return next((name for name, dtype in DTYPES.items() if dtype in self.dtypes.values() and name != "fp32"), "fp32")

    def cast(self, dtype: torch.dtype | None) -> Weights:
        """The same in another dtype; None: as they are."""
        if dtype is None:
            return self
        return replace(self, dtypes=dict.fromkeys(self.dtypes, dtype), read=lambda name: self.read(name).to(dtype))

    def like(self) -> dict[str, Tensor]:
        """Every weight's shape and dtype, by name: tensors of any shape on the meta device."""
        return {name: torch.empty(shape, dtype=self.dtypes[name], device="meta") for name, shape in shapes(self.model).items()}


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global name -> global shape of every weight of the model, in its order, the vocabulary without padding."""
    return {name: spec.shape for name, spec in specs(model).items()}


def specs(model: ModelConfig) -> dict[str, ParameterSpec]:
    """What every weight of the model is, by global name, in its order, the vocabulary without padding."""
    run = RunConfig(model=replace(model, make_vocab_size_divisible_by=1), batch=BatchConfig(micro_batch_size=1))
    stage = Stage(run, Grid(1, 1, 1).groups(SoloComm()), Ops.build())
    return {spec.name: spec for spec in map(spec_of, stage.parameters())}


def check_elements(path: Path, spec: ParameterSpec, found: int) -> None:
    """ValueError unless a checkpoint in `path` has as many elements of a weight as it needs; a vocabulary may be padded."""
    needed = torch.Size(spec.shape).numel()
    check(found == needed or spec.name in VOCABULARY and found > needed, f"{path}: {spec.name} has {found} elements, and its shape "
          f"{list(spec.shape)} has {needed}")


def check_rest(path: Path, rest: set[str]) -> None:
    """ValueError where tensors of a checkpoint are left that no weight is made of."""
    check(not rest, f"{path} holds {len(rest)} tensors that the block does not have, such as {sorted(rest)[:1]}")


def widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype of a tensor that is put together of several, which holds all of their values."""
    return functools.reduce(torch.promote_types, dtypes)


def layer_of(name: str) -> int | None:
    """The layer, from 0, of a weight's global name; None for the embeddings, the last norm and the head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def place_of(name: str) -> tuple[str, str]:
    """(place with {} for the layer, "weight" or "bias") of a global name: what it is in every layer."""
    place, kind = _LAYER.sub("decoder.layers.{}.", name).rsplit(".", 1)
    return place, kind
