"""The transformer block, assembled from the parts that the config names (`run.block_parts`).

Legend: s sequence, b micro-batch, h hidden, f MLP width, n heads of this rank, d head size. With sequence parallelism s is this
rank's part of the sequence where the last dimension is h, and whole elsewhere. Test: pytest tests/test_blocks.py
"""

from __future__ import annotations

import importlib
from functools import partial

from torch import Tensor, nn

from ..run.block_parts import MLPS, NORMS
from .layers import ColumnParallelLinear, Context, Norm, RowParallelLinear, dropout_stream, hidden_dropout_key
from .ops import DropoutKey, recompute
from .passes import Pass


def _layer_class(path: str) -> type[nn.Module]:
    """The class that a row of `run.block_parts` names as "module:class"."""
    module, name = path.split(":")
    return getattr(importlib.import_module(module), name)


def make_norm(name: str, context: Context) -> Norm:
    """The norm that the model's config names."""
    return _layer_class(NORMS[context.model.normalization].layer)(name, context)


class SelfAttention(nn.Module):
    """Causal self-attention with this rank's share of the heads."""

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__()
        model, self.tp, self.ops, self.seed, self.layer = context.model, context.tp, context.ops, context.seed, layer
        h, bias, self.dropout = model.hidden_size, not model.disable_bias_linear, model.attention_dropout
        self.heads, self.head_size = model.num_attention_heads, h // model.num_attention_heads
        self.linear_qkv = ColumnParallelLinear(f"{name}.linear_qkv", h, 3 * h, context, bias)
        self.linear_proj = RowParallelLinear(f"{name}.linear_proj", h, h, context, bias)

    def core(self, qkv: Tensor, at: Pass) -> Tensor:
        """Attention between the two matrices, (s, b, n 3 d) -> (s, b, n d): what selective recompute runs again."""
        first_head = self.tp.rank * (self.heads // self.tp.size)
        key = DropoutKey(self.seed, dropout_stream(self.layer, "attention"), at.first_sample, sample_dim=0,
                         row0=first_head * qkv.shape[0])
        attention = partial(self.ops.attention, head_size=self.head_size, p=self.dropout if at.training else 0.0, key=key)
        return attention(qkv) if at.rows is None else at.rows.attend(self.ops, self.layer, qkv, attention)

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        """x (s, b, h) -> (s, b, h), without the projection's bias."""
        qkv = self.linear_qkv(x)  # (s, b, n 3 d)
        context = recompute(self.core, qkv, at) if at.recompute == "selective" else self.core(qkv, at)
        return self.linear_proj(context)


class MLP(nn.Module):
    """h -> f -> h with GELU, as one operation."""

    def __init__(self, name: str, context: Context) -> None:
        super().__init__()
        model, self.context = context.model, context
        h, f, bias = model.hidden_size, model.ffn_hidden_size, not model.disable_bias_linear
        self.linear_fc1 = ColumnParallelLinear(f"{name}.linear_fc1", h, f, context, bias)
        self.linear_fc2 = RowParallelLinear(f"{name}.linear_fc2", f, h, context, bias)

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        """x (s, b, h) -> (s, b, h), without the second bias; its values may be anything where `at` needs none."""
        fc1, fc2, context = self.linear_fc1, self.linear_fc2, self.context
        if context.blocks is not None:
            return context.ops.mlp_between_parts(x, fc1.weight, fc1.bias, fc2.weight, at.needs_values, context.blocks)
        partial = context.ops.mlp(context.into_product(x), fc1.weight, fc1.bias, fc2.weight, at.needs_values, context.sequence)
        return context.out_of_product(partial, at.needs_values)


class TransformerLayer(nn.Module):
    """Pre-norm block. `layer` counts from 1 over the whole model."""

    def __init__(self, layer: int, context: Context) -> None:
        super().__init__()
        name, model = f"decoder.layers.{layer - 1}", context.model
        self.layer, self.dropout, self.context = layer, model.hidden_dropout, context
        self.input_layernorm = make_norm(f"{name}.input_layernorm", context)
        self.self_attention = SelfAttention(f"{name}.self_attention", layer, context)
        self.pre_mlp_layernorm = make_norm(f"{name}.pre_mlp_layernorm", context)
        self.mlp = _layer_class(MLPS[model.activation].layer)(f"{name}.mlp", context)

    def _dropout(self, site: str, x: Tensor, at: Pass) -> tuple[float, DropoutKey]:
        key = hidden_dropout_key(self.context.seed, self.layer, site, at.first_sample, self.context.first_position(x))
        return self.dropout if at.training else 0.0, key

    def forward(self, x: Tensor, at: Pass) -> Tensor:
        """x (s, b, h) -> (s, b, h); its values may be anything where `at` needs none."""
        attention = self.self_attention
        x, normed = self.pre_mlp_layernorm.add_and_normalize(  # no name for what attention returns: it is freed before the MLP
            attention(self.input_layernorm(x), at), attention.linear_proj.bias, x, *self._dropout("residual_1", x, at))
        out = self.mlp(normed, at)
        return self.context.ops.bias_dropout_add(out, self.mlp.linear_fc2.bias, x, *self._dropout("residual_2", x, at),
                                                 at.needs_values)
