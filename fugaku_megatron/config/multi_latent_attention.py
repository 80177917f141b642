"""Fields of multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434).

Names and defaults follow Megatron-LM (megatron/core/transformer/multi_latent_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .fields import (
    SAME,
    angle_optional,
    check,
    flag,
    weight_option,
    weight_optional,
    weight_switch,
)
from .rows import ROPE, YARN

latent_field = partial(weight_option, needs="multi_latent_attention", megatron=SAME, maximum=2**16)


@dataclass(frozen=True, kw_only=True)
class LatentAttentionFields:
    """Flags of attention whose keys and values are computed from a narrow vector of each token."""

    multi_latent_attention: bool = weight_switch(
        "attention computes the keys and values of all heads from --kv-lora-rank numbers of a token, as in DeepSeek-V3; "
        "--qk-layernorm normalises these numbers, and the --q-lora-rank ones of queries",
        megatron=SAME,
    )
    q_lora_rank: int | None = latent_field(
        None, "numbers from which the queries are computed (default: the hidden state)"
    )
    kv_lora_rank: int = latent_field(32, "numbers from which keys and values are computed")
    qk_head_dim: int = latent_field(128, "elements of a query or key that are not rotated")
    qk_pos_emb_head_dim: int = latent_field(
        64, "rotated elements of a query; those of the keys are the same for all heads"
    )
    v_head_dim: int = latent_field(128, "elements of a value")
    latent_layernorm_epsilon: float | None = weight_optional(
        "epsilon of the norms of --kv-lora-rank and --q-lora-rank numbers, 1e-6 in transformers whatever its models "
        "have elsewhere (default: --layernorm-epsilon)",
        needs="multi_latent_attention",
        part_of="latent_epsilon",
    )
    rope_type: str | None = angle_optional(
        "angles of --multi-latent-attention: yarn, by default, or rope",
        choices=(ROPE, YARN),
        needs="multi_latent_attention",
        megatron=SAME,
        part_of="position_embedding_type",
    )

    def _check_latent_attention(self, position_embedding_type: str) -> None:
        """Raise ValueError for flags of other attention."""
        check(
            position_embedding_type == (self.rope_type or YARN),
            f"--multi-latent-attention computes the angles of --rope-type {self.rope_type or YARN}, and "
            f"--position-embedding-type is {position_embedding_type}: pass --position-embedding-type rope",
        )
        others = (
            "group_query_attention",
            "attention_output_gate",
            "add_qkv_bias",
            "qk_layernorm_all_heads",
            "rotary_interleaved",
            "attention_multiplier",
            "window_rotary_base",
        )
        for name in others:
            check(
                not getattr(self, name),
                f"{flag(name)} and --multi-latent-attention exclude each other: leave one of them out",
            )
