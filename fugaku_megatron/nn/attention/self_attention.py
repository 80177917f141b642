"""Softmax attention between QKV and output projections. n heads of this rank in g query groups of size d."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...comm.grid import ALONE
from ...config.layout import group_copies
from ...config.parallel import A2A, P2P
from ...config.rows import LEARNABLE, OFF_BY_ONE
from ...config.training import CORE_ATTN
from ...costs.attention import cache_slots
from ..dropout_key import Dropout
from ..forward_context import Pass, Rows
from ..layers import (
    ColumnParallelLinear,
    Context,
    KernelNorm,
    Layer,
    RowParallelLinear,
    dropout_stream,
    inner_norm,
)
from ..ops import DropoutKey
from ..ops.norm import sharded_rms_norm
from ..ops.output_gate import gated, split_gate
from ..ops.rotary import HeadNorms, Rotary
from .context_parallel import (
    AttentionMask,
    SharedCall,
    copy_groups,
    own_segments,
    positions,
    to_heads,
    to_rows,
)
from .heads import Angles, Heads
from .kv_cache import LayerCache
from .sinks import Sinks


class Attention(Layer):
    """Softmax attention of given queries, keys and values with its output projection, heads sharded over ranks."""

    def __init__(self, layer: int, context: Context) -> None:
        super().__init__(context)
        model = context.model
        self.layer = layer
        self.kind = model.all_layer_kinds[layer - 1]
        self.cp_comm_type = context.run.cp_comm_types[layer - 1] if context.cp.size > 1 else A2A
        tp = context.tp.size
        self.own_heads = Heads.of(model, tp)
        # Ranks that share the heads in attention.
        cp = context.cp.size if self.cp_comm_type == A2A else 1
        self.group_copies = group_copies(model.query_groups // tp, cp)
        self.heads = Heads.of(model, tp * cp, self.group_copies)

    def add_output(self, name: str) -> None:
        """Add the sinks and the output projection."""
        context = self.context
        model = context.model
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

    def empty_cache(self, samples: int, positions: int, dtype: torch.dtype) -> LayerCache:
        heads = self.own_heads
        shape = (samples, heads.groups, cache_slots(self.kind, positions))
        keys = torch.empty(*shape, heads.head_size, dtype=dtype)
        return LayerCache(keys, torch.empty(*shape, heads.value_size, dtype=dtype))

    def apply_rotary(self, qkv: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        """Return qkv as `attend` needs it, if `ModelConfig.uses_rotary`."""
        raise NotImplementedError

    def attend(self, qkv: Tensor, forward_pass: Pass) -> Tensor:
        """Return attention without projections, qkv -> (s, b, n v). Selective recompute reruns it."""
        if self.context.cp.size > 1 and self.cp_comm_type != A2A:
            s = len(qkv) * self.context.cp.size
            if self.model.uses_rotary(self.kind):
                qkv = self.apply_rotary(qkv, *self.own_angles(qkv, forward_pass))
            call = self.call(s, self.context.tp.rank * self.heads.heads * s, forward_pass)
            return self.ops.shared_attention(qkv, call, self.context.cp, self.cp_comm_type)
        model = self.model
        tp = self.context.tp
        cp = self.context.cp
        qkv = to_heads(copy_groups(qkv, self.own_heads, self.group_copies), cp)  # whole sequence
        first_head = (tp.rank * cp.size + cp.rank) * self.heads.heads
        call = self.call(len(qkv), first_head * len(qkv), forward_pass)
        if model.uses_rotary(self.kind):
            qkv = self.apply_rotary(qkv, *self._angles(len(qkv), forward_pass))
        if forward_pass.rows is None:
            return to_rows(self._alone(qkv, call), cp)
        if forward_pass.rows.one_each:
            rows = forward_pass.rows
            return self.ops.cached_attention(qkv, self._cache(rows), rows, call)
        _, keys, values = self.heads.split(qkv)
        return self.prefill(qkv, (keys[:, 0, :, 0], values[:, 0, :, 0]), call, forward_pass)

    def call(self, length: int, row0: int, forward_pass: Pass) -> SharedCall:
        """Return the arguments of attention in a sequence. row0: first row of the dropout masks"""
        mask = AttentionMask(length, self.kind.window, forward_pass.documents.starts)
        softcap = self.model.attn_logit_softcapping
        key = DropoutKey(
            self.context.seed,
            dropout_stream(self.layer, "attention"),
            forward_pass.first_sample,
            sample_dim=0,
            row0=row0,
        )
        p = self.model.attention_dropout if forward_pass.training else 0.0
        return SharedCall(self.heads, mask, Dropout(p, key), softcap, self._sinks())

    def prefill(
        self, qkv: Tensor, new: tuple[Tensor, Tensor], call: SharedCall, forward_pass: Pass
    ) -> Tensor:
        """Attend from several new tokens of a sample to each other and to earlier ones, qkv (r, 1, ...) -> (r, 1, n v).

        new: keys (r, g, d) and values (r, g, v) for the cache
        """
        assert forward_pass.rows is not None, "training has no cache"
        cache = self._cache(forward_pass.rows)
        context = []
        for sample, first, own in forward_pass.rows.of_samples():
            keys, values = (part[own] for part in new)
            if first == 0:
                context.append(self._alone(qkv[own], call))
            else:
                earlier_keys, earlier_values = cache.before(sample, first)
                all_keys = torch.cat((earlier_keys, keys))
                all_values = torch.cat((earlier_values, values))
                kv = self.widen(all_keys, all_values, forward_pass)
                context.append(self.ops.attend_to_earlier(qkv[own], kv, call))
            cache.store(sample, first, keys, values)
        return torch.cat(context)

    def widen(self, keys: Tensor, values: Tensor, forward_pass: Pass) -> Tensor:
        """Return kv (k, 1, g (d + v)) of a sample's keys (k, g, d) and values (k, g, v) from the cache."""
        return torch.cat((keys, values), -1).flatten(1).unsqueeze(1)

    def _cache(self, rows: Rows) -> LayerCache:
        cache = rows.cache[self.layer]
        assert isinstance(cache, LayerCache)
        return cache

    def _sinks(self) -> Sinks | None:
        """Return the sinks of the heads that `attend` computes."""
        heads = self.heads.heads
        if self.softmax_offset is not None:
            first = self.context.cp.rank * heads if self.cp_comm_type == A2A else 0
            return Sinks.of(self.softmax_offset, slice(first, first + heads))
        if self.model.softmax_type == OFF_BY_ONE:
            return Sinks(torch.zeros(heads))
        return None

    def _alone(self, qkv: Tensor, call: SharedCall) -> Tensor:
        """Attend as one of no ranks that share the sequence."""
        ops = self.ops
        mask = call.mask
        if call.softcap is None and call.sinks is None:
            return ops.attention(
                qkv, call.heads, call.dropped, window=mask.window, starts=mask.starts
            )
        call = call._replace(mask=replace(mask, length=len(qkv)))
        return ops.shared_attention(qkv, call, ALONE, P2P)

    def _angles(self, length: int, forward_pass: Pass) -> tuple[Angles | None, Tensor | None]:
        documents = forward_pass.documents
        rows = forward_pass.rows
        rope = self.kind.rope
        if rope is None:
            return None, None
        if rows is not None:
            return rows.angles[rope], None
        by_length = documents.angles(self.model.ropes[rope])
        return by_length or (self.context.angles(length, rope), documents.positions)

    def own_angles(self, x: Tensor, forward_pass: Pass) -> tuple[Angles | None, Tensor | None]:
        """Return the angles of this context-parallel rank's rows, and the places of x (r, b, ...) in them."""
        cp = self.context.cp
        angles, places = self._angles(len(x) * cp.size, forward_pass)
        if cp.size == 1:
            return angles, places
        own = positions(own_segments(len(x), cp))
        own_places = (
            own.int().unsqueeze(1).expand(-1, x.shape[1]) if places is None else places[own]
        )
        return angles, own_places.contiguous()


class SelfAttention(Attention):
    """Attention whose queries, keys and values are one projection."""

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__(layer, context)
        model = context.model
        self.linear_qkv = ColumnParallelLinear(
            f"{name}.linear_qkv", model.hidden_size, (model.qkv_width,), context, model.qkv_bias
        )
        self.q_layernorm = self._norm(f"{name}.q_layernorm", model.num_attention_heads)
        self.k_layernorm = self._norm(f"{name}.k_layernorm", model.query_groups)
        self.add_output(name)

    def _norm(self, name: str, heads: int) -> KernelNorm | None:
        """Build the norm of queries or keys over head size d, with the same weight (and LayerNorm bias) for all heads.

        Replicated; each rank computes the gradient from its own heads. With --qk-layernorm-all-heads the norm is over all heads of the
        model together, with a weight per element, which is sharded like the heads.
        """
        if not self.model.qk_layernorm:
            return None
        context = self.context
        size = self.model.kv_channels
        make = partial(context.parameter, decays=context.run.optimizer.apply_wd_to_qk_layernorm)
        if self.model.qk_layernorm_all_heads:
            return inner_norm(name, context, heads * size, partial(make, partition_dim=0))
        return inner_norm(name, context, size, partial(make, sequence_parallel=True))

    def apply_rotary(self, qkv: Tensor, angles: Angles | None, positions: Tensor | None) -> Tensor:
        """Normalize and rotate the queries and keys of qkv.

        angles: cosines and sines (s, rotated elements / 2)
        positions: (s, b), each token's row in `angles`; None: the token's index.
        """
        model = self.model
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
        return self.ops.rotary(qkv, call)

    def _normed(self, qkv: Tensor) -> Tensor:
        model = self.model
        tp = self.context.tp
        *parts, values = self.heads.split(qkv)
        norms = [norm for norm in (self.q_layernorm, self.k_layernorm) if norm is not None]
        together = model.qk_layernorm_all_heads
        rows = [(x.flatten(2) if together else x).contiguous() for x in parts]
        if together and tp.size > 1:
            scales = [norm.scale() for norm in norms]
            both = sharded_rms_norm(rows, scales, model.layernorm_epsilon, tp)
        else:
            both = [norm(x) for norm, x in zip(norms, rows, strict=True)]
        normed = (y.view(part.shape) for y, part in zip(both, parts, strict=True))
        return torch.cat((*normed, values), 3).view(qkv.shape)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Attend, (s, b, h) -> (s, b, h), without the projection's bias."""
        qkv = self.linear_qkv(x, forward_pass)  # (s, b, g (n/g + 2) d)
        gates = None
        if self.model.attention_output_gate:
            qkv, gates = split_gate(qkv, self.own_heads)
        context = self.context.recomputed(CORE_ATTN, self.attend, qkv, forward_pass)
        if gates is not None:
            context = gated(context, gates)
        projected: Tensor = self.linear_proj(context, forward_pass)
        return projected
