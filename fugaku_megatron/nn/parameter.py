"""Parameters that know their place in the global model before they have memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..comm.base import Comm


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """Place and meaning of a parameter in the whole model; `parameter.spec`.

    name: global name.
    shape: global shape.
    offset: first element of this rank's slice in each dimension.
    partition_dim: dimension that tensor-parallel ranks shard; None for a replica.
    init_std: standard deviation of normal initial values; None: all are `init_fill`.
    init_name: name whose random stream sets the initial values (the tied head starts like the embedding).
    owned: this rank saves it.
    counted: this rank's copy counts in norms.
    sequence_parallel: every tensor-parallel rank has the parameter and a gradient from its shard of the sequence, or from its
        own heads; the gradients are summed over these ranks (as Megatron's attribute).
    expert: parameter of divided experts; ranks with the same experts reduce its gradient.
    balances: bias on the scores that choose experts. Its gradient is each expert's tokens beyond the mean, and the optimizer
        uses only the sign.
    frozen: not trained, as under adapters.
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

    @property
    def decayed(self) -> bool:
        """True if weight decay applies: for matrices, not for biases and norms."""
        return len(self.shape) > 1 and not self.name.endswith(".bias")

    @property
    def orthogonal(self) -> bool:
        """True if Muon orthogonalizes the updates: for all matrices but the weights of embeddings and logits."""
        return self.decayed and not self.name.startswith(("embedding.", "output_layer."))

    @property
    def decoupled(self) -> bool:
        """True if --decoupled-lr applies: for the word embedding and the logits' weight."""
        return self.name in ("embedding.word_embeddings.weight", "output_layer.weight")


def make_parameter(
    name: str,
    shape: tuple[int, ...],
    tp: Comm | None = None,
    partition_dim: int | None = None,
    std: float | None = None,
    fill: float = 0.0,
    init_name: str | None = None,
    sequence_parallel: bool = False,
    experts: Comm | None = None,
    balances: bool = False,
    frozen: bool = False,
) -> nn.Parameter:
    """This rank's slice of the global tensor `name`, on the meta device, with its `spec`.

    `shape` is the global shape in parentheses, such as (f, h); `partition_dim` is split evenly over `tp`. Initial values:
    normal(0, std), or `fill` where std is None. sequence_parallel: layers between the matmuls work on parts of the sequence.
    experts: ranks among which the first dimension, that of experts, is divided.
    balances, frozen: see `ParameterSpec`.
    """
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
    # What every tensor-parallel rank holds belongs to the first one: it saves it. Norms count that once, and no tied copy.
    owned = partition_dim is not None or tp is None or tp.rank == 0
    parameter = nn.Parameter(torch.empty(local, device="meta"))
    parameter.spec = ParameterSpec(  # type: ignore[attr-defined]  # torch's class does not know it
        name=name,
        shape=tuple(shape),
        offset=tuple(offset),
        partition_dim=partition_dim,
        init_std=std,
        init_fill=fill,
        init_name=init_name or name,
        owned=owned,
        counted=owned and init_name is None and not balances,
        sequence_parallel=sequence_parallel and partition_dim is None,
        expert=experts is not None,
        balances=balances,
        frozen=frozen,
    )
    return parameter


def spec_of(parameter: torch.Tensor) -> ParameterSpec:
    """Return the spec of a parameter made by `make_parameter`."""
    return parameter.spec  # type: ignore[attr-defined]


PARAMETER_DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}  # by PrecisionConfig.name
