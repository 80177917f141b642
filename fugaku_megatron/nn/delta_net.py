"""Gated delta net as a layer's mixer (Yang et al. 2024, arXiv:2412.06464): projections, convolution, delta rule, gated norm.

k key heads and n value heads of this rank. The input projection has for each key
head a query, a key, and of its n / k value heads the values, gates, update strengths and decays.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..config.training import CORE_ATTN
from .attention.context_parallel import to_heads, to_rows
from .attention.kv_cache import DeltaState
from .forward_context import Pass, Rows
from .layers import ColumnParallelLinear, Context, Layer, RowParallelLinear
from .ops.delta_net import DeltaGates, DeltaHeads
from .parameter import view_of

A_RANGE = (1.0, 16.0)  # of exp(A_log) at the start, uniform as in Megatron-LM


class GatedDeltaNet(Layer):
    """Gated delta net between its projections, heads sharded over tensor- and context-parallel ranks."""

    def __init__(self, name: str, layer: int, context: Context) -> None:
        super().__init__(context)
        model = context.model
        self.layer = layer
        shares = context.tp.size * context.cp.size  # ranks exchange heads for the whole sequence
        self.heads = DeltaHeads(
            model.linear_num_key_heads // shares,
            model.linear_num_value_heads // shares,
            model.linear_key_head_dim,
            model.linear_value_head_dim,
        )
        width = model.linear_conv_kernel_dim
        values = (model.linear_num_value_heads,)
        self.in_proj = ColumnParallelLinear(
            f"{name}.in_proj", model.hidden_size, (model.delta_width,), context, bias=False
        )
        # The variance of torch's uniform initial values.
        self.conv1d = context.parameter(
            f"{name}.conv1d.weight", (model.delta_convolved, width), 0, (3.0 * width) ** -0.5
        )
        self.dt_bias = context.parameter(f"{name}.dt_bias", values, 0, fill=1.0)
        self.A_log = context.parameter(f"{name}.A_log", values, 0)
        self.A_log.spec = replace(self.A_log.spec, log_range=A_RANGE)
        # Each rank computes the gradient from its own heads.
        self.out_norm = context.parameter(
            f"{name}.out_norm.weight",
            (model.linear_value_head_dim,),
            fill=1.0,
            sequence_parallel=True,
        )
        self.out_proj = RowParallelLinear(
            f"{name}.out_proj", model.delta_values, model.hidden_size, context, bias=False
        )

    @property
    def output_bias(self) -> Tensor | None:
        return self.out_proj.bias

    def empty_cache(self, samples: int, positions: int, dtype: torch.dtype) -> DeltaState:
        heads = self.heads
        channels, width = self.conv1d.shape
        state = (heads.value_heads, heads.key_size, heads.value_size)
        inputs = torch.zeros(samples, width - 1, channels, dtype=dtype)
        return DeltaState(inputs, torch.zeros(samples, *state))

    def _own(self, parameter: Tensor) -> Tensor:
        """Return the rows of a parameter for the heads that this rank computes."""
        cp = self.context.cp
        if cp.size == 1:
            return parameter
        return view_of(parameter, lambda whole: whole.chunk(cp.size)[cp.rank])

    def mix(self, projected: Tensor, forward_pass: Pass) -> Tensor:
        """Return the output of all heads, (s, b, n value size). Selective recompute reruns it."""
        ops = self.ops
        cp = self.context.cp
        heads = self.heads
        sizes = self.model.key_head_parts
        by_key_head = to_heads(projected, cp).unflatten(-1, (heads.key_heads, -1))
        parts = by_key_head.split((sum(sizes[:3]), *sizes[3:]), -1)
        # Queries, keys and values as in `DeltaHeads`; of value heads gates, strengths and decays.
        convolved, z, strengths, decays = (part.flatten(2) for part in parts)
        gates = ops.delta_gates(decays, strengths, self._own(self.A_log), self._own(self.dt_bias))
        rows = forward_pass.rows
        if rows is None:
            starts = forward_pass.documents.starts
            qkv = ops.causal_convolution(convolved, self._own(self.conv1d), starts)
            out, _ = ops.gated_delta_rule(qkv, gates, heads, starts)
        else:
            state = rows.cache[self.layer]
            assert isinstance(state, DeltaState)
            if rows.one_each:
                samples = rows.samples
                qkv = ops.cached_convolution(convolved, self.conv1d, state.inputs, samples)
                out = ops.cached_delta_rule(qkv, gates, heads, state.states, samples)
            else:
                out = self._prefill(convolved, gates, state, rows)
        by_head = (heads.value_heads, heads.value_size)
        normed = ops.gated_rms_norm(
            out.unflatten(-1, by_head),
            z.unflatten(-1, by_head),
            self.out_norm,
            self.model.layernorm_epsilon,
        )
        return to_rows(normed.flatten(2), cp)

    def _prefill(
        self, convolved: Tensor, gates: DeltaGates, state: DeltaState, rows: Rows
    ) -> Tensor:
        """Compute several new tokens of samples, and store their last states."""
        ops = self.ops
        outs = []
        for sample, _, own in rows.of_samples():
            earlier = state.inputs[sample].unsqueeze(1)
            before = state.states[sample].unsqueeze(0)
            x = convolved[own]
            qkv = ops.causal_convolution(x, self.conv1d, earlier=earlier)
            own_gates = DeltaGates(*(gate[own] for gate in gates))
            out, last = ops.gated_delta_rule(qkv, own_gates, self.heads, state=before)
            state.store(sample, x, last)
            outs.append(out)
        return torch.cat(outs)

    def forward(self, x: Tensor, forward_pass: Pass) -> Tensor:
        """Apply the layer, (s, b, h) -> (s, b, h)."""
        projected = self.in_proj(x, forward_pass)
        mixed = self.context.recomputed(CORE_ATTN, self.mix, projected, forward_pass)
        out: Tensor = self.out_proj(mixed, forward_pass)
        return out
