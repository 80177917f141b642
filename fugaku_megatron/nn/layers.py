"""Megatron's layers: column- and row-parallel linear, vocab-parallel embedding, learned positions, layer norm.

Parameters are born on the meta device with their place in the global tensor (`parameter.spec`);
`training.flat.FlatParameters` gives them memory inside one flat buffer and fills them. Left out: what a transformer block is made
of (`blocks`), stages (`model`).
Legend: s sequence, b micro-batch, h hidden. Test: pytest tests/test_layers.py
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..comm.autograd import copy_to_tensor_parallel, reduce_from_tensor_parallel
from ..comm.base import Comm
from ..run.config import ModelConfig
from .ops import DropoutKey, Ops
from .parameter import make_parameter

# Dropout sites of a layer. A mask's stream is layer * len(SITES) + site; the embedding is layer 0 and layers count from 1.
SITES = ("residual_1", "residual_2", "attention", "embedding")


@dataclass(frozen=True)
class Context:
    """What every layer of a stage is built with."""

    model: ModelConfig
    tp: Comm
    ops: Ops
    seed: int

    @property
    def output_std(self) -> float:
        """Megatron's scaled initialisation of matrices that write to the residual stream: std / sqrt(2 layers)."""
        return self.model.init_method_std / (2.0 * self.model.num_layers) ** 0.5


def dropout_stream(layer: int, site: str) -> int:
    """The random stream of a dropout site."""
    return layer * len(SITES) + SITES.index(site)


def hidden_dropout_key(seed: int, layer: int, site: str, first_sample: int) -> DropoutKey:
    """The mask of a whole activation (s, b, h); the same on every tensor-parallel rank."""
    return DropoutKey(seed, dropout_stream(layer, site), first_sample, sample_dim=1)


class ColumnParallelLinear(nn.Module):
    """Y = X W^T + bias with W's rows (outputs) split over tensor-parallel ranks: whole input, split output."""

    def __init__(self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True) -> None:
        super().__init__()
        self.tp, self.ops, std = context.tp, context.ops, context.model.init_method_std
        self.weight = make_parameter(f"{name}.weight", (outputs, inputs), self.tp, 0, std)
        self.bias = make_parameter(f"{name}.bias", (outputs,), self.tp, 0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, inputs) -> (s, b, outputs / tp)."""
        return self.ops.linear(copy_to_tensor_parallel(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Y = X W^T with W's columns (inputs) split over tensor-parallel ranks: split input, whole output.

    Whoever adds the residual adds the bias, so that the sum over ranks does not count it several times.
    """

    def __init__(self, name: str, inputs: int, outputs: int, context: Context, bias: bool = True) -> None:
        super().__init__()
        self.tp, self.ops = context.tp, context.ops
        self.weight = make_parameter(f"{name}.weight", (outputs, inputs), self.tp, 1, context.output_std)
        self.bias = make_parameter(f"{name}.bias", (outputs,), self.tp) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, inputs / tp) -> (s, b, outputs), without the bias."""
        return reduce_from_tensor_parallel(self.ops.linear(x, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Word embedding with the vocabulary split over tensor-parallel ranks."""

    def __init__(self, name: str, vocabulary: int, context: Context) -> None:
        super().__init__()
        self.tp, self.ops, model = context.tp, context.ops, context.model
        self.weight = make_parameter(f"{name}.weight", (vocabulary, model.hidden_size), self.tp, 0, model.init_method_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (s, b) -> (s, b, h)."""
        rows = self.ops.embedding(tokens, self.weight, self.weight.spec.offset[0])
        return reduce_from_tensor_parallel(rows, self.tp)


class PositionEmbedding(nn.Module):
    """Learned positions 0 .. s-1."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model, self.ops = context.model, context.ops
        self.weight = make_parameter(f"{name}.weight", (model.max_position_embeddings, model.hidden_size), context.tp,
                                     std=model.init_method_std)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> x + positions (s, b, h)."""
        return self.ops.add_position(x, self.weight)


class Norm(nn.Module):
    """A norm over the last dimension, replicated over tensor-parallel ranks. A subclass holds the parameters and `forward`."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        self.ops, self.epsilon = context.ops, context.model.layernorm_epsilon

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        raise NotImplementedError

    def add_and_normalize(self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float,
                          key: DropoutKey) -> tuple[Tensor, Tensor]:
        """(sum, norm of the sum) with sum = residual + dropout(x + bias). x and residual (s, b, h), bias (h) -> two of (s, b, h).

        A norm with a fused kernel overrides this.
        """
        total = self.ops.bias_dropout_add(x, bias, residual, p, key)
        return total, self(total)


class LayerNorm(Norm):
    """Layer norm with weight and bias."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__(name, context)
        width = (context.model.hidden_size,)
        self.weight = make_parameter(f"{name}.weight", width, context.tp, fill=1.0)
        self.bias = make_parameter(f"{name}.bias", width, context.tp)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.epsilon)

    def add_and_normalize(self, x: Tensor, bias: Tensor | None, residual: Tensor, p: float,
                          key: DropoutKey) -> tuple[Tensor, Tensor]:
        """As `Norm.add_and_normalize`, in one pass over memory; two of (s, b, h)."""
        return self.ops.bias_dropout_add_layer_norm(x, bias, residual, p, key, self.weight, self.bias, self.epsilon)
