"""Parameters that know their place in the global model before they have memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ..comm.base import Comm


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Place and meaning of a parameter in the whole model; `parameter.spec`.

    name, shape: global.
    offset: first element of this rank's slice in each dimension.
    partition_dim: dimension sharded over tensor-parallel ranks; None for a replica.
    init_std: of normal initial values; None: `init_fill`.
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
    sequence_parallel: bool = False
    expert: bool = False
    balances: bool = False
    frozen: bool = False
    quantized: bool = False

    @property
    def decayed(self) -> bool:
        """True if weight decay applies: for matrices."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def orthogonal(self) -> bool:
        """True if Muon orthogonalizes the updates: for matrices but embeddings and logits."""
        return self.decayed and not self.name.startswith(("embedding.", "output_layer."))

    @property
    def decoupled(self) -> bool:
        """True for --decoupled-lr: the word embedding and the logits' weight."""
        return self.name in ("embedding.word_embeddings.weight", "output_layer.weight")


class Sharding(NamedTuple):
    """Ranks that divide a parameter.

    tp: ranks that shard `partition_dim`, or have copies if it is None.
    experts: ranks that shard the first dimension, experts.
    """

    tp: Comm | None = None
    partition_dim: int | None = None
    experts: Comm | None = None


class Init(NamedTuple):
    """Initial values: normal(0, std), or `fill` if std is None. name: random stream; None: the parameter's name."""

    std: float | None = None
    fill: float = 0.0
    name: str | None = None


ZEROS = Init()


def make_parameter(
    name: str,
    shape: tuple[int, ...],
    sharding: Sharding,
    init: Init = ZEROS,
    *,
    sequence_parallel: bool = False,
    **traits: bool,
) -> nn.Parameter:
    """Make this rank's slice of a tensor with global `shape` on the meta device, with its `spec`.

    sequence_parallel: activations between matmuls are sharded.
    traits: balances, frozen and quantized of `ParameterSpec`
    """
    tp, partition_dim, experts = sharding
    local = list(shape)
    offset = [0] * len(shape)
    if partition_dim is not None:
        assert tp is not None and shape[partition_dim] % tp.size == 0, (name, shape, tp)
        local[partition_dim] //= tp.size
        offset[partition_dim] = tp.rank * local[partition_dim]
    if experts is not None:
        assert shape[0] % experts.size == 0, (name, shape, experts)
        local[0] //= experts.size
        offset[0] = experts.rank * local[0]
    # The first tensor-parallel rank saves replicas. Norms count a replica once, and a tied copy not at all.
    owned = partition_dim is not None or tp is None or tp.rank == 0
    parameter = nn.Parameter(torch.empty(local, device="meta"))
    parameter.spec = ParameterSpec(  # type: ignore[attr-defined]  # torch's class does not know it
        name=name,
        shape=tuple(shape),
        offset=tuple(offset),
        partition_dim=partition_dim,
        init_std=init.std,
        init_fill=init.fill,
        init_name=init.name or name,
        owned=owned,
        counted=owned and init.name is None and not traits.get("balances"),
        sequence_parallel=sequence_parallel and partition_dim is None,
        expert=experts is not None,
        **traits,
    )
    return parameter


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    return parameter.spec  # type: ignore[attr-defined, no-any-return]  # as above


PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by PrecisionConfig.name
