"""Model fields: GPT-2's block by default; Llama's and others by flags.

Legend: h hidden size, n heads, g query groups, d head size, f MLP width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import repeat

from .delta_net import DeltaNetFields
from .experts import ExpertFields
from .fields import (
    BY_LAYER,
    CONSTANT,
    COURSE,
    FRACTION,
    OTHER_WEIGHTS,
    OWN_FORM,
    SAME,
    WEIGHTS,
    Requirement,
    angle_option,
    angle_optional,
    angle_switch,
    cached_hash,
    check,
    course_option,
    course_switch,
    flag,
    free_option,
    free_optional,
    of_topic,
    required,
    weight_option,
    weight_optional,
    weight_switch,
)
from .layer_kinds import (
    ATTENTION,
    EXPERTS_SYMBOL,
    GATED_DELTA_NET,
    GLOBAL,
    IN_PROJ,
    KV_DOWN,
    KV_UP,
    LAYERS,
    LOCAL,
    MIXERS,
    MLP_SYMBOLS,
    MULTI_LATENT_ATTENTION,
    OUT_PROJ,
    PROJ,
    Q_DOWN,
    Q_PROJ,
    Q_UP,
    QKV,
    LayerKind,
    layer_symbols,
    marked_layers,
)
from .multi_latent_attention import LatentAttentionFields
from .prediction import PredictionFields
from .rows import (
    ACTIVATIONS,
    COUNTED,
    FFN_MULTIPLE,
    HEAD_MULTIPLE,
    LEARNABLE,
    LEARNED,
    MASKED,
    MLP_OF_EXPERTS,
    NORM_PLACEMENTS,
    NORMS,
    OFF_BY_ONE,
    POSITION_TYPES,
    ROPE,
    UNRESOLVED,
    VANILLA,
    YARN,
    NormPart,
    NormPosition,
)
from .rules import CheckedFields

YARN_DETAILS = "details of yarn"  # topic of numbers besides its factor and length
SCALING = "scaling of rope"  # topic of flags that exclude each other

HEAD_SIZE = Requirement(
    "keys and values of one size, which --multi-latent-attention has not",
    lambda run: not run.model.multi_latent_attention,
)
ROTARY = Requirement("--position-embedding-type rope or yarn", lambda run: run.model.rotary)
SCALED_ROPE = Requirement(
    "--use-rope-scaling or --rope-dynamic-factor or --longrope-short-factors",
    lambda run: run.model.use_rope_scaling or run.model.rope_follows_length,
)
LONGROPE = Requirement(
    "--longrope-short-factors", lambda run: bool(run.model.longrope_short_factors)
)
GELU = Requirement("a GELU in the MLP", lambda run: ACTIVATIONS[run.model.activation].gelu)

# Traits that many fields share: of the weights' meaning, and of yarn's angles.
weight_field = partial(weight_option, megatron=SAME)
yarn_field = partial(angle_option, needs="position_embedding_type=yarn", megatron=SAME)
yarn_detail_field = partial(yarn_field, topic=YARN_DETAILS)


def yarn_growth(factor: float, mscale: float) -> float:
    """Return yarn's growth of queries, keys or scores, 1 without lengthening; `get_mscale` in transformers."""
    return 0.1 * mscale * math.log(max(factor, 1.0)) + 1.0


@cached_hash
@dataclass(frozen=True, kw_only=True)
class ModelConfig(
    ExpertFields, DeltaNetFields, LatentAttentionFields, PredictionFields, CheckedFields
):
    """Architecture of the GPT, by default Megatron-LM's GPT-2."""

    # A field of type int with default None is computed from other fields, and never None afterwards.

    num_layers: int = required(
        "number of transformer layers",
        maximum=4096,
        aliases=("--encoder-num-layers",),
        meaning=WEIGHTS,
        megatron=SAME,
    )
    layer_types: str | None = weight_optional(
        "symbols of each layer, separated by commas: * an attention, - an MLP, E experts, or an attention and one of both, such as "
        "'*,*-,-'; --hybrid-layer-pattern sets it (default: every layer has both, with experts by --moe-layer-freq)",
        topic=LAYERS,
        megatron=OWN_FORM,
    )
    hidden_size: int = required(
        "width h of the residual stream",
        maximum=2**20,
        meaning=WEIGHTS,
        drops=(
            "ffn_hidden_size",
            "kv_channels",
        ),
        megatron=SAME,
    )
    num_attention_heads: int = required(
        "number of attention heads; must divide --hidden-size",
        maximum=2**16,
        meaning=WEIGHTS,
        drops=("kv_channels",),
        megatron=SAME,
    )
    ffn_hidden_size: int = weight_field(
        None,
        "width of the MLP (default: 4 x hidden size)",
        maximum=2**22,
        part_of="mlp_widths",
    )
    seq_length: int = required(
        "tokens per sample, s",
        maximum=2**22,
        aliases=("--encoder-seq-length",),
        meaning=COURSE,
        drops=("max_position_embeddings",),
        megatron=SAME,
    )
    max_position_embeddings: int = weight_field(
        None,
        "rows of the position embedding (default: --seq-length)",
        maximum=2**22,
    )
    vocab_size: int | None = weight_optional(
        "vocabulary before padding (default: the tokenizer's)",
        maximum=2**26,
        megatron=OWN_FORM,
    )
    make_vocab_size_divisible_by: int = free_option(
        128,
        "pad the vocabulary to a multiple of this x tensor-parallel size",
        megatron=OWN_FORM,
    )
    padded_vocab_size: int | None = free_optional(
        "rows of the padded vocabulary, instead of --make-vocab-size-divisible-by",
        maximum=2**26,
        megatron=OWN_FORM,
    )
    mask_vocab_padding: str = course_option(
        UNRESOLVED,
        "exclude padding rows of the vocabulary from the softmax, which Megatron-LM includes: losses then do not depend on "
        "their number; auto: yes, and a resumed run that includes them still does while their number is the same",
        choices=(UNRESOLVED, MASKED, COUNTED),
        megatron=OWN_FORM,
    )
    init_method_std: float = free_option(
        0.02, "standard deviation of the initial weights", megatron=SAME
    )
    normalization: str = weight_field(
        "LayerNorm",
        "norms of the layers, and after the last layer; PlainLayerNorm has no weights",
    )
    norm_placement: str = weight_option(
        "pre",
        "norms of the input of attention and of the MLP (pre), of their output before it is added "
        "to the residual, as in OLMo 2 (post), or of both, as in Gemma 2",
        choices=tuple(NORM_PLACEMENTS),
    )
    apply_layernorm_1p: bool = weight_field(
        False, "norms multiply by 1 + their weight, which starts at 0"
    )
    disable_bias_linear: bool = weight_switch(
        "no biases in the linear layers of the blocks", megatron=OWN_FORM
    )
    layernorm_epsilon: float = weight_field(
        1e-5, "epsilon of the norms", aliases=("--norm-epsilon",)
    )
    hidden_dropout: float = course_option(
        0.1,
        "dropout on embeddings and on the output of each sub-layer",
        range=FRACTION,
        megatron=SAME,
    )
    attention_dropout: float = course_option(
        0.1, "dropout on attention probabilities", range=FRACTION, megatron=SAME
    )
    swiglu: bool = weight_field(
        False,
        "the MLP is W2 (silu(Wg x) * (Wv x)); --ffn-hidden-size is then 8/3 x hidden size by default",
    )
    geglu: bool = weight_switch(
        "the MLP is W2 (gelu(Wg x) * (Wv x)) with the tanh form of the GELU; its default width is as with "
        "--swiglu",
    )
    quick_geglu: bool = weight_switch(
        "the MLP is W2 (g sigmoid(1.702 g) * (Wv x + --glu-linear-offset)), g = Wg x; its default width is "
        "as with --swiglu",
        megatron=OTHER_WEIGHTS,
    )
    glu_linear_offset: float = weight_option(
        0.0, "see --quick-geglu", range=None, megatron=OTHER_WEIGHTS
    )
    activation_func_clamp_value: float | None = weight_optional(
        "limit of --quick-geglu: gates are at most this, values at most this in size",
        megatron=OTHER_WEIGHTS,
    )
    xielu: bool = weight_switch(
        "the MLP is W2 xielu(W1 x), with two scalars that each layer trains, as in Apertus",
    )
    squared_relu: bool = weight_field(False, "the MLP is W2 relu(W1 x)^2, instead of the GELU")
    activation_func: str | None = weight_optional(
        "the MLP's activation, by the name of a row that a program has added to ACTIVATIONS "
        "(docs/extending.md)",
        part_of="activation",
    )
    bias_gelu_fusion: bool = weight_field(
        True,
        "the MLP's GELU is its tanh form, which Megatron-LM's fused kernel computes; without this flag, "
        "or with --disable-bias-linear, it is the exact GELU, as in Megatron-LM",
        needs=GELU,
        part_of="activation",
    )
    openai_gelu: bool = weight_field(
        False, "the MLP's GELU is its tanh form in any case", needs=GELU
    )
    use_z_loss: bool = course_switch(
        "add --z-loss-strength x (log of the softmax's denominator)^2 to each token's training loss",
        megatron=SAME,
    )
    z_loss_strength: float = course_option(
        1e-4,
        "the factor of --use-z-loss",
        aliases=("--z-loss-coeff",),
        needs="use_z_loss",
        megatron=SAME,
    )
    group_query_attention: bool = weight_field(
        False,
        "groups of heads share a key and a value",
        part_of="query_groups",
    )
    num_query_groups: int | None = weight_field(
        None,
        "groups g of heads, for --group-query-attention (default: 1)",
        maximum=2**16,
        needs="group_query_attention",
        part_of="query_groups",
    )
    kv_channels: int = weight_field(
        None,
        "size d of a head (default: hidden size / attention heads)",
        maximum=2**16,
        needs=HEAD_SIZE,
    )
    add_qkv_bias: bool = weight_field(
        False,
        "biases of queries, keys and values, also with --disable-bias-linear",
        part_of="qkv_bias",
    )
    qk_layernorm: bool = weight_field(
        False,
        "normalise each query and each key over its head's d elements",
    )
    qk_layernorm_all_heads: bool = weight_switch(
        "the norms of --qk-layernorm are over the elements of all heads, with one weight per "
        "element, as in OLMoE",
    )
    attention_output_gate: bool = weight_field(
        False,
        "multiply attention's output by the sigmoid of gates that the query projection computes, as "
        "in Qwen3-Next",
    )
    position_embedding_type: str = angle_option(
        LEARNED,
        "positions: a learned vector each, rotated queries and keys (rope, or yarn for "
        "sequences longer than those of pretraining), or none",
        choices=POSITION_TYPES,
        switches={"--use-rotary-position-embeddings": ROPE},
        megatron=OWN_FORM,
    )
    rotary_base: float = angle_option(
        10000.0,
        "base of the wavelengths of rope",
        aliases=("--rope-theta",),
        needs=ROTARY,
        megatron=SAME,
    )
    rotary_percent: float = weight_field(
        1.0,
        "share of a head's elements that rope rotates, the first ones",
        needs="position_embedding_type=rope",
    )
    rotary_interleaved: bool = weight_field(
        False,
        "rope rotates pairs of neighbouring elements, instead of elements half the rotated size apart",
        needs="position_embedding_type=rope",
    )
    rotary_seq_len_interpolation_factor: float | None = angle_optional(
        "divide rope's positions by this (linear scaling)",
        topic=SCALING,
        needs="position_embedding_type=rope",
        megatron=SAME,
    )
    rotary_scaling_factor: float = yarn_field(
        1.0,
        "factor by which yarn lengthens long wavelengths",
    )
    yarn_original_max_position_embeddings: int = yarn_field(
        4096,
        "sequence length of the model before yarn",
        maximum=2**22,
    )
    yarn_beta_fast: float = yarn_detail_field(
        32.0,
        "wavelengths with at least this many rotations in the original length are unchanged",
        aliases=("--beta-fast",),
    )
    yarn_beta_slow: float = yarn_detail_field(
        1.0,
        "wavelengths with at most this many rotations in the original length are lengthened by the whole factor",
        aliases=("--beta-slow",),
    )
    yarn_correction_range_round_to_int: bool = yarn_detail_field(
        True,
        "round the indices of these two wavelengths outwards",
    )
    mscale: float = yarn_detail_field(
        1.0,
        "yarn multiplies queries and keys by (0.1 x this x ln(factor) + 1) / "
        "(0.1 x --mscale-all-dim x ln(factor) + 1)",
        range=None,
        part_of="yarn_attention_factor",
    )
    mscale_all_dim: float = yarn_detail_field(
        0.0,
        "see --mscale; --multi-latent-attention multiplies the scores by the square of its divisor",
        range=None,
        part_of="yarn_attention_factor",
    )
    use_rope_scaling: bool = angle_switch(
        "lengthen rope's long wavelengths as Llama 3.1 does, for longer sequences",
        topic=SCALING,
        needs="position_embedding_type=rope",
        megatron=SAME,
    )
    rope_scaling_factor: float = angle_option(
        8.0, "factor of --use-rope-scaling", needs="use_rope_scaling", megatron=SAME
    )
    rope_scaling_low_freq_factor: float = angle_option(
        1.0,
        "wavelengths of at least original length / this are lengthened by the whole factor",
        needs="use_rope_scaling",
        megatron=CONSTANT,
    )
    rope_scaling_high_freq_factor: float = angle_option(
        4.0,
        "wavelengths of at most original length / this are unchanged",
        needs="use_rope_scaling",
        megatron=CONSTANT,
    )
    rope_scaling_original_max_position_embeddings: int = angle_option(
        8192,
        "sequence length of the model before --use-rope-scaling, --rope-dynamic-factor or --longrope-short-factors",
        maximum=2**22,
        needs=SCALED_ROPE,
        megatron=CONSTANT,
    )
    rope_dynamic_factor: float | None = angle_optional(
        "dynamic NTK scaling: raise rope's base by this factor with the length beyond the original one; the length "
        "is that of the sequence, or of a chat or document with its own positions",
        topic=SCALING,
        needs="position_embedding_type=rope",
    )
    longrope_short_factors: tuple[float, ...] = angle_option(
        (),
        "LongRoPE: divide the frequency of each rotated pair of elements by its number; sequences, or chats and documents with "
        "their own positions, that are longer than the original length have --longrope-long-factors instead",
        topic=SCALING,
        needs="position_embedding_type=rope",
    )
    longrope_long_factors: tuple[float, ...] = angle_option(
        (), "numbers of LongRoPE beyond the original length", needs=LONGROPE
    )
    longrope_attention_factor: float = angle_option(
        1.0, "LongRoPE multiplies queries and keys by this", needs=LONGROPE
    )
    untie_embeddings_and_output_weights: bool = weight_field(
        False,
        "the logits have their own weight instead of the word embedding's",
    )
    window_size: str | None = weight_optional(
        "LEFT,0: a token attends to itself and LEFT tokens before it (Mistral's window - 1), not to all",
        megatron=OWN_FORM,
        part_of="all_layer_kinds",
    )
    window_attn_skip_freq: str | None = weight_optional(
        "layers without --window-size: every Nth, or a list of 1 (window) and 0 (no window) for all "
        "layers, such as ([1]*3+[0])*6 (default: no layer)",
        topic=LAYERS,
        megatron=BY_LAYER,
    )
    window_rotary_base: float | None = angle_optional(
        "base of rope in layers with a window, where no scaling applies, as in Gemma 3 and OLMo 3 "
        "(default: rope is the same in all layers)",
    )
    no_rope_freq: str | None = weight_optional(
        "layers without rope: every Nth, or a list of 1 (no rope) and 0 (rope) for all layers, such "
        "as ([0]*3+[1])*6 (default: no layer)",
        topic=LAYERS,
        megatron=BY_LAYER,
    )
    parallel_residual: bool = weight_switch(
        "attention and the MLP both read the layer's input, each through its own norm, and "
        "both results are added to that input",
    )
    parallel_shared_norm: bool = weight_switch(
        "attention and the MLP of --parallel-residual read the same norm, as in Cohere's models",
    )
    softmax_type: str = weight_option(
        VANILLA,
        "denominator of attention's softmax: the sum over the keys, or 1 more (off-by-one), or exp of a score "
        "more that each head trains (learnable), as in gpt-oss",
        choices=(VANILLA, OFF_BY_ONE, LEARNABLE),
        megatron=OTHER_WEIGHTS,
    )
    embedding_multiplier: float = weight_option(1.0, "multiply the word embeddings by this")
    residual_multiplier: float = weight_option(
        1.0, "multiply the outputs of attention and the MLP by this"
    )
    attention_multiplier: float | None = weight_optional(
        "multiply the attention scores by this (default: 1 / sqrt of the head size)",
        part_of="attention_scale",
    )
    logits_scaling: float = weight_option(1.0, "divide the logits by this")
    attn_logit_softcapping: float | None = weight_optional(
        "replace attention scores x by this x tanh(x / this), as in Gemma 2; torch computes attention",
    )
    final_logit_softcapping: float | None = weight_optional(
        "replace logits x by this x tanh(x / this), as in Gemma 2"
    )

    def _check(self) -> None:
        check(
            self.normalization in NORMS,
            f"--normalization is {self.normalization}: pass {' or '.join(NORMS)}",
        )
        check(
            self.max_position_embeddings >= self.seq_length,
            f"--max-position-embeddings {self.max_position_embeddings} "
            f"is below --seq-length {self.seq_length}: raise it to {self.seq_length} or shorten the sequence",
        )
        check(
            self.kv_channels is not None,
            f"--hidden-size {self.hidden_size} is not divisible by --num-attention-heads {self.num_attention_heads}: "
            "change one of them, or pass --kv-channels, the size of a head",
        )
        self._check_rotary()
        self._check_block()
        self._check_experts(self.num_layers, not self.disable_bias_linear)
        if self.multi_latent_attention:
            self._check_latent_attention(self.position_embedding_type)
        if self.experimental_attention_variant is not None:
            self._check_delta_net(self.layer_types)
        self._check_layers()
        positions = ROPE if self.multi_latent_attention else self.position_embedding_type
        self._check_predictions(self.seq_length, positions, self.layer_types)

    def _derive(self) -> None:
        """Compute missing fields. A head size that is not an integer stays None."""
        self._check_activation()
        h = self.hidden_size
        heads = max(1, self.num_attention_heads)
        if self.ffn_hidden_size is None:
            width = 4 * h
            if self.gated:
                width = max(1, h * 8 // 3 // FFN_MULTIPLE) * FFN_MULTIPLE
            object.__setattr__(self, "ffn_hidden_size", width)
        if self.max_position_embeddings is None:
            object.__setattr__(self, "max_position_embeddings", self.seq_length)
        self._derive_experts(self.ffn_hidden_size)
        if self.multi_latent_attention:
            size = self.qk_head_dim + self.qk_pos_emb_head_dim
            object.__setattr__(self, "kv_channels", size)
            if self.position_embedding_type == ROPE:
                object.__setattr__(self, "position_embedding_type", self.rope_type or YARN)
        elif self.kv_channels is None and h % heads == 0:
            object.__setattr__(self, "kv_channels", h // heads)
        if not self.group_query_attention or self.num_query_groups is None:
            object.__setattr__(self, "num_query_groups", 1 if self.group_query_attention else None)
        if self.window_size is not None:
            object.__setattr__(self, "window_size", _window_size(self.window_size))

    def _check_activation(self) -> None:
        check(
            not self.xielu or self.num_experts is None,
            "--xielu is for MLPs without experts: leave out --num-experts",
        )
        name = self.activation_func
        if name is None:
            return
        added = [each for each, row in ACTIVATIONS.items() if row.flag is None]
        check(
            name in ACTIVATIONS,
            f"--activation-func is {name}, which is no row of ACTIVATIONS: "
            f"pass {' or '.join(added) or 'a row that the program has added'}",
        )
        own = ACTIVATIONS[name].flag
        check(
            own is None, f"--activation-func {name} has a flag of its own: pass {flag(own or '')}"
        )

    def _check_block(self) -> None:
        norm = self.norm
        fits = {"qk_layernorm": norm.kernel is not None, "apply_layernorm_1p": norm.vectors > 0}
        with_kernel = [name for name, row in NORMS.items() if row.kernel]
        for name, supported in fits.items():
            check(
                not getattr(self, name) or supported,
                f"{flag(name)} is for {' and '.join(with_kernel)}, and "
                f"--normalization is {self.normalization}: leave one out",
            )
        check(
            not self.qk_layernorm_all_heads
            or self.qk_layernorm
            and norm.kernel is not None
            and not norm.kernel.bias,
            "--qk-layernorm-all-heads "
            "needs --qk-layernorm and --normalization RMSNorm: pass all of them",
        )
        check(
            self.residual_multiplier == 1.0 or self.disable_bias_linear,
            "--residual-multiplier "
            f"{self.residual_multiplier} would leave out the biases: pass --disable-bias-linear as well",
        )
        after = self.norms_around.after
        check(
            not after or self.disable_bias_linear,
            f"--norm-placement {self.norm_placement} normalises outputs without biases: pass "
            "--disable-bias-linear as well",
        )
        check(
            not after or not self.parallel_residual,
            f"--norm-placement {self.norm_placement} and --parallel-residual exclude each other: "
            "leave one out",
        )
        rotates_heads = self.position_embedding_type == ROPE and self.rotary_percent == 1.0
        check(
            self.attention_multiplier is None or rotates_heads and self.no_rope_freq is None,
            f"--attention-multiplier {self.attention_multiplier} is computed with rope of whole heads "
            "in all layers: pass --position-embedding-type rope without --rotary-percent and "
            "--no-rope-freq",
        )

    def _check_layers(self) -> None:
        for name in ("no_rope_freq", "window_rotary_base"):
            check(
                getattr(self, name) is None or self.rotary,
                f"{flag(name)} {getattr(self, name)} needs rope: pass --position-embedding-type rope "
                "as well",
            )
        check(
            self.layer_types is None or self.moe_layer_freq == "1",
            f"--moe-layer-freq {self.moe_layer_freq} and --layer-types {self.layer_types!r:.60} exclude each other: E are the "
            "layers with experts",
        )
        check(
            self.layer_types is None
            or (EXPERTS_SYMBOL in self.layer_types) == bool(self.num_experts),
            f"--layer-types {self.layer_types!r:.60} and --num-experts {self.num_experts} contradict each other: E is a layer "
            "with experts, - with another MLP",
        )
        check(
            self.layer_types is None or not self.parallel_residual,
            f"--parallel-residual needs an attention and an MLP in every layer, and --layer-types is {self.layer_types!r:.60}: "
            "leave one out",
        )
        without_rope = self.no_rope_freq or "1"
        if without_rope.strip().isdecimal():
            check(
                self.num_layers % max(1, int(without_rope)) == 0,
                f"--num-layers {self.num_layers} is not divisible by --no-rope-freq {without_rope}: "
                "change one of them, or pass a list",
            )
        other = ATTENTION if self.multi_latent_attention else MULTI_LATENT_ATTENTION
        # layer_kinds raises ValueError for a wrong pattern
        wrong = any(kind.mixer == other for kind in self.layer_kinds)
        check(
            not wrong,
            f"--layer-types {self.layer_types!r:.60} has {MIXERS[other].symbol}, and --multi-latent-attention is "
            f"{self.multi_latent_attention}: with it, every attention is +, without it *",
        )

    def _check_rotary(self) -> None:
        check(
            self.rotary_percent <= 1.0,
            f"--rotary-percent is {self.rotary_percent}: pass a number above 0, and 1 at most",
        )
        yarn = self.position_embedding_type == YARN
        check(
            self.rope_type != YARN or yarn,
            "--rope-type yarn is for --multi-latent-attention: pass --position-embedding-type yarn",
        )
        chosen = [flag(name) for name in of_topic(ModelConfig, SCALING) if getattr(self, name)]
        if yarn:
            chosen.append(f"--position-embedding-type {YARN}")
        check(
            len(chosen) < 2,
            f"{' and '.join(chosen)} scale the angles of rope in different ways: pass one of them",
        )
        if yarn:
            self._check_yarn()
        if self.longrope_short_factors:
            self._check_longrope()
        check(
            self.rope_dynamic_factor is None or self.rotary_size > 2,
            "--rope-dynamic-factor needs at least 4 rotated elements "
            f"of a head, and there are {self.rotary_size}: change --rotary-percent or --kv-channels",
        )
        check(
            not self.rotary or (self.rotary_size > 0 and self.rotary_size % 2 == 0),
            "rope rotates pairs of "
            f"elements, and --rotary-percent {self.rotary_percent} of a head of {self._rope_width} is {self.rotary_size}: change "
            f"it, or {'--qk-pos-emb-head-dim' if self.multi_latent_attention else '--kv-channels'}",
        )

    def _check_longrope(self) -> None:
        pairs = self.rotary_size // 2
        for name in ("longrope_short_factors", "longrope_long_factors"):
            count = len(getattr(self, name))
            check(
                count == pairs,
                f"{flag(name)} has {count} numbers, and rope rotates {pairs} pairs of elements: pass a number for each",
            )

    def _check_yarn(self) -> None:
        check(
            self.rotary_percent == 1.0 and not self.rotary_interleaved,
            "yarn turns whole heads, elements half a "
            "head apart: leave out --rotary-percent and --rotary-interleaved",
        )
        check(
            self.yarn_beta_fast >= self.yarn_beta_slow,
            f"--yarn-beta-fast {self.yarn_beta_fast} is below "
            f"--yarn-beta-slow {self.yarn_beta_slow}: change one of them",
        )
        check(
            self.yarn_attention_factor > 0,
            f"--mscale {self.mscale} and --mscale-all-dim {self.mscale_all_dim} "
            f"multiply queries and keys by {self.yarn_attention_factor:.3g}: change one of them to make it positive",
        )

    @cached_property
    def activation(self) -> str:
        if self.activation_func is not None:
            return self.activation_func
        for name, row in ACTIVATIONS.items():
            if row.flag and getattr(self, row.flag, False):
                return name
        return "gelu" if self.bias_gelu_fusion and not self.disable_bias_linear else "gelu_exact"

    @cached_property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers, without MTP modules."""
        return self.all_layer_kinds[: self.num_layers]

    @cached_property
    def all_layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kinds of the layers, and then of the MTP modules.

        A module has a layer like the last one. Megatron-core counts the modules from 1 (`layer_number`), so that module k
        has the window and the rotation of layer k.
        """
        kinds = [*map(LayerKind, self._mixers, self._mlps, self._windows, self._ropes)]
        for window, rope in zip(self._windows[: self.predictions], self._ropes, strict=False):
            kinds.append(
                kinds[self.num_layers - 1]._replace(window=window, rope=rope, predicts=True)
            )
        return tuple(
            kind if kind.has_softmax else kind._replace(window=None, rope=None) for kind in kinds
        )

    @cached_property
    def _symbols(self) -> tuple[str, ...] | None:
        """Symbols of each layer, None without --layer-types."""
        return (
            None if self.layer_types is None else layer_symbols(self.layer_types, self.num_layers)
        )

    def _marked(self, name: str, default: bool = False) -> tuple[bool, ...]:
        """Return True for each layer that a field marks; without the field all are `default`."""
        text = getattr(self, name)
        if text is None:
            return tuple(repeat(default, self.num_layers))
        return marked_layers(name, text, self.num_layers)

    @cached_property
    def _mixers(self) -> tuple[str | None, ...]:
        if self._symbols is not None:
            by_symbol = {row.symbol: name for name, row in MIXERS.items()}
            return tuple(by_symbol.get(symbols[0]) for symbols in self._symbols)
        attention = MULTI_LATENT_ATTENTION if self.multi_latent_attention else ATTENTION
        if self.experimental_attention_variant is None:
            return tuple(repeat(attention, self.num_layers))
        delta = self._marked("linear_attention_freq")
        return tuple(GATED_DELTA_NET if layer else attention for layer in delta)

    @cached_property
    def _mlps(self) -> tuple[str | None, ...]:
        dense = self.activation
        if self._symbols is not None:
            by_symbol = dict(zip(MLP_SYMBOLS, (dense, MLP_OF_EXPERTS), strict=True))
            return tuple(by_symbol.get(symbols[-1]) for symbols in self._symbols)
        experts = self._marked("moe_layer_freq")
        return tuple(MLP_OF_EXPERTS if self.num_experts and layer else dense for layer in experts)

    @cached_property
    def _windows(self) -> tuple[int | None, ...]:
        marked = self._marked("window_attn_skip_freq", default=True)
        return tuple(self.window if layer else None for layer in marked)

    @cached_property
    def _ropes(self) -> tuple[str | None, ...]:
        without = self._marked("no_rope_freq", default=not self.rotary)
        ropes = []
        for window, no_rope in zip(self._windows, without, strict=True):
            name = GLOBAL if window is None or self.window_rotary_base is None else LOCAL
            ropes.append(None if no_rope else name)
        return tuple(ropes)

    @cached_property
    def mixer_linears(self) -> frozenset[str]:
        """Names of the linear layers in the model's mixers."""
        names = set[str]()
        for mixer in {*self._mixers}:
            if mixer is not None:
                names |= {*MIXERS[mixer].linears, *MIXERS[mixer].replicated}
        absent = (Q_DOWN, Q_UP) if self.q_lora_rank is None else (Q_PROJ,)
        return frozenset(names.difference(absent))

    @cached_property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every linear layer that a mixer may have, in the order in which it computes them."""
        h = self.hidden_size
        n = self.num_attention_heads
        rank = self.q_lora_rank or 0
        queries = self.query_widths * n * self.kv_channels
        return {
            QKV: (self.qkv_width, h),
            Q_PROJ: (queries, h),
            Q_DOWN: (rank, h),
            Q_UP: (queries, rank),
            KV_DOWN: (self.kv_lora_rank + self.qk_pos_emb_head_dim, h),
            KV_UP: (n * (self.qk_head_dim + self.v_head_dim), self.kv_lora_rank),
            PROJ: (h, self.context_width),
            IN_PROJ: (self.delta_width, h),
            OUT_PROJ: (h, self.delta_values),
        }

    def mixer_shapes(self, mixer: str) -> dict[str, tuple[int, int]]:
        """Return (outputs, inputs) of the linear layers of one of the model's mixers."""
        own = self.mixer_linears.intersection(MIXERS[mixer].linears + MIXERS[mixer].replicated)
        return {name: shape for name, shape in self.linear_shapes.items() if name in own}

    @cached_property
    def has_delta_nets(self) -> bool:
        return any(kind.mixer == GATED_DELTA_NET for kind in self.layer_kinds)

    @cached_property
    def attention_scale(self) -> float:
        """Factor of the attention scores."""
        scale = self.attention_multiplier or self.kv_channels**-0.5
        if self.multi_latent_attention and self.position_embedding_type == YARN:
            scale *= yarn_growth(self.rotary_scaling_factor, self.mscale_all_dim) ** 2
        return float(scale)

    @property
    def latent_epsilon(self) -> float:
        """Epsilon of the norms of latent attention's narrow vectors."""
        return self.latent_layernorm_epsilon or self.layernorm_epsilon

    @cached_property
    def norms_around(self) -> NormPosition:
        return NORM_PLACEMENTS[self.norm_placement]

    @cached_property
    def keeps_mlp_tensors(self) -> bool:
        """True if backward reads an MLP's result or, after the MLP's backward, its input."""
        return self.norms_around.after or self.parallel_shared_norm

    def norms_of(self, kind: LayerKind) -> tuple[str, ...]:
        """Return the names of a layer's norms of h elements."""
        before, after = self.norms_around
        present = {
            "input_layernorm": before and kind.mixer is not None,
            "post_self_attn_layernorm": after and kind.mixer is not None,
            "pre_mlp_layernorm": before and kind.mlp is not None and not self.parallel_shared_norm,
            "post_mlp_layernorm": after and kind.mlp is not None,
        }
        return tuple(name for name, is_present in present.items() if is_present)

    @cached_property
    def residual_parts(self) -> int:
        """Modules of all layers whose output is added to the residual stream."""
        return sum(self.layer_parts[: self.num_layers])

    @cached_property
    def layer_parts(self) -> tuple[int, ...]:
        """Modules of each layer, and of each MTP module, whose output is added to the residual stream: the mixer and the MLP."""
        kinds = self.all_layer_kinds
        return tuple((kind.mixer is not None) + (kind.mlp is not None) for kind in kinds)

    @cached_property
    def ropes(self) -> dict[str, ModelConfig]:
        """Model with the rotary angles of each `LayerKind.rope`."""
        if not self.rotary:
            return {}
        if self.window_rotary_base is None:
            return {GLOBAL: self}
        local = replace(
            self,
            position_embedding_type=ROPE,
            rotary_base=self.window_rotary_base,
            window_rotary_base=None,
            use_rope_scaling=False,
            rotary_seq_len_interpolation_factor=None,
            rope_dynamic_factor=None,
            longrope_short_factors=(),
            longrope_long_factors=(),
            longrope_attention_factor=1.0,
        )
        return {GLOBAL: self, LOCAL: local}

    @property
    def rope_follows_length(self) -> bool:
        """True if rotary angles depend on the sequence length."""
        return self.rope_dynamic_factor is not None or bool(self.longrope_short_factors)

    @cached_property
    def mlps(self) -> tuple[str | None, ...]:
        return tuple(kind.mlp for kind in self.layer_kinds)

    @cached_property
    def expert_count(self) -> int:
        return self.num_experts or 0

    @cached_property
    def expert_width(self) -> int:
        return self.moe_ffn_hidden_size or 0

    @cached_property
    def shared_expert_width(self) -> int:
        return self.moe_shared_expert_intermediate_size or 0

    @cached_property
    def mlp_widths(self) -> tuple[int, ...]:
        """Widths f: dense MLP, expert, shared expert."""
        if not self.num_experts:
            return (self.ffn_hidden_size,)
        dense = self.ffn_hidden_size if self.activation in self.mlps else None
        widths = (dense, self.moe_ffn_hidden_size, self.moe_shared_expert_intermediate_size)
        return tuple(width for width in widths if width)

    @cached_property
    def gated(self) -> bool:
        return ACTIVATIONS[self.activation].gated

    @cached_property
    def fc1_widths(self) -> int:
        """Output width / f in an MLP's first matmul: 2 with a gate."""
        return 2 if self.gated else 1

    @cached_property
    def z_loss(self) -> float:
        return self.z_loss_strength if self.use_z_loss else 0.0

    @cached_property
    def rotary(self) -> bool:
        """True with rope or yarn."""
        return self.position_embedding_type in (ROPE, YARN)

    @cached_property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @cached_property
    def qkv_width(self) -> int:
        """Elements per token in queries, their gates, keys and values: g (n/g + 2) d without gates."""
        queries = self.query_widths * self.num_attention_heads * self.kv_channels
        return queries + self.query_groups * self.key_value_size

    @cached_property
    def value_size(self) -> int:
        """Elements of a value; a query or key has `kv_channels`."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    @cached_property
    def key_value_size(self) -> int:
        """Elements of a key and a value."""
        return self.kv_channels + self.value_size

    @cached_property
    def query_widths(self) -> int:
        """Output width / (n d) of the query projection: 2 with gates."""
        return 2 if self.attention_output_gate else 1

    @cached_property
    def context_width(self) -> int:
        """Elements per token in the attention output: n d."""
        return self.num_attention_heads * self.value_size

    @cached_property
    def norm(self) -> NormPart:
        return NORMS[self.normalization]

    @cached_property
    def norms_in_rotary(self) -> bool:
        """True if the rotary kernels norm queries and keys."""
        kernel = self.norm.kernel
        if kernel is None or self.qk_layernorm_all_heads:
            return False
        return self.qk_layernorm and kernel.in_rotary

    @cached_property
    def kernels_take_heads(self) -> bool:
        return self.kv_channels % HEAD_MULTIPLE == self.value_size % HEAD_MULTIPLE == 0

    @cached_property
    def kernels_alone(self) -> bool:
        """True if native kernels cover every operation of the model in inference."""
        kernel = self.norm.kernel
        norms = kernel is not None and (kernel.in_rotary or not self.qk_layernorm)
        plain = self.embedding_multiplier == self.residual_multiplier == self.logits_scaling == 1.0
        capped = self.attn_logit_softcapping or self.final_logit_softcapping
        return (
            self.kernels_take_heads
            and norms
            and ACTIVATIONS[self.activation].kernel is not None
            and plain
            and not capped
            and self.softmax_type == VANILLA
            and self.num_experts is None
            and not self.qk_layernorm_all_heads
            and not self.attention_output_gate
            and not self.has_delta_nets
            and not self.multi_latent_attention
        )

    @cached_property
    def qkv_bias(self) -> bool:
        return self.add_qkv_bias or not self.disable_bias_linear

    @cached_property
    def learned_positions(self) -> bool:
        return self.position_embedding_type == LEARNED

    @cached_property
    def rotary_size(self) -> int:
        """Rotated elements per head."""
        return int(self._rope_width * self.rotary_percent)

    @property
    def _rope_width(self) -> int:
        """Elements per head that --rotary-percent is a share of."""
        return self.qk_pos_emb_head_dim if self.multi_latent_attention else self.kv_channels

    @cached_property
    def yarn_attention_factor(self) -> float:
        """Yarn's factor for cosines and sines, attention_factor in transformers; 0 if undefined, 1 without yarn."""
        if self.position_embedding_type != YARN:
            return 1.0
        factor = self.rotary_scaling_factor
        return yarn_growth(factor, self.mscale) / (
            yarn_growth(factor, self.mscale_all_dim) or math.inf
        )

    def uses_rotary(self, kind: LayerKind) -> bool:
        """Return True if a layer's queries and keys are rotated or normalised before attention."""
        return kind.mixer == ATTENTION and (kind.rope is not None or self.qk_layernorm)

    @cached_property
    def masks_padding(self) -> bool:
        """True if the softmax excludes vocabulary padding."""
        return self.mask_vocab_padding != COUNTED

    @cached_property
    def tied(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    @cached_property
    def window(self) -> int | None:
        """Tokens that a token attends to in layers with a window, including itself; None: all before it."""
        return None if self.window_size is None else int(self.window_size.split(",")[0]) + 1


def _window_size(text: str) -> str | None:
    """Normalise Megatron-LM's pair, with or without parentheses, to "LEFT,0"; None for LEFT -1, no
    limit.
    """
    words = text.strip().removeprefix("(").removesuffix(")").split(",")
    numbers = [int(word) for word in words if word.strip().removeprefix("-").isdecimal()]
    left = numbers[0] if numbers else 0
    check(
        len(words) == 2 and numbers[1:] == [0] and -1 <= left < 2**22,
        f"--window-size {text!r:.60}: pass LEFT,0, the number of tokens "
        "before itself that a token sees, and none after it, such as 4095,0",
    )
    return None if left == -1 else f"{left},0"
