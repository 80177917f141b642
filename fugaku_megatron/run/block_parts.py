"""What a transformer block can be made of: one row per part, with what accounting and the model need to know of it. No torch.

A new norm is one class and one row of NORMS; a new MLP one class and one row of MLPS. `ModelConfig` chooses rows by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class NormPart:
    """A norm over the hidden dimension h.

    layer: "module:class" of a subclass of `nn.layers.Norm`, imported when a stage is built. vectors: parameters of h elements each.
    statistics: FP32 numbers per row that backward needs beside the input.
    """

    layer: str
    vectors: int
    statistics: int


@dataclass(frozen=True, kw_only=True)
class MLPPart:
    """An MLP h -> f -> h.

    layer: "module:class", as in NormPart, with the interface of `nn.blocks.MLP`. activation: the record's name in accounting.
    fc1_widths: outputs of the first product in units of f (2 where a gate stands beside the value).
    """

    layer: str
    activation: str
    fc1_widths: int


NORMS = {"LayerNorm": NormPart(layer="fugaku_megatron.nn.layers:LayerNorm", vectors=2, statistics=2),
         "RMSNorm": NormPart(layer="fugaku_megatron.nn.layers:RMSNorm", vectors=1, statistics=1)}
MLPS = {"gelu": MLPPart(layer="fugaku_megatron.nn.blocks:MLP", activation="gelu", fc1_widths=1),
        "swiglu": MLPPart(layer="fugaku_megatron.nn.blocks:GatedMLP", activation="swiglu", fc1_widths=2)}


def choices(parts: dict[str, NormPart] | dict[str, MLPPart]) -> str:
    """The names of a table for an error message: "LayerNorm or RMSNorm"."""
    return " or ".join(parts)
