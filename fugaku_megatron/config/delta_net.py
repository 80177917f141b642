"""Fields of gated delta nets, layers with a recurrent state in place of attention over all tokens before.

Names and meaning follow Megatron-LM (megatron/core/transformer/transformer_config.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .fields import (
    BY_LAYER,
    SAME,
    Requirement,
    check,
    weight_option,
    weight_optional,
)
from .layer_kinds import GATED_DELTA_NET, LAYERS

# Values of --experimental-attention-variant; Megatron-LM has both names.
VARIANTS = (GATED_DELTA_NET, "gdn")

DELTA_NETS = Requirement("a gated delta net", lambda run: run.model.has_delta_nets)
delta_field = partial(weight_option, needs=DELTA_NETS, megatron=SAME)


@dataclass(frozen=True, kw_only=True)
class DeltaNetFields:
    """Flags of gated delta nets: their layers, convolution and heads."""

    experimental_attention_variant: str | None = weight_optional(
        "the layers of --linear-attention-freq are gated delta nets, as in Qwen3-Next",
        choices=VARIANTS,
        topic=LAYERS,
        megatron=SAME,
    )
    linear_attention_freq: str | None = weight_optional(
        "layers with attention in a model with gated delta nets: every Nth, or a list of 1 (gated delta net) and 0 "
        "(attention) for all layers, such as ([1]*3+[0])*12",
        topic=LAYERS,
        needs="experimental_attention_variant",
        megatron=BY_LAYER,
    )
    linear_conv_kernel_dim: int = delta_field(
        4,
        "tokens of the convolution in front of a gated delta net: the token itself and those before it",
        maximum=64,
    )
    linear_key_head_dim: int = delta_field(
        128,
        "size of a query or key head of a gated delta net",
        maximum=2**12,
    )
    linear_value_head_dim: int = delta_field(
        128,
        "size of a value head of a gated delta net",
        maximum=2**12,
    )
    linear_num_key_heads: int = delta_field(
        16,
        "query and key heads of a gated delta net",
        maximum=2**12,
    )
    linear_num_value_heads: int = delta_field(
        32,
        "value heads of a gated delta net; must be a multiple of --linear-num-key-heads",
        maximum=2**12,
    )

    @property
    def delta_keys(self) -> int:
        """Elements per token in the queries, or in the keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def delta_values(self) -> int:
        """Elements per token in the values, the gates, or the output."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def delta_convolved(self) -> int:
        """Elements per token in the queries, keys and values."""
        return 2 * self.delta_keys + self.delta_values

    @property
    def key_head_parts(self) -> tuple[int, ...]:
        """Rows of a key head in the input projection: its query and key, and its value heads' values, gates, strengths and decays."""
        group = self.linear_num_value_heads // self.linear_num_key_heads
        values = group * self.linear_value_head_dim
        return self.linear_key_head_dim, self.linear_key_head_dim, values, values, group, group

    @property
    def delta_width(self) -> int:
        """Elements per token in the input projection."""
        return self.delta_convolved + self.delta_values + 2 * self.linear_num_value_heads

    def _check_delta_net(self, layer_types: str | None) -> None:
        object.__setattr__(self, "experimental_attention_variant", GATED_DELTA_NET)
        check(
            (self.linear_attention_freq is None) != (layer_types is None),
            f"--experimental-attention-variant {GATED_DELTA_NET} needs either --linear-attention-freq, the layers "
            "with attention, or --layer-types: pass one of them",
        )
