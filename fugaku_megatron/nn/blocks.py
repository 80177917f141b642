"""The transformer block, assembled from the classes named in `config.rows`.

f MLP width, n heads of this rank. With sequence parallelism s is this rank's shard if the last dimension is h, otherwise whole.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.grid import ALONE
from ..config.layer_kinds import MIXERS
from ..config.layout import group_copies
from ..config.parallel import A2A, P2P
from ..config.rows import ACTIVATIONS, LEARNABLE, MLP_OF_EXPERTS, OFF_BY_ONE
from ..costs.attention import cache_slots
from .adapters import activated_linear
from .attention.context_parallel import (
    AttentionMask,
    SharedCall,
    copy_groups,
    own_segments,
    positions,
    to_heads,
    to_rows,
)
from .attention.heads import Angles, Heads
from .attention.kv_cache import LayerCache
from .attention.sinks import Sinks
from .dropout_key import Dropout
from .forward_context import Pass
from .layers import (
    ColumnParallelLinear,
    Context,
    HeadNorm,
    Norm,
    RowParallelLinear,
    dropout_stream,
    hidden_dropout,
    multiplied,
)
from .ops import DropoutKey, recompute
from .ops.activation import Activation
from .ops.mlp import MLPWeights
from .ops.norm import sharded_rms_norm
from .ops.output_gate import gated, split_gate
from .ops.rotary import HeadNorms, Rotary


def make_norm(name: str, context: Context) -> Norm:
    norm: type[Norm] = resolve_name(context.model.norm.layer)
    return norm(name, context)


class SelfAttention(nn.Module):
    """Softmax attention between QKV and output projections, heads sharded over ranks."""

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__()
        model = context.model
        self.context = context
        self.layer = layer
        self.kind = model.layer_kinds[layer - 1]
        self.cp_comm_type = context.cp_comm_type(layer)
        tp = context.tp.size
        self.own_heads = Heads(
            model.num_attention_heads // tp, model.query_groups // tp, model.kv_channels
        )
        # Ranks that share the heads in attention.
        cp = context.cp.size if self.cp_comm_type == A2A else 1
        self.group_copies = group_copies(model.query_groups // tp, cp)
        self.heads = Heads(
            model.num_attention_heads // (tp * cp),
            model.query_groups * self.group_copies // (tp * cp),
            model.kv_channels,
        )
        self.linear_qkv = ColumnParallelLinear(
            f"{name}.linear_qkv", model.hidden_size, (model.qkv_width,), context, model.qkv_bias
        )
        self.q_layernorm: HeadNorm | None = None
        self.k_layernorm: HeadNorm | None = None
        if model.qk_layernorm:
            heads = model.num_attention_heads
            self.q_layernorm = HeadNorm(f"{name}.q_layernorm", heads, context)
            self.k_layernorm = HeadNorm(f"{name}.k_layernorm", model.query_groups, context)
        self.softmax_offset = None
        if model.softmax_type == LEARNABLE:
            self.softmax_offset = context.parameter(
                f"{name}.core_attention.softmax_offset",
                (model.num_attention_heads,),
                0,
                model.init_method_std,
            )
        self.linear_proj = RowParallelLinear(
            f"{name}.linear_proj",
            model.context_width,
            model.hidden_size,
            context,
            not model.disable_bias_linear,
        )

    @property
    def output_bias(self) -> Tensor | None:
        """Bias (h) of the projection, added with the residual."""
        return self.linear_proj.bias

    @property
    def projections(self) -> tuple[nn.Module, nn.Module]:
        return self.linear_qkv, self.linear_proj

    def empty_cache(self, samples: int, positions: int, dtype: torch.dtype) -> LayerCache:
        slots = cache_slots(self.kind, positions)
        groups = self.own_heads.groups
        return LayerCache.empty(samples, groups, slots, self.own_heads.head_size, dtype)

    def apply_rotary(self, qkv: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        """Normalize and rotate the queries and keys of qkv.

        angles: cosines and sines (s, rotated elements / 2)
        positions: (s, b), each token's row in `angles`; None: the token's index.
        """
        model = self.context.model
        norm = None
        if model.qk_layernorm and not model.norms_in_rotary:
            qkv = self._normed(qkv)
            if angles is None:
                return qkv
        elif self.q_layernorm is not None and self.k_layernorm is not None:
            norm = HeadNorms(
                self.q_layernorm.scale(), self.k_layernorm.scale(), model.layernorm_epsilon
            )
        call = Rotary(angles, self.heads, model.rotary_interleaved, norm, positions)
        return self.context.ops.rotary(qkv, call)

    def _normed(self, qkv: Tensor) -> Tensor:
        ops = self.context.ops
        model = self.context.model
        *parts, values = self.heads.split(qkv)
        norms = (self.q_layernorm, self.k_layernorm)
        if model.qk_layernorm_all_heads and self.context.tp.size > 1:
            queries, keys = parts
            scales = tuple(norm.scale() for norm in norms if norm is not None)
            rows = queries.flatten(2).contiguous(), keys.flatten(2).contiguous()
            both = sharded_rms_norm(rows, scales, model.layernorm_epsilon, self.context.tp)
            views = [y.view(part.shape) for y, part in zip(both, parts, strict=True)]
            return torch.cat((*views, values), 3).view(qkv.shape)
        normed = []
        for part, norm in zip(parts, norms, strict=True):
            assert norm is not None, "the model normalises queries and keys"
            x = part.flatten(2) if model.qk_layernorm_all_heads else part.contiguous()
            if norm.bias is None:
                y = ops.rms_norm(x, norm.scale(), model.layernorm_epsilon)
            else:
                y = ops.layer_norm(x, norm.scale(), norm.bias, model.layernorm_epsilon)
            normed.append(y.view(part.shape))
        return torch.cat((*normed, values), 3).view(qkv.shape)

    def attend(self, qkv: Tensor, forward_pass: Pass) -> Tensor:
        """Return attention without projections, qkv -> (s, b, n d). Selective recompute reruns it."""
        if self.context.cp.size > 1 and self.cp_comm_type != A2A:
            return self._between_ranks(qkv, forward_pass)
        model = self.context.model
        ops = self.context.ops
        tp = self.context.tp
        cp = self.context.cp
        qkv = to_heads(copy_groups(qkv, self.own_heads, self.group_copies), cp)  # whole sequence
        first_head = (tp.rank * cp.size + cp.rank) * self.heads.heads
        softcap = model.attn_logit_softcapping
        dropped = self._dropped(first_head * qkv.shape[0], forward_pass)
        starts = forward_pass.documents.starts
        attention = partial(
            ops.attention,
            heads=self.heads,
            dropped=dropped,
            window=self.kind.window,
            starts=starts,
        )
        sinks = self._sinks()
        if softcap is not None or sinks is not None:
            mask = AttentionMask(len(qkv), self.kind.window, starts)
            call = SharedCall(self.heads, mask, dropped, softcap, sinks)
            attention = partial(self._alone, call=call)
        if model.uses_rotary(self.kind):
            qkv = self.apply_rotary(qkv, *self._angles(len(qkv), forward_pass))
        if forward_pass.rows is not None:
            return forward_pass.rows.attend(ops, self.layer, qkv, attention, softcap, sinks)
        return to_rows(attention(qkv), cp)

    def _sinks(self) -> Sinks | None:
        """Return the sinks of the heads that `attend` computes."""
        heads = self.heads.heads
        if self.softmax_offset is not None:
            first = self.context.cp.rank * heads if self.cp_comm_type == A2A else 0
            return Sinks.of(self.softmax_offset, slice(first, first + heads))
        if self.context.model.softmax_type == OFF_BY_ONE:
            return Sinks(torch.zeros(heads))
        return None

    def _alone(self, qkv: Tensor, call: SharedCall) -> Tensor:
        """Attend as one of no ranks that share the sequence."""
        call = call._replace(mask=replace(call.mask, length=len(qkv)))
        return self.context.ops.shared_attention(qkv, call, ALONE, P2P)

    def _dropped(self, row0: int, forward_pass: Pass) -> Dropout:
        context = self.context
        key = DropoutKey(
            context.seed,
            dropout_stream(self.layer, "attention"),
            forward_pass.first_sample,
            sample_dim=0,
            row0=row0,
        )
        return Dropout(context.model.attention_dropout if forward_pass.training else 0.0, key)

    def _angles(self, length: int, forward_pass: Pass) -> tuple[Angles | None, Tensor | None]:
        documents = forward_pass.documents
        rows = forward_pass.rows
        rope = self.kind.rope
        if rope is None:
            return None, None
        if rows is not None:
            return rows.angles[rope], None
        by_length = documents.angles(self.context.model.ropes[rope])
        return by_length or (self.context.angles(length, rope), documents.positions)

    def _between_ranks(self, qkv: Tensor, forward_pass: Pass) -> Tensor:
        model = self.context.model
        context = self.context
        documents = forward_pass.documents
        s = len(qkv) * context.cp.size
        own = positions(own_segments(len(qkv), context.cp))
        if model.uses_rotary(self.kind):
            angles, places = self._angles(s, forward_pass)
            own_places = (
                own.int().unsqueeze(1).expand(-1, qkv.shape[1]) if places is None else places[own]
            )
            qkv = self.apply_rotary(qkv, angles, own_places.contiguous())
        call = SharedCall(
            self.heads,
            AttentionMask(s, self.kind.window, documents.starts),
            self._dropped(context.tp.rank * self.heads.heads * s, forward_pass),
            model.attn_logit_softcapping,
            self._sinks(),
        )
        return context.ops.shared_attention(qkv, call, context.cp, self.cp_comm_type)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Attend, (s, b, h) -> (s, b, h), without the projection's bias."""
        qkv = self.linear_qkv(x, forward_pass)  # (s, b, g (n/g + 2) d)
        gates = None
        if self.context.model.attention_output_gate:
            qkv, gates = split_gate(qkv, self.own_heads)
        # Below the lowest adapter there is no backward.
        if forward_pass.recompute == "selective" and qkv.requires_grad:
            context = recompute(self.attend, qkv, forward_pass)
        else:
            context = self.attend(qkv, forward_pass)
        if gates is not None:
            context = gated(context, gates)
        projected: Tensor = self.linear_proj(context, forward_pass)
        return projected


class MLP(nn.Module):
    """h -> f -> h with the model's activation, as one operation."""

    def __init__(self, name: str, context: Context, width: int | None = None) -> None:
        super().__init__()
        model = context.model
        self.context = context
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
        names = ACTIVATIONS[context.model.activation].parameters
        activation = Activation.of(context.model, tuple(self.activation[each] for each in names))
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
        pre = pre if fc1.adapter is None else fc1.adapter.column(x, pre, forward_pass)
        out, t = activated_linear(
            context, weights.activation, pre, fc2.weight, fc2.adapter, forward_pass
        )
        out = context.out_of_matmul(out, forward_pass.needs_values)
        if t is None or fc2.adapter is None:
            return out
        return fc2.adapter.up(out, context.out_of_matmul(t))


class TransformerLayer(nn.Module):
    """A mixer such as attention and an MLP, or one of both, with norms by --norm-placement.

    With --parallel-residual the MLP and attention have the same input.
    """

    def __init__(self, layer: int, context: Context) -> None:
        super().__init__()
        name = f"decoder.layers.{layer - 1}"
        model = context.model
        kind = model.layer_kinds[layer - 1]
        self.layer = layer
        self.context = context

        def norm_if(present: bool, norm: str) -> Norm | None:
            return make_norm(f"{name}.{norm}", context) if present else None

        before = model.norms_around.before and kind.mixer is not None
        after = model.norms_around.after and kind.mixer is not None
        self.input_layernorm = norm_if(before, "input_layernorm")
        self.self_attention: Any = None
        if kind.mixer is not None:
            mixer = resolve_name(MIXERS[kind.mixer].layer)
            self.self_attention = mixer(f"{name}.self_attention", layer, context)
        self.post_self_attn_layernorm = norm_if(after, "post_self_attn_layernorm")
        before = model.norms_around.before and kind.mlp is not None
        after = model.norms_around.after and kind.mlp is not None
        shared = model.parallel_shared_norm
        self.pre_mlp_layernorm = norm_if(before and not shared, "pre_mlp_layernorm")
        self.mlp: Any = None
        if kind.mlp is not None:
            mlp: type[nn.Module] = MLP
            if kind.mlp == MLP_OF_EXPERTS:
                # By name, because its module imports this one.
                mlp = resolve_name("fugaku_megatron.nn.experts:Experts")
            self.mlp = mlp(f"{name}.mlp", context)
        self.post_mlp_layernorm = norm_if(after, "post_mlp_layernorm")

    def _scaled(self, out: Tensor, norm: Norm | None) -> Tensor:
        """Return the output of attention or the MLP as it is added to the residual."""
        normed = out if norm is None else norm(out)
        return multiplied(normed, self.context.model.residual_multiplier)

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
            total = self.context.ops.bias_dropout_add(*added, forward_pass.needs_values)
            return total, total
        if self.context.model.parallel_residual:
            total = self.context.ops.bias_dropout_add(*added)
            return total, normed if self.pre_mlp_layernorm is None else self.pre_mlp_layernorm(x)
        if self.pre_mlp_layernorm is None:
            total = self.context.ops.bias_dropout_add(*added)
            return total, total
        return self.pre_mlp_layernorm.add_and_normalize(*added)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Add mixer and MLP to the residual, (s, b, h) -> (s, b, h)."""
        x, normed = self._attended(x, forward_pass)
        if self.mlp is None:
            return x
        inner = forward_pass
        if self.context.model.keeps_mlp_tensors:
            inner = replace(forward_pass, needs_values=True)
        out = self._scaled(self.mlp(normed, inner), self.post_mlp_layernorm)
        return self.context.ops.bias_dropout_add(
            out,
            self.mlp.output_bias,
            x,
            hidden_dropout(self.context, self.layer, "residual_2", x, forward_pass),
            forward_pass.needs_values,
        )
