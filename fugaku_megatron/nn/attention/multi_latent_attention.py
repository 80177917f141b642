"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1).

Modules, names and shapes are those of megatron/core/transformer/multi_latent_attention.py of Megatron-LM. The projections to narrow
vectors are on every tensor-parallel rank, and the projections from them are divided by heads.
n heads of this rank, d elements of a query or key, of which r are rotated, v elements of a value.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...config.layer_kinds import KV_DOWN, KV_UP, Q_DOWN, Q_PROJ, Q_UP
from ...config.training import CORE_ATTN, MLA_UP_PROJ
from ...costs.attention import cache_slots
from ..backward import rebuilt
from ..forward_context import Pass, Rows
from ..layers import ColumnParallelLinear, Context, KernelNorm, ReplicatedLinear, inner_norm
from ..ops.rotary import Rotary
from .heads import Heads
from .kv_cache import LayerCache
from .self_attention import Attention


class Latents(NamedTuple):
    """Inputs of the projections to heads.

    of_queries: (s, b, q_lora_rank), or (s, b, h) without --q-lora-rank.
    of_keys: (s, b, kv_lora_rank), of keys and values.
    shared_key: rotated part (whole s, b, r) of the keys of all heads.
    """

    of_queries: Tensor
    of_keys: Tensor
    shared_key: Tensor


class MultiLatentAttention(Attention):
    """Attention whose keys and values are computed from `kv_lora_rank` numbers of a token."""

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__(layer, context)
        rank = self.model.q_lora_rank
        self.q_layernorm: KernelNorm | None = None
        if rank is None:
            self.linear_q_proj = self._up(name, Q_PROJ)
        else:
            self.linear_q_down_proj = self._down(name, Q_DOWN)
            self.q_layernorm = self._norm(f"{name}.q_layernorm", rank)
            self.linear_q_up_proj = self._up(name, Q_UP)
        self.linear_kv_down_proj = self._down(name, KV_DOWN)
        self.kv_layernorm = self._norm(f"{name}.kv_layernorm", self.model.kv_lora_rank)
        self.linear_kv_up_proj = self._up(name, KV_UP)
        self.add_output(name)

    def _down(self, name: str, linear: str) -> ReplicatedLinear:
        outputs, inputs = self.model.linear_shapes[linear]
        return ReplicatedLinear(f"{name}.{linear}", inputs, outputs, self.context)

    def _up(self, name: str, linear: str) -> ColumnParallelLinear:
        outputs, inputs = self.model.linear_shapes[linear]
        return ColumnParallelLinear(
            f"{name}.{linear}", inputs, (outputs,), self.context, bias=False
        )

    def _norm(self, name: str, width: int) -> KernelNorm | None:
        if not self.model.qk_layernorm:
            return None
        norm = inner_norm(name, self.context, width)
        norm.epsilon = self.model.latent_epsilon
        return norm

    def _narrow(self, x: Tensor, forward_pass: Pass) -> Latents:
        model = self.model
        of_queries = x
        if model.q_lora_rank is not None:
            of_queries = self.linear_q_down_proj(x, forward_pass)
            if self.q_layernorm is not None:
                of_queries = self.q_layernorm(of_queries)
        down = self.linear_kv_down_proj(x, forward_pass)
        of_keys, shared_key = down.split((model.kv_lora_rank, model.qk_pos_emb_head_dim), -1)
        of_keys = of_keys.contiguous()
        if self.kv_layernorm is not None:
            of_keys = self.kv_layernorm(of_keys)
        return Latents(of_queries, of_keys, self.context.whole_sequence(shared_key))

    def _queries(self, of_queries: Tensor, forward_pass: Pass) -> Tensor:
        """Return queries (s, b, n d) before their rotation."""
        has_rank = self.model.q_lora_rank is not None
        project = self.linear_q_up_proj if has_rank else self.linear_q_proj
        queries: Tensor = project(of_queries, forward_pass)
        return queries

    def _rotary(self, shared_key: Tensor, forward_pass: Pass) -> Rotary:
        """Return the rotation of parts of queries and of the keys' shared part."""
        angles, places = self.own_angles(shared_key, forward_pass)
        rotated = Heads(self.own_heads.heads, 1, shared_key.shape[-1])
        # Megatron-LM rotates pairs of neighbours here, whatever --rotary-interleaved says.
        return Rotary(angles, rotated, interleaved=True, positions=places)

    def _to_heads(self, latents: Latents, forward_pass: Pass) -> Tensor:
        """Return rotated queries, keys and values as in `Heads`, (s, b, n (2 d + v))."""
        queries = self._queries(latents.of_queries, forward_pass)
        keys_values = self.linear_kv_up_proj(latents.of_keys, forward_pass)
        shared_key = latents.shared_key
        call = self._rotary(shared_key, forward_pass)
        return self.ops.latent_qkv(queries, keys_values, shared_key, self.own_heads, call)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Attend, (s, b, h) -> (s, b, h), without the projection's bias."""
        latents = self._narrow(x, forward_pass)
        rows = forward_pass.rows
        if rows is None:
            to_heads = partial(self._to_heads, latents, forward_pass)
            qkv = to_heads()
            again = self.context.recomputes(MLA_UP_PROJ, qkv, forward_pass)
            with rebuilt(qkv, to_heads) if again else nullcontext():
                context = self.context.recomputed(CORE_ATTN, self.attend, qkv, forward_pass)
        elif rows.one_each and self.linear_kv_up_proj.adapter is None:
            context = self._decode_latents(latents, forward_pass, rows)
        else:
            context = self._prefill_latents(latents, forward_pass)
        projected: Tensor = self.linear_proj(context, forward_pass)
        return projected

    @property
    def latent_heads(self) -> Heads:
        """Heads that attend to the cache, whose rows are one group of keys for all heads."""
        model = self.model
        own = self.own_heads
        width = model.kv_lora_rank + model.qk_pos_emb_head_dim
        return Heads(own.heads, 1, width, model.kv_lora_rank, own.score_scale)

    def empty_cache(self, samples: int, positions: int, dtype: torch.dtype) -> LayerCache:
        """Return a cache of each token's narrow vector and its keys' rotated part, on every tensor-parallel rank."""
        slots = cache_slots(self.kind, positions)
        keys = torch.empty(samples, 1, slots, self.latent_heads.head_size, dtype=dtype)
        return LayerCache(keys, keys[..., : self.latent_heads.value_size])

    def _prefill_latents(self, latents: Latents, forward_pass: Pass) -> Tensor:
        """Attend from prompts (r, 1, ...) as in training, and store their latents; -> (r, 1, n v)."""
        qkv = self._to_heads(latents, forward_pass)
        _, keys, _ = self.own_heads.split(qkv)
        rotated = keys[:, :, 0, 0, self.model.qk_head_dim :]
        stored = torch.cat((latents.of_keys, rotated), -1)
        new = (stored, stored[..., : self.model.kv_lora_rank])
        return self.prefill(qkv, new, self.call(len(qkv), 0, forward_pass), forward_pass)

    def widen(self, keys: Tensor, values: Tensor, forward_pass: Pass) -> Tensor:
        """Return kv (k, 1, n (d + v)) of a sample's latents, keys (k, 1, kv_lora_rank + r)."""
        model = self.model
        narrow, rotated = keys.split((model.kv_lora_rank, model.qk_pos_emb_head_dim), -1)
        n = self.own_heads.heads
        by_head = self.linear_kv_up_proj(narrow.contiguous(), forward_pass).unflatten(2, (n, -1))
        fixed, of_values = by_head.split((model.qk_head_dim, model.v_head_dim), 3)
        shared = rotated.unsqueeze(2).expand(-1, -1, n, -1)
        return torch.cat((fixed, shared, of_values), 3).flatten(2)

    def _decode_latents(self, latents: Latents, forward_pass: Pass, rows: Rows) -> Tensor:
        """Attend from one new token of each sample (r, 1, ...) to latents, which are not projected to heads; -> (r, 1, n v)."""
        ops = self.ops
        of_queries, of_keys, shared_key = latents
        fixed = self.model.qk_head_dim
        weight = self.linear_kv_up_proj.weight
        by_head = (len(of_keys), 1, self.own_heads.heads, -1)
        queries = self._queries(of_queries, forward_pass).view(by_head)
        rotary = self._rotary(shared_key, forward_pass)
        rotated, shared = ops.rotate_parts(rotary, queries[..., fixed:], shared_key)
        absorbed = ops.absorb_queries(queries[:, 0, :, :fixed], weight)
        wide = torch.cat((absorbed.unsqueeze(1), rotated), 3).flatten(2)
        row = torch.cat((wide, of_keys, shared), 2)
        call = self.call(len(row), 0, forward_pass)._replace(heads=self.latent_heads)
        context = ops.cached_attention(row, self._cache(rows), rows, call).view(by_head)
        return ops.latents_to_values(context[:, 0], weight, fixed).flatten(1).unsqueeze(1)
