"""The transformer block, assembled from the classes named in `config.rows`.

f MLP width, n heads of this rank. With sequence parallelism s is this rank's shard if the last dimension is h, otherwise whole.
"""

from __future__ import annotations

from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from torch import Tensor, nn

from ..config.layer_kinds import MIXERS
from ..config.rows import ACTIVATIONS, MLP_OF_EXPERTS
from .adapters import activated_linear
from .forward_context import Pass
from .layers import (
    ColumnParallelLinear,
    Context,
    Layer,
    Norm,
    RowParallelLinear,
    hidden_dropout,
    multiplied,
)
from .ops.activation import Activation
from .ops.mlp import MLPWeights


def make_norm(name: str, context: Context) -> Norm:
    norm: type[Norm] = resolve_name(context.model.norm.layer)
    return norm(name, context)


class MLP(Layer):
    """h -> f -> h with the model's activation, as one operation."""

    def __init__(self, name: str, context: Context, width: int | None = None) -> None:
        super().__init__(context)
        model = context.model
        h = model.hidden_size
        f = width or model.ffn_hidden_size
        bias = not model.disable_bias_linear
        outputs = (2, f) if model.gated else (f,)
        self.linear_fc1 = ColumnParallelLinear(f"{name}.linear_fc1", h, outputs, context, bias)
        self.linear_fc2 = RowParallelLinear(f"{name}.linear_fc2", f, h, context, bias)
        # Each rank computes the gradient from its own columns.
        self.activation = nn.ParameterDict(
            {
                each: context.parameter(
                    f"{name}.activation.{each}", (1,), fill=start, sequence_parallel=True
                )
                for each, start in ACTIVATIONS[model.activation].parameters.items()
            }
        )

    @property
    def output_bias(self) -> Tensor | None:
        """Second bias (h), added with the residual."""
        return self.linear_fc2.bias

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply fc1, activation and fc2, (s, b, h) -> (s, b, h), without the output bias."""
        fc1 = self.linear_fc1
        fc2 = self.linear_fc2
        context = self.context
        names = ACTIVATIONS[self.model.activation].parameters
        activation = Activation.of(self.model, tuple(self.activation[each] for each in names))
        weights = MLPWeights(fc1.weight, fc1.bias, fc2.weight, activation)
        if fc1.adapter is not None or fc2.adapter is not None:
            return self._adapted(x, weights, forward_pass)
        needs_values = forward_pass.needs_values
        if context.blocks is not None:
            return context.ops.overlapped_mlp(x, weights, needs_values, context.blocks)
        partial_sum = context.ops.mlp(
            context.into_matmul(x), weights, needs_values, context.sequence
        )
        return context.out_of_matmul(partial_sum, needs_values)

    def _adapted(self, x: Tensor, weights: MLPWeights, forward_pass: Pass) -> Tensor:
        fc1 = self.linear_fc1
        fc2 = self.linear_fc2
        context = self.context
        weight1, bias1, *_ = weights.as_matrices()
        pre = context.ops.linear(context.into_matmul(x), weight1, bias1, context.sequence)
        pre = pre if fc1.adapter is None else fc1.adapter.add(x, pre, forward_pass)
        out, t = activated_linear(
            context, weights.activation, pre, fc2.weight, fc2.adapter, forward_pass
        )
        out = context.out_of_matmul(out, forward_pass.needs_values)
        if t is None or fc2.adapter is None:
            return out
        return fc2.adapter.up(out, context.out_of_matmul(t))


class TransformerLayer(Layer):
    """A mixer such as attention and an MLP, or one of both, with norms by --norm-placement.

    With --parallel-residual the MLP and attention have the same input.

    layer: from 1; MTP modules are numbered after the layers
    name: global name (default: by `layer`)
    """

    def __init__(self, layer: int, context: Context, name: str | None = None) -> None:
        super().__init__(context)
        name = name or f"decoder.layers.{layer - 1}"
        model = context.model
        kind = model.all_layer_kinds[layer - 1]
        self.name = name
        self.layer = layer

        norms = model.norms_of(kind)

        def norm_if_present(norm: str) -> Norm | None:
            return make_norm(f"{name}.{norm}", context) if norm in norms else None

        self.input_layernorm = norm_if_present("input_layernorm")
        self.self_attention: Any = None
        if kind.mixer is not None:
            mixer = resolve_name(MIXERS[kind.mixer].layer)
            self.self_attention = mixer(f"{name}.self_attention", layer, context)
        self.post_self_attn_layernorm = norm_if_present("post_self_attn_layernorm")
        self.pre_mlp_layernorm = norm_if_present("pre_mlp_layernorm")
        self.mlp: Any = None
        if kind.mlp is not None:
            mlp: type[nn.Module] = MLP
            if kind.mlp == MLP_OF_EXPERTS:
                # By name, because its module imports this one.
                mlp = resolve_name("fugaku_megatron.nn.experts:Experts")
            self.mlp = mlp(f"{name}.mlp", context)
        self.post_mlp_layernorm = norm_if_present("post_mlp_layernorm")

    def _scaled(self, out: Tensor, norm: Norm | None) -> Tensor:
        """Return the output of attention or the MLP as it is added to the residual."""
        normed = out if norm is None else norm(out)
        return multiplied(normed, self.model.residual_multiplier)

    def _attended(self, x: Tensor, forward_pass: Pass) -> tuple[Tensor, Tensor]:
        """Return (x + attention, MLP input), both (s, b, h)."""
        attention = self.self_attention
        if attention is None:
            return x, x if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
        normed = x if self.input_layernorm is None else self.input_layernorm(x)
        out = self._scaled(attention(normed, forward_pass), self.post_self_attn_layernorm)
        added = (
            out,
            attention.output_bias,
            x,
            hidden_dropout(self.context, self.layer, "residual_1", x, forward_pass),
        )
        if self.mlp is None:
            total = self.ops.bias_dropout_add(*added, forward_pass.needs_values)
            return total, total
        if self.model.parallel_residual:
            total = self.ops.bias_dropout_add(*added)
            return total, normed if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
        if self.pre_mlp_layernorm is None:
            total = self.ops.bias_dropout_add(*added)
            return total, total
        return self.pre_mlp_layernorm.add_and_normalize(*added)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Add mixer and MLP to the residual, (s, b, h) -> (s, b, h)."""
        x, normed = self._attended(x, forward_pass)
        if self.mlp is None:
            return x
        inner = forward_pass
        if self.model.keeps_mlp_tensors:
            inner = replace(forward_pass, needs_values=True)
        out = self._scaled(self.mlp(normed, inner), self.post_mlp_layernorm)
        return self.ops.bias_dropout_add(
            out,
            self.mlp.output_bias,
            x,
            hidden_dropout(self.context, self.layer, "residual_2", x, forward_pass),
            forward_pass.needs_values,
        )
