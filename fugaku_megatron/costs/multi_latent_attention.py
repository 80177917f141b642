"""Costs of multi-head latent attention.

Legend: h hidden, n heads with d elements of a query or key, of which r are rotated, and v of a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..config.layer_kinds import (
    KV_UP,
    MULTI_LATENT_ATTENTION,
    PROJ,
    Q_PROJ,
    Q_UP,
    LayerKind,
    replicated,
)
from ..config.model import ModelConfig
from ..config.parallel import A2A
from ..config.run_config import RunConfig
from ..config.training import MLA_UP_PROJ
from .attention import (
    AttentionCosts,
    attention_record,
    cache_slots,
    output_vectors,
)
from .layers import norm_record
from .mixers import Elementwise, Segments, Shapes
from .records import MatmulCollectives, Record, Records
from .sizes import context_bytes, qkv_bytes

_NORMS = {Q_UP: "q_layernorm", KV_UP: "kv_layernorm"}  # before these projections


class LatentAttentionCosts(AttentionCosts):
    """Costs of latent attention with its projections to and from narrow vectors."""

    def records(self, run: RunConfig, cp_comm_type: str, kind: LayerKind | None) -> Records:
        """Return the projections, norms and rotation, attention and the output projection."""
        return (
            *self._projections(run),
            _rotation(run),
            attention_record(run, cp_comm_type, kind),
            self.projection(run, PROJ, bias=not run.model.disable_bias_linear),
        )

    def _projections(self, run: RunConfig) -> Iterator[Record]:
        """Yield the projections before attention and their norms. The first saves the layer's input."""
        saved = run.residual_bytes
        for name, (_, inputs) in self.shapes(run.model).items():
            if name in _NORMS:
                own = run.tokens_per_microbatch // run.sequence_shards
                saved = own * inputs * run.element_bytes
                if run.model.qk_layernorm:
                    yield norm_record(_NORMS[name], run, inputs)
            if name != PROJ:
                yield self.projection(run, name, saved_bytes=saved)
            saved = 0

    def shapes(self, model: ModelConfig) -> Shapes:
        """Return the projections to and from narrow vectors; without --q-lora-rank queries have one projection."""
        return model.mixer_shapes(MULTI_LATENT_ATTENTION)

    def elementwise(self, run: RunConfig, sizes: Mapping[str, int], kind: LayerKind) -> Elementwise:
        """Return the copies into the layout of attention's kernels, and the rotation of a part of each head."""
        model = run.model
        rotated = sizes["qkv"] * model.qk_pos_emb_head_dim * run.model.num_attention_heads
        rotated //= model.qkv_width
        moved = 2.0 * sizes["qkv"] + 6.0 * rotated
        return Elementwise(moved, 8, ((sizes["qkv"], 1), (rotated, 2)))

    def recomputed_bytes(self, run: RunConfig, kind: LayerKind) -> int:
        """Return the bytes of attention and of its operands; the keys' rotated part is kept, before heads are exchanged."""
        saved = super().recomputed_bytes(run, kind)
        exchanges_heads = run.cp > 1 and run.typical_cp_comm_type == A2A
        if exchanges_heads or not run.training.recomputes(MLA_UP_PROJ):
            return saved
        shared = run.tokens_per_microbatch * run.model.qk_pos_emb_head_dim * run.element_bytes
        return saved + qkv_bytes(run) - shared

    def cache_bytes(self, run: RunConfig, samples: int, positions: int, kind: LayerKind) -> int:
        """Return the bytes of narrow vectors and of the keys' rotated part, on every tensor-parallel rank."""
        width = run.model.kv_lora_rank + run.model.qk_pos_emb_head_dim
        return samples * cache_slots(kind, positions) * width * run.element_bytes

    def weight_input_bytes(self, run: RunConfig) -> int:
        """Return the inputs and output gradients of all projections; the first ones share their input."""
        model = run.model
        rows = run.tokens_per_microbatch * run.element_bytes
        own = rows // run.sequence_shards
        kept = run.activation_bytes + context_bytes(run)
        kept += run.residual_bytes if model.q_lora_rank is not None else run.activation_bytes
        for name, (outputs, inputs) in self.shapes(model).items():
            if name in replicated():
                kept += own * outputs
            elif name != PROJ:
                kept += rows * outputs // run.tp
                kept += rows * inputs if name != Q_PROJ else 0
        return kept

    def vectors(self, run: RunConfig) -> Segments:
        """Return the segments of norms of narrow vectors, sinks and the bias."""
        model = run.model
        found: Segments = []
        if model.qk_layernorm:
            for width in (model.q_lora_rank, model.kv_lora_rank):
                if width is not None:
                    found.append((model.norm.vectors, width))
        return found + output_vectors(run)


def _rotation(run: RunConfig) -> Record:
    """Return the rotation with the exchange of the keys' rotated part, which all heads share."""
    bytes = run.tokens_per_microbatch * run.model.qk_pos_emb_head_dim * run.element_bytes
    around = MatmulCollectives.from_run(run, bytes)
    return Record(name="rotary", forward=around.into, backward=around.into_backward[-1:])
