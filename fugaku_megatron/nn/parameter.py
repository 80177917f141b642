"""Parameters that know their place in the global model before they have memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import nn


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Place and meaning of a parameter in the whole model.

    name, shape: global.
    offset: first element of this rank's slice in each dimension.
    partition_dim: dimension sharded over tensor-parallel ranks; None for a replica.
    init_std: of normal initial values; None: `init_fill`.
    log_range: initial values are logarithms of uniform numbers in this range.
    init_name: selects the random stream (a tied head starts like the embedding).
    owned: this rank saves it.
    counted: this rank's copy counts in norms.
    sequence_parallel: replica with partial gradients, from a sequence shard or own heads, summed over tensor-parallel ranks.
    expert: of divided experts; ranks with the same experts reduce its gradient.
    quantized: stored in eight bits (`q8_weight`).
    balances: bias on router scores. The optimizer uses only the sign of its gradient, tokens beyond the mean per expert.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    partition_dim: int | None
    init_std: float | None
    init_fill: float
    init_name: str
    owned: bool
    counted: bool
    log_range: tuple[float, float] | None = None
    sequence_parallel: bool = False
    expert: bool = False
    balances: bool = False
    frozen: bool = False
    quantized: bool = False

    @cached_property
    def decayed(self) -> bool:
        """True if weight decay applies: for matrices."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @cached_property
    def orthogonal(self) -> bool:
        """True if Muon orthogonalizes the updates: for matrices but embeddings, logits and convolutions."""
        outside = self.name.startswith(("embedding.", "output_layer."))
        return self.decayed and not outside and not self.name.endswith(".conv1d.weight")

    @cached_property
    def decoupled(self) -> bool:
        """True for --decoupled-lr: the word embedding and the logits' weight."""
        return self.name in ("embedding.word_embeddings.weight", "output_layer.weight")


class ModelParameter(nn.Parameter):
    """A parameter that knows its place in the whole model."""

    spec: ParameterSpec


def parameters_of(module: nn.Module) -> list[ModelParameter]:
    """Return the parameters of a module whose layers are built by `nn.layers.Context`."""
    return cast("list[ModelParameter]", [*module.parameters()])


PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by PrecisionConfig.name
