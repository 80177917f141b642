"""Megatron's layers: column- and row-parallel linear, vocab-parallel embedding, attention, MLP, transformer block.

Parameters are born on the meta device with their place in the global tensor; `optim.FlatParameters` gives them memory inside one
flat buffer and fills them. Left out: stages and the tied head (`model`).
Legend: s sequence, b micro-batch, h hidden, n heads of this rank, d head size. Test: pytest tests/test_layers.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..comm.autograd import copy_to_tensor_parallel, reduce_from_tensor_parallel
from ..comm.base import Comm
from ..run.config import ModelConfig
from . import ops

# Dropout sites of a layer; a mask's stream is layer * len(SITES) + site, the embedding being layer 0 and layers counting from 1.
SITES = ("residual_1", "residual_2", "attention", "embedding")


def mask_stream(layer: int, site: str) -> int:
    """The random stream of a dropout site."""
    return layer * len(SITES) + SITES.index(site)


def hidden_place(seed: int, layer: int, site: str, first_sample: int) -> ops.MaskPlace:
    """The mask of a whole activation (s, b, h); the same on every tensor-parallel rank."""
    return ops.MaskPlace(seed, mask_stream(layer, site), first_sample, sample_dim=1)


def make_parameter(name: str, shape: tuple[int, ...], tp: Comm | None = None, partition_dim: int | None = None,
                   std: float | None = None, fill: float = 0.0, init_name: str | None = None) -> nn.Parameter:
    """This rank's slice of the global tensor `name`, on the meta device.

    `shape` is global; `partition_dim` is split evenly over `tp`. Initial values: normal(0, std), or `fill` where std is None.
    `init_name` makes it start like another parameter (the tied head starts like the embedding).
    """
    local, offset = list(shape), [0] * len(shape)
    if partition_dim is not None:
        assert shape[partition_dim] % tp.size == 0, (name, shape, tp.size)
        local[partition_dim] //= tp.size
        offset[partition_dim] = tp.rank * local[partition_dim]
    parameter = nn.Parameter(torch.empty(local, device="meta"))
    parameter.global_name, parameter.global_shape, parameter.global_offset = name, tuple(shape), tuple(offset)
    parameter.partition_dim, parameter.init_std, parameter.init_fill = partition_dim, std, fill
    parameter.init_name = init_name or name
    # What every tensor-parallel rank holds belongs to the first one: it saves it. Norms count that once, and no tied copy.
    parameter.owned = partition_dim is not None or tp is None or tp.rank == 0
    parameter.counted = parameter.owned and init_name is None
    return parameter


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, replicated over tensor-parallel ranks."""

    def __init__(self, name: str, hidden_size: int, epsilon: float, tp: Comm) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = make_parameter(f"{name}.weight", (hidden_size,), tp, fill=1.0)
        self.bias = make_parameter(f"{name}.bias", (hidden_size,), tp)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> (s, b, h)."""
        return ops.layer_norm(x, self.weight, self.bias, self.epsilon)


class ColumnParallelLinear(nn.Module):
    """Y = X W^T + bias with W's rows (outputs) split over `tp`: whole input, split output."""

    def __init__(self, name: str, inputs: int, outputs: int, tp: Comm, std: float) -> None:
        super().__init__()
        self.tp = tp
        self.weight = make_parameter(f"{name}.weight", (outputs, inputs), tp, 0, std)
        self.bias = make_parameter(f"{name}.bias", (outputs,), tp, 0)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, inputs) -> (s, b, outputs / tp)."""
        return ops.linear(copy_to_tensor_parallel(x, self.tp), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Y = X W^T with W's columns (inputs) split over `tp`: split input, whole output. Whoever adds the residual adds the bias."""

    def __init__(self, name: str, inputs: int, outputs: int, tp: Comm, std: float) -> None:
        super().__init__()
        self.tp = tp
        self.weight = make_parameter(f"{name}.weight", (outputs, inputs), tp, 1, std)
        self.bias = make_parameter(f"{name}.bias", (outputs,), tp)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, inputs / tp) -> (s, b, outputs), without the bias."""
        return reduce_from_tensor_parallel(ops.linear(x, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Word embedding with the vocabulary split over `tp`."""

    def __init__(self, name: str, vocabulary: int, hidden_size: int, tp: Comm, std: float) -> None:
        super().__init__()
        self.tp = tp
        self.weight = make_parameter(f"{name}.weight", (vocabulary, hidden_size), tp, 0, std)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (s, b) -> (s, b, h)."""
        rows = ops.embedding(tokens, self.weight, self.weight.global_offset[0])
        return reduce_from_tensor_parallel(rows, self.tp)


class PositionEmbedding(nn.Module):
    """Learned positions 0 .. s-1."""

    def __init__(self, name: str, positions: int, hidden_size: int, tp: Comm, std: float) -> None:
        super().__init__()
        self.weight = make_parameter(f"{name}.weight", (positions, hidden_size), tp, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """x (s, b, h) -> x + positions."""
        return ops.add_position(x, self.weight)


class SelfAttention(nn.Module):
    """Causal self-attention with this rank's share of the heads."""

    def __init__(self, name: str, layer: int, model: ModelConfig, tp: Comm, seed: int) -> None:
        super().__init__()
        h, self.tp, self.layer, self.seed = model.hidden_size, tp, layer, seed
        self.heads, self.head_size = model.num_attention_heads, h // model.num_attention_heads
        self.dropout = model.attention_dropout
        self.linear_qkv = ColumnParallelLinear(f"{name}.linear_qkv", h, 3 * h, tp, model.init_method_std)
        self.linear_proj = RowParallelLinear(f"{name}.linear_proj", h, h, tp, output_std(model))

    def core(self, qkv: Tensor, first_sample: int) -> Tensor:
        """Attention between the two matrices: what selective recompute runs again."""
        first_head = self.tp.rank * (self.heads // self.tp.size)
        mask = ops.MaskPlace(self.seed, mask_stream(self.layer, "attention"), first_sample, sample_dim=0,
                         row0=first_head * qkv.shape[0])
        return ops.attention(qkv, self.head_size, self.dropout if self.training else 0.0, mask)

    def forward(self, x: Tensor, first_sample: int, recompute: bool) -> Tensor:
        """x (s, b, h) -> (s, b, h), without the projection's bias."""
        qkv = self.linear_qkv(x)  # (s, b, n 3 d)
        context = ops.recompute(self.core, qkv, first_sample) if recompute else self.core(qkv, first_sample)
        return self.linear_proj(context)


class MLP(nn.Module):
    """h -> ffn -> h with GELU."""

    def __init__(self, name: str, model: ModelConfig, tp: Comm) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(f"{name}.linear_fc1", model.hidden_size, model.ffn_hidden_size, tp,
                                               model.init_method_std)
        self.linear_fc2 = RowParallelLinear(f"{name}.linear_fc2", model.ffn_hidden_size, model.hidden_size, tp, output_std(model))

    def forward(self, x: Tensor, graph_only: bool = False) -> Tensor:
        """x (s, b, h) -> (s, b, h), without the second bias. graph_only: see ops.mlp."""
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        partial = ops.mlp(copy_to_tensor_parallel(x, fc1.tp), fc1.weight, fc1.bias, fc2.weight, graph_only)
        return partial if graph_only else reduce_from_tensor_parallel(partial, fc2.tp)


def output_std(model: ModelConfig) -> float:
    """Megatron's scaled init of the matrices that write to the residual stream: std / sqrt(2 layers)."""
    return model.init_method_std / (2.0 * model.num_layers) ** 0.5


class TransformerLayer(nn.Module):
    """Pre-layer-norm block. `layer` counts from 1 over the whole model."""

    def __init__(self, layer: int, model: ModelConfig, tp: Comm, seed: int) -> None:
        super().__init__()
        name = f"decoder.layers.{layer - 1}"
        self.layer, self.dropout, self.seed, h = layer, model.hidden_dropout, seed, model.hidden_size
        self.input_layernorm = LayerNorm(f"{name}.input_layernorm", h, model.layernorm_epsilon, tp)
        self.self_attention = SelfAttention(f"{name}.self_attention", layer, model, tp, seed)
        self.pre_mlp_layernorm = LayerNorm(f"{name}.pre_mlp_layernorm", h, model.layernorm_epsilon, tp)
        self.mlp = MLP(f"{name}.mlp", model, tp)

    def _place(self, site: str, first_sample: int) -> tuple[float, ops.MaskPlace]:
        return self.dropout if self.training else 0.0, hidden_place(self.seed, self.layer, site, first_sample)

    def forward(self, x: Tensor, first_sample: int, recompute_attention: bool = False, graph_only: bool = False) -> Tensor:
        """x (s, b, h) -> (s, b, h). graph_only: for backward alone; the result's values may be anything."""
        attention, norm = self.self_attention, self.pre_mlp_layernorm
        x, normed = ops.bias_dropout_add_layer_norm(  # no name for what attention returns: it is freed before the MLP
            attention(self.input_layernorm(x), first_sample, recompute_attention), attention.linear_proj.bias, x,
            *self._place("residual_1", first_sample), norm.weight, norm.bias, norm.epsilon)
        out = self.mlp(normed, graph_only)
        return ops.bias_dropout_add(out, self.mlp.linear_fc2.bias, x, *self._place("residual_2", first_sample), graph_only)
