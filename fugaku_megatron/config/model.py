"""The GPT that is trained, a group of `config`'s fields: GPT-2's block by default; those of Llama and others by flags.

Legend: h hidden, n heads, g groups of heads that share a key and a value, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from .experts import BALANCE, CAPACITY, EXPERTS, ExpertFields, experts_in
from .fields import (
    check,
    check_choices,
    check_fraction,
    check_numbers,
    check_positive,
    flag,
    hashed_once,
    opt,
    required,
)


@dataclass(frozen=True, kw_only=True)
class NormPart:
    """A norm over the hidden dimension h.

    layer: "module:class" of a subclass of `nn.layers.Norm`, imported when a stage is built. vectors: parameters of h elements each.
    statistics: FP32 numbers per row that backward needs in addition to the input.
    """

    layer: str
    vectors: int
    statistics: int


NORMS = {
    "LayerNorm": NormPart(layer="fugaku_megatron.nn.layers:LayerNorm", vectors=2, statistics=2),
    "RMSNorm": NormPart(layer="fugaku_megatron.nn.layers:RMSNorm", vectors=1, statistics=1),
    "PlainLayerNorm": NormPart(
        layer="fugaku_megatron.nn.layers:PlainLayerNorm", vectors=0, statistics=2
    ),
}


# An MLP h -> f -> h, by its activation -> "module:class", as in NormPart, with the interface of `nn.blocks.MLP`.
MLPS = {
    **dict.fromkeys(("gelu", "gelu_exact", "squared_relu"), "fugaku_megatron.nn.blocks:MLP"),
    **dict.fromkeys(("swiglu", "geglu"), "fugaku_megatron.nn.blocks:GatedMLP"),
    "experts": "fugaku_megatron.nn.experts:Experts",
}


UNSETTLED, MASKED, COUNTED = PADDING = ("auto", "yes", "no")  # of --mask-vocab-padding


LEARNED, ROPE, YARN, NO_POSITIONS = POSITION_TYPES = ("learned_absolute", "rope", "yarn", "none")


FFN_MULTIPLE = 64  # of the width that --swiglu has by default, as in Megatron-LM


HEAD_MULTIPLE = 4  # elements: the C++ kernels of attention take heads of so many, or a multiple


@hashed_once
@dataclass(frozen=True, kw_only=True)
class ModelConfig(ExpertFields):
    """The GPT that is trained (GPT-2 as Megatron-LM builds it, unless flags say otherwise)."""

    # A number whose default is None and whose type is int is computed from the other fields: it is never None afterwards.

    num_layers: int = required(
        "number of transformer layers", maximum=4096, aliases=("--encoder-num-layers",)
    )
    hidden_size: int = required("width h of the residual stream", maximum=2**20)
    num_attention_heads: int = required(
        "number of attention heads; must divide --hidden-size", maximum=2**16
    )
    ffn_hidden_size: int = opt(
        None, "width of the MLP (default: 4 x hidden size)", type=int, maximum=2**22
    )
    seq_length: int = required(
        "tokens per sample, s", maximum=2**22, aliases=("--encoder-seq-length",)
    )
    max_position_embeddings: int = opt(
        None, "rows of the position embedding (default: --seq-length)", type=int, maximum=2**22
    )
    vocab_size: int | None = opt(
        None, "vocabulary before padding (default: the tokenizer's)", type=int, maximum=2**26
    )
    make_vocab_size_divisible_by: int = opt(
        128, "pad the vocabulary to a multiple of this x tensor-parallel size"
    )
    padded_vocab_size: int | None = opt(
        None,
        "rows of the vocabulary with its padding, instead of that multiple",
        type=int,
        maximum=2**26,
    )
    mask_vocab_padding: str = opt(
        UNSETTLED,
        "keep rows of the vocabulary that are not tokens out of the loss, where Megatron-LM "
        "counts them; auto: what the checkpoint says, yes for converted weights, no from scratch",
        choices=PADDING,
    )
    init_method_std: float = opt(0.02, "standard deviation of the initial weights")
    normalization: str = opt(
        "LayerNorm",
        "norm before attention, before the MLP and after the last layer; PlainLayerNorm has "
        "no weights",
    )
    apply_layernorm_1p: bool = opt(False, "norms multiply by 1 + their weight, which starts at 0")
    disable_bias_linear: bool = opt(False, "no biases in the linear layers of the blocks")
    layernorm_epsilon: float = opt(1e-5, "epsilon of the norms", aliases=("--norm-epsilon",))
    hidden_dropout: float = opt(
        0.1, "dropout on embeddings and on what each sub-layer adds to the residual stream"
    )
    attention_dropout: float = opt(0.1, "dropout on attention probabilities")
    swiglu: bool = opt(
        False,
        "the MLP is W2 (silu(Wg x) * (Wv x)); --ffn-hidden-size is then 8/3 x hidden size by default",
    )
    geglu: bool = opt(
        False,
        "the MLP is W2 (gelu(Wg x) * (Wv x)) with the tanh form of the GELU; its width by default is that of "
        "--swiglu",
    )
    squared_relu: bool = opt(False, "the MLP is W2 relu(W1 x)^2, instead of the GELU")
    bias_gelu_fusion: bool = opt(
        True,
        "the MLP's GELU is its tanh form, which Megatron-LM's fused kernel computes; without it, "
        "and with --disable-bias-linear, as there, the exact one",
    )
    openai_gelu: bool = opt(False, "the MLP's GELU is its tanh form in any case")
    use_z_loss: bool = opt(
        False,
        "add --z-loss-strength x (log of the softmax's denominator)^2 to each token's training loss",
    )
    z_loss_strength: float = opt(1e-4, "the factor of --use-z-loss", aliases=("--z-loss-coeff",))
    group_query_attention: bool = opt(False, "groups of heads share a key and a value")
    num_query_groups: int | None = opt(
        None, "groups g of heads, for --group-query-attention (default: 1)", type=int, maximum=2**16
    )
    kv_channels: int = opt(
        None, "size d of a head (default: hidden size / attention heads)", type=int, maximum=2**16
    )
    add_qkv_bias: bool = opt(
        False, "biases of queries, keys and values, also with --disable-bias-linear"
    )
    qk_layernorm: bool = opt(False, "normalise each query and each key over its head's d elements")
    qk_layernorm_all_heads: bool = opt(
        False,
        "the norms of --qk-layernorm are over the elements of all heads, with a weight for "
        "each, as in OLMoE",
    )
    position_embedding_type: str = opt(
        LEARNED,
        "positions: a learned vector each, rotated queries and keys (rope, or yarn for "
        "longer sequences than a model was trained for), or none",
        choices=POSITION_TYPES,
        switches={"--use-rotary-position-embeddings": ROPE},
    )
    rotary_base: float = opt(10000.0, "base of the wavelengths of rope", aliases=("--rope-theta",))
    rotary_percent: float = opt(1.0, "share of a head's elements that rope rotates, the first ones")
    rotary_interleaved: bool = opt(
        False,
        "rope rotates neighbouring elements together, not those half of the rotated ones apart",
    )
    rotary_seq_len_interpolation_factor: float | None = opt(
        None, "divide rope's positions by this (linear scaling)", type=float
    )
    rotary_scaling_factor: float = opt(1.0, "how much yarn lengthens the long waves")
    yarn_original_max_position_embeddings: int = opt(
        4096, "positions that a model had before yarn", maximum=2**22
    )
    yarn_beta_fast: float = opt(
        32.0,
        "waves that turn so often in the original positions, and shorter ones, stay as they are",
    )
    yarn_beta_slow: float = opt(
        1.0, "waves that turn so often there, and longer ones, are lengthened by the whole factor"
    )
    yarn_correction_range_round_to_int: bool = opt(
        True, "round the numbers of these two waves outwards"
    )
    mscale: float = opt(
        1.0,
        "yarn multiplies queries and keys by 0.1 x this x ln(factor) + 1, divided by the same of "
        "--mscale-all-dim",
    )
    mscale_all_dim: float = opt(0.0, "see --mscale")
    use_rope_scaling: bool = opt(
        False, "lengthen rope's long waves as Llama 3.1 does, for longer sequences"
    )
    rope_scaling_factor: float = opt(8.0, "how much --use-rope-scaling lengthens them")
    rope_scaling_low_freq_factor: float = opt(
        1.0, "waves of the original positions / this and more are lengthened by the whole factor"
    )
    rope_scaling_high_freq_factor: float = opt(
        4.0, "waves of the original positions / this and fewer stay as they are"
    )
    rope_scaling_original_max_position_embeddings: int = opt(
        8192,
        "the original positions: those that a model had before "
        "--use-rope-scaling or --rope-dynamic-factor",
        maximum=2**22,
    )
    rope_dynamic_factor: float | None = opt(
        None,
        "raise rope's base with the length of a sequence, or of a chat or document with positions of its own, "
        "beyond the original positions (dynamic NTK scaling), by this factor",
        type=float,
    )
    untie_embeddings_and_output_weights: bool = opt(
        False, "the logits have a weight of their own, not the word embedding's"
    )
    window_size: str | None = opt(
        None,
        "LEFT,0: a token sees itself and LEFT tokens before it (Mistral's window - 1), not all",
        type=str,
    )

    parallel_residual: bool = opt(
        False,
        "attention and the MLP both read the input of the layer, each through its own norm, and "
        "both results are added to it",
    )
    embedding_multiplier: float = opt(1.0, "multiply the word embeddings by this")
    residual_multiplier: float = opt(
        1.0, "multiply by this what attention and the MLP add to the residual stream"
    )
    attention_multiplier: float | None = opt(
        None,
        "multiply the attention scores by this (default: 1 / sqrt of the head size)",
        type=float,
    )
    logits_scaling: float = opt(1.0, "divide the logits by this")

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choices(self)
        self._derive()
        numbers = (f.name for f in fields(self) if f.type in ("int", "int | None", "float"))
        check_positive(
            self, *(name for name in numbers if "dropout" not in name and "mscale" not in name)
        )
        check_positive(self, "padded_vocab_size", *SCALINGS[1:], "attention_multiplier")
        chosen = [flag(name) for name in ("swiglu", "geglu", "squared_relu") if getattr(self, name)]
        check(len(chosen) < 2, f"{' and '.join(chosen)} exclude each other: pass one")
        check(
            not (self.vocab_size and self.padded_vocab_size)
            or self.padded_vocab_size >= self.vocab_size,
            f"--padded-vocab-size {self.padded_vocab_size} is below --vocab-size {self.vocab_size}: raise it, or leave it out",
        )
        check(
            self.normalization in NORMS,
            f"--normalization is {self.normalization}: pass {' or '.join(NORMS)}",
        )
        check_fraction(self, "hidden_dropout", "attention_dropout")
        check(
            self.max_position_embeddings >= self.seq_length,
            f"--max-position-embeddings {self.max_position_embeddings} "
            f"is below --seq-length {self.seq_length}: raise it to {self.seq_length} or shorten the sequence",
        )
        self._check_heads()
        self._check_rotary()
        self._check_block()
        self._check_experts(self.num_layers, not self.disable_bias_linear)

    def _derive(self) -> None:
        """Set what was not given. A head size that does not divide is left to `_check_heads`."""
        h, heads = self.hidden_size, max(1, self.num_attention_heads)
        width = h * 8 // 3 // FFN_MULTIPLE * FFN_MULTIPLE or FFN_MULTIPLE if self.gated else 4 * h
        for name, value in (
            ("ffn_hidden_size", width),
            ("max_position_embeddings", self.seq_length),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        self._derive_experts(self.ffn_hidden_size)
        if self.kv_channels is None and h % heads == 0:
            object.__setattr__(self, "kv_channels", h // heads)
        if not self.group_query_attention or self.num_query_groups is None:
            object.__setattr__(self, "num_query_groups", 1 if self.group_query_attention else None)
        if self.window_size is not None:
            object.__setattr__(self, "window_size", _window_size(self.window_size))

    def _check_heads(self) -> None:
        h, heads = self.hidden_size, self.num_attention_heads
        check(
            self.kv_channels is not None,
            f"--hidden-size {h} is not divisible by --num-attention-heads {heads}: change one of "
            "them, or pass --kv-channels, the size of a head",
        )
        check(
            heads % self.query_groups == 0,
            f"--num-attention-heads {heads} is not divisible by --num-query-groups "
            f"{self.query_groups}: change one of them",
        )

    def _check_block(self) -> None:
        weights = (
            "--qk-layernorm"
            if self.qk_layernorm
            else "--apply-layernorm-1p"
            if self.apply_layernorm_1p
            else ""
        )
        check(
            not weights or self.normalization != "PlainLayerNorm",
            f"{weights} is for LayerNorm and RMSNorm, and "
            f"--normalization is {self.normalization}: leave one out",
        )
        check(
            not self.qk_layernorm_all_heads
            or self.qk_layernorm
            and self.normalization == "RMSNorm",
            "--qk-layernorm-all-heads "
            "needs --qk-layernorm and --normalization RMSNorm: pass all of them",
        )
        check(
            self.residual_multiplier == 1.0 or self.disable_bias_linear,
            "--residual-multiplier "
            f"{self.residual_multiplier} would leave out the biases: pass --disable-bias-linear as well",
        )
        turned = self.position_embedding_type == ROPE and self.rotary_percent == 1.0
        check(
            self.attention_multiplier is None or turned,
            f"--attention-multiplier {self.attention_multiplier} is computed with "
            "rope of whole heads: pass --position-embedding-type rope without --rotary-percent",
        )

    def _check_rotary(self) -> None:
        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        check(
            low < high,
            f"--rope-scaling-high-freq-factor {high} is not above --rope-scaling-low-freq-factor {low}: change one "
            "of them",
        )
        check(
            self.rotary_percent <= 1.0,
            f"--rotary-percent is {self.rotary_percent}: pass a number above 0, and 1 at most",
        )
        yarn = self.position_embedding_type == YARN
        chosen = [flag(name) for name in SCALINGS if getattr(self, name)] + [
            f"--position-embedding-type {YARN}"
        ] * yarn
        check(
            len(chosen) < 2,
            f"{' and '.join(chosen)} scale the angles of rope in different ways: pass one of them",
        )
        check(
            not yarn or self.rotary_percent == 1.0 and not self.rotary_interleaved,
            "yarn turns whole heads, elements half a "
            "head apart: leave out --rotary-percent and --rotary-interleaved",
        )
        check(
            not yarn or self.yarn_beta_fast > self.yarn_beta_slow,
            f"--yarn-beta-fast {self.yarn_beta_fast} is not above "
            f"--yarn-beta-slow {self.yarn_beta_slow}: change one of them",
        )
        check(
            not yarn or self.yarn_attention_factor > 0,
            f"--mscale {self.mscale} and --mscale-all-dim {self.mscale_all_dim} "
            f"multiply queries and keys by {self.yarn_attention_factor:.3g}: change one of them to make it positive",
        )
        check(
            self.rope_dynamic_factor is None or self.rotary_size > 2,
            "--rope-dynamic-factor needs at least 4 rotated elements "
            f"of a head, and there are {self.rotary_size}: change --rotary-percent or --kv-channels",
        )
        check(
            not self.rotary or (self.rotary_size > 0 and self.rotary_size % 2 == 0),
            "rope rotates pairs of "
            f"elements, and --rotary-percent {self.rotary_percent} of a head of {self.kv_channels} is {self.rotary_size}: change "
            "it, or --kv-channels",
        )

    @property
    def activation(self) -> str:
        """The row of `block_parts.MLPS` that the block's MLP is."""
        if self.gated or self.squared_relu:
            return "swiglu" if self.swiglu else "geglu" if self.geglu else "squared_relu"
        return (
            "gelu"
            if self.openai_gelu or (self.bias_gelu_fusion and not self.disable_bias_linear)
            else "gelu_exact"
        )

    @property
    def mlps(self) -> tuple[str, ...]:
        """The row of `MLPS` that each layer's MLP is."""
        dense = self.activation  # planners ask for the layers of thousands of layouts
        experts = (
            experts_in(self.moe_layer_freq, self.num_layers)
            if self.num_experts
            else (False,) * self.num_layers
        )
        return tuple("experts" if layer else dense for layer in experts)

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """f of every kind of MLP in the model: dense ones, each expert, the shared expert."""
        if not self.num_experts:
            return (self.ffn_hidden_size,)
        dense = self.ffn_hidden_size if self.activation in self.mlps else None
        return tuple(
            filter(
                None, (dense, self.moe_ffn_hidden_size, self.moe_shared_expert_intermediate_size)
            )
        )

    @property
    def gated(self) -> bool:
        """Whether the MLP, or each expert, has a gate."""
        return self.swiglu or self.geglu

    @property
    def fc1_widths(self) -> int:
        """Outputs of the first matmul of an MLP, or of an expert, in units of f: 2 where there is a gate next to the value."""
        return 1 + self.gated

    @property
    def z_loss(self) -> float:
        """The factor of the squared logarithm of the softmax's denominator in the loss."""
        return self.z_loss_strength if self.use_z_loss else 0.0

    @property
    def rotary(self) -> bool:
        """Whether positions turn queries and keys."""
        return self.position_embedding_type in (ROPE, YARN)

    @property
    def query_groups(self) -> int:
        """g: keys and values of a token; as many as heads without --group-query-attention."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def qkv_width(self) -> int:
        """g (n/g + 2) d: elements of a token's queries, keys and values."""
        return (self.num_attention_heads + 2 * self.query_groups) * self.kv_channels

    @property
    def context_width(self) -> int:
        """n d: elements of a token's attention over all heads."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kernels_take_heads(self) -> bool:
        """Whether the C++ kernels of attention take heads of this size."""
        return self.kv_channels % HEAD_MULTIPLE == 0

    @property
    def kernels_alone(self) -> bool:
        """Whether the C++ kernels compute all of a forward, nothing of which is left to torch."""
        norms = (
            self.normalization == "RMSNorm"
            or self.normalization == "LayerNorm"
            and not self.qk_layernorm
        )
        plain = self.embedding_multiplier == self.residual_multiplier == self.logits_scaling == 1.0
        return (
            self.kernels_take_heads
            and norms
            and plain
            and self.num_experts is None
            and not self.qk_layernorm_all_heads
        )

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.add_qkv_bias or not self.disable_bias_linear

    @property
    def learned_positions(self) -> bool:
        """Whether positions are a weight."""
        return self.position_embedding_type == LEARNED

    @property
    def rotary_size(self) -> int:
        """Elements of a head that rope rotates."""
        return int(self.kv_channels * self.rotary_percent)

    @property
    def yarn_attention_factor(self) -> float:
        """By what yarn multiplies the cosines and sines; transformers calls it attention_factor. 0 where it is undefined."""
        growth = 0.1 * math.log(max(self.rotary_scaling_factor, 1.0))
        return (self.mscale * growth + 1.0) / (self.mscale_all_dim * growth + 1.0 or math.inf)

    @property
    def turns_queries(self) -> bool:
        """Whether something happens to queries and keys before attention: rope, or their norm."""
        return self.rotary or self.qk_layernorm

    @property
    def masks_padding(self) -> bool:
        """Whether rows of the vocabulary that are not tokens stay out of the softmax; `run.resume` settles "auto"."""
        return self.mask_vocab_padding == MASKED

    @property
    def tied(self) -> bool:
        """Whether the logits are computed with the word embedding's weight."""
        return not self.untie_embeddings_and_output_weights

    @property
    def window(self) -> int | None:
        """Tokens that a token sees, itself among them; None: all before it."""
        return None if self.window_size is None else int(self.window_size.split(",")[0]) + 1


def _window_size(text: str) -> str | None:
    """Megatron's pair, with or without parentheses, as "LEFT,0"; None where it sets no window, -1 standing for no limit."""
    numbers = text.strip().removeprefix("(").removesuffix(")").split(",")
    right = len(numbers) == 2 and all(
        part.strip().removeprefix("-").isdecimal() for part in numbers
    )
    left, ahead = (int(part) for part in numbers) if right else (0, 1)
    check(
        right and ahead == 0 and -1 <= left < 2**22,
        f"--window-size {text!r:.60}: pass LEFT,0, the number of tokens "
        "before itself that a token sees, and none after it, such as 4095,0",
    )
    return None if left == -1 else f"{left},0"


# The ways to scale the angles of rope.
SCALINGS = ("use_rope_scaling", "rotary_seq_len_interpolation_factor", "rope_dynamic_factor")


# What --use-rope-scaling depends on; the last one holds for --rope-dynamic-factor as well.
ROPE_SCALING = (
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
)


# What --position-embedding-type yarn depends on.
YARN_SCALING = (
    "rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_correction_range_round_to_int",
    "mscale",
    "mscale_all_dim",
)


# What decides the angles of rotary positions. A run that starts from weights may change it, to train for longer sequences.
ANGLES = ("position_embedding_type", "rotary_base", *SCALINGS, *ROPE_SCALING, *YARN_SCALING)


# What a block can be other than GPT-2's, whose values are the defaults; programs before these flags saved none of them.
BLOCK = (
    "apply_layernorm_1p",
    "swiglu",
    "geglu",
    "parallel_residual",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "squared_relu",
    "bias_gelu_fusion",
    "openai_gelu",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_layernorm_all_heads",
    *ANGLES,
    "rotary_percent",
    "rotary_interleaved",
    "untie_embeddings_and_output_weights",
    "window_size",
    *(name for name in EXPERTS if name not in (*BALANCE, *CAPACITY)),
)


# What a checkpoint's weights are worth nothing without: a run that loads them must agree with the run that saved them.
ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "ffn_hidden_size",
    "max_position_embeddings",
    "vocab_size",
    "normalization",
    "disable_bias_linear",
    "layernorm_epsilon",
    *BLOCK,
)


def architecture(model: ModelConfig, saved: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values of ARCHITECTURE; the longest sequence only where it is the shape of a weight.

    saved: a model from whose weights a run starts; ANGLES, which that run may change, are left out.
    """
    free = (
        ANGLES
        if saved and model.rotary and saved.get("position_embedding_type") in (ROPE, YARN)
        else ()
    )
    free = free if model.learned_positions else (*free, "max_position_embeddings")
    return {name: getattr(model, name) for name in ARCHITECTURE if name not in free}


def with_block(saved: dict[str, Any]) -> dict[str, Any]:
    """The values of a checkpoint's model, with those that a program saved which had no flags for them: BLOCK's, and the padding."""
    before = {
        "mask_vocab_padding": COUNTED,
        **{f.name: f.default for f in fields(ModelConfig) if f.name in BLOCK},
    }
    if saved.get("disable_bias_linear") and not saved.get("swiglu"):
        before["openai_gelu"] = True  # they computed its tanh form
    if {"hidden_size", "num_attention_heads"} <= saved.keys():
        before["kv_channels"] = saved["hidden_size"] // saved["num_attention_heads"]
    return {**before, **saved}
