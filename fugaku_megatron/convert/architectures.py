"""Hugging Face architectures that the block implements: config.json fields and tensor names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config.model import LEARNED, ROPE, SCALINGS, ModelConfig
from .rules import (
    EXPERTS,
    FULL_ATTENTION,
    HEADS,
    MULTIPLIED,
    MULTIPLIERS,
    NEW_FALCON,
    NO_DROPOUT,
    ROTARY,
    SCALED_WORDS,
    SPARSE_LAYERS,
    Rule,
    no_padding,
    rotary,
    tied,
    window,
)

# How their tensors lie in ours: views of ours, which both reading and writing use. h hidden, f MLP width, n heads in g groups, d
# head size.

Shape = tuple[int, ...]
Arrangement = Callable[[Tensor, int, ModelConfig], tuple[list[Tensor], Shape]]
"""(our tensor, number of theirs among those that make it, model) -> (views of ours, whose elements one view after another are those
of theirs; their shape)."""


def whole(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    return [ours], tuple(ours.shape)


def transposed(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return GPT-2's Conv1D weight (inputs, outputs)."""
    return [ours.t()], tuple(ours.t().shape)


def conv_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return GPT-2's c_attn (h, 3 n d), all queries, keys, values; ours (n 3 d, h) is per head."""
    heads = ours.view(model.num_attention_heads, 3, -1, *ours.shape[1:]).transpose(
        0, 1
    )  # (3, n, d, h) or (3, n, d)
    theirs = heads.movedim(-1, 0) if ours.dim() == 2 else heads
    return [theirs], (*ours.shape[1:], len(ours))


def query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return queries (n d, h), keys or values (g d, h); ours has queries, key and value per group."""
    queries = model.num_attention_heads // model.query_groups
    groups = ours.view(model.query_groups, queries + 2, model.kv_channels, *ours.shape[1:])
    theirs = groups[
        :, (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[part]
    ]
    return [theirs], (theirs.shape[0] * theirs.shape[1] * theirs.shape[2], *ours.shape[1:])


def stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return gate or value (f, h) from ours (2, f, h)."""
    return [ours[part]], tuple(ours.shape[1:])


def fused_query_key_value(
    ours: Tensor, part: int, model: ModelConfig
) -> tuple[list[Tensor], Shape]:
    """Return all queries, keys, values ((n + 2 g) d, h)."""
    return [query_key_value(ours, number, model)[0][0] for number in range(3)], tuple(ours.shape)


def fused_stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return gate and value (2 f, h) from ours (2, f, h)."""
    return [ours], (2 * ours.shape[1], *ours.shape[2:])


def of_expert(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return expert `part` (h, f) from ours (experts, h, f)."""
    return [ours[part]], tuple(ours.shape[1:])


def stacked_of_expert(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Return gate 0 (f, h), value 0, gate 1 ... by `part` from ours (experts, 2, f, h)."""
    return [ours[part // 2, part % 2]], tuple(ours.shape[2:])


# Architectures -------------------------------------------------------------------------------------------------------------------

REQUIRED = object()
# As Architecture.only, of every architecture.
ONLY = {
    "quantization_config": (None,),
    "rope_interleaved": (False, None),
    "pretraining_tp": (1, None),
}


@dataclass(frozen=True)
class Field:
    """config.json field with a ModelConfig counterpart. default: if missing; REQUIRED: an error."""

    theirs: str
    ours: str
    default: Any = REQUIRED


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row in ARCHITECTURES.

    name, model_type: as in config.json
    prefix: on all tensors but the head's; published files may lack it
    fields: with a counterpart in ModelConfig; rules: the others
    only: their field -> supported values; the first is written, and is the default
    block: required ModelConfig values
    places: our place -> their names without the prefix, and the arrangement
    unused: stored tensors that are not weights
    own_head_size: the head size may differ from h / n
    also: further conditions
    defaults: their field -> transformers' default, if neither a field nor a rule has it
    """

    name: str
    model_type: str
    prefix: str
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...]
    only: Mapping[str, tuple[Any, ...]]
    block: Mapping[str, Any]
    places: Mapping[str, tuple[tuple[str, ...], Arrangement]]
    unused: re.Pattern[str] = field(default=re.compile(r".*\.rotary_emb\.inv_freq"))
    own_head_size: bool = True
    also: Callable[[ModelConfig], bool] = lambda model: True
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return f"{self.places[OUTPUT][0][0]}.weight"

    @property
    def embedding(self) -> str:
        """Their word embedding's name, without the prefix."""
        return f"{self.places['embedding.word_embeddings'][0][0]}.weight"

    @property
    def without_head(self) -> str:
        """transformers' class without the head, for a tied head."""
        return re.sub("(ForCausalLM|LMHeadModel)$", "Model", self.name)

    def fits(self, model: ModelConfig) -> bool:
        divided = model.kv_channels * model.num_attention_heads == model.hidden_size
        turned = _POSITIONS not in self.places
        right = (
            (divided or self.own_head_size)
            and self.also(model)
            and model.rotary == turned
            and not model.sinkhorn
        )
        return right and all(getattr(model, name) == value for name, value in self.block.items())


_LAYER = "decoder.layers.{}."
OUTPUT = "output_layer"
_POSITIONS = "embedding.position_embeddings"
_PLAIN = {
    **MULTIPLIERS,
    "attention_multiplier": None,
    "parallel_residual": False,
    "geglu": False,
    "activation_func": None,
    "apply_layernorm_1p": False,
    "num_experts": None,
    "qk_layernorm_all_heads": False,
}
GPT2 = Architecture(
    name="GPT2LMHeadModel",
    model_type="gpt2",
    prefix="transformer.",
    fields=(
        Field("n_layer", "num_layers"),
        Field("n_embd", "hidden_size"),
        Field("n_head", "num_attention_heads"),
        Field("n_inner", "ffn_hidden_size", None),
        Field("n_positions", "max_position_embeddings"),
        Field("vocab_size", "vocab_size"),
        Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
        Field("initializer_range", "init_method_std", 0.02),
        Field("resid_pdrop", "hidden_dropout", 0.1),
        Field("attn_pdrop", "attention_dropout", 0.1),
    ),
    rules=(tied(True),),
    only={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    block={
        **_PLAIN,
        "normalization": "LayerNorm",
        "disable_bias_linear": False,
        "position_embedding_type": LEARNED,
        "swiglu": False,
        "squared_relu": False,
        "bias_gelu_fusion": True,
        "group_query_attention": False,
        "qk_layernorm": False,
        "window_size": None,
    },
    places={
        "embedding.word_embeddings": (("wte",), whole),
        _POSITIONS: (("wpe",), whole),
        _LAYER + "input_layernorm": (("h.{}.ln_1",), whole),
        _LAYER + "self_attention.linear_qkv": (("h.{}.attn.c_attn",), conv_query_key_value),
        _LAYER + "self_attention.linear_proj": (("h.{}.attn.c_proj",), transposed),
        _LAYER + "pre_mlp_layernorm": (("h.{}.ln_2",), whole),
        _LAYER + "mlp.linear_fc1": (("h.{}.mlp.c_fc",), transposed),
        _LAYER + "mlp.linear_fc2": (("h.{}.mlp.c_proj",), transposed),
        "decoder.final_layernorm": (("ln_f",), whole),
        OUTPUT: (("lm_head",), whole),
    },
    unused=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),  # causal masks
    own_head_size=False,
)

_DECODER_FIELDS = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("vocab_size", "vocab_size"),
    Field("initializer_range", "init_method_std", 0.02),
    Field("attention_dropout", "attention_dropout", 0.0),
)


def _with_epsilon(theirs: str, default: float) -> tuple[Field, ...]:
    return (*_DECODER_FIELDS, Field(theirs, "layernorm_epsilon", default))


_SILU = {"hidden_act": ("silu", "swish")}
_NO_WINDOW = {**_SILU, "use_sliding_window": (False,)}
_DECODER_BLOCK = {
    **_PLAIN,
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "swiglu": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
}
_DECODER_PLACES = {
    "embedding.word_embeddings": (("embed_tokens",), whole),
    _LAYER + "input_layernorm": (("layers.{}.input_layernorm",), whole),
    _LAYER + "self_attention.linear_qkv": (
        tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
        query_key_value,
    ),
    _LAYER + "self_attention.q_layernorm": (("layers.{}.self_attn.q_norm",), whole),
    _LAYER + "self_attention.k_layernorm": (("layers.{}.self_attn.k_norm",), whole),
    _LAYER + "self_attention.linear_proj": (("layers.{}.self_attn.o_proj",), whole),
    _LAYER + "pre_mlp_layernorm": (("layers.{}.post_attention_layernorm",), whole),
    _LAYER + "mlp.linear_fc1": (("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), stacked),
    _LAYER + "mlp.linear_fc2": (("layers.{}.mlp.down_proj",), whole),
    "decoder.final_layernorm": (("norm",), whole),
    OUTPUT: (("lm_head",), whole),
}
_decoder = functools.partial(
    Architecture,
    prefix="model.",
    fields=_with_epsilon("rms_norm_eps", 1e-6),
    places=_DECODER_PLACES,
)

LLAMA = _decoder(
    name="LlamaForCausalLM",
    model_type="llama",
    rules=(HEADS, ROTARY, tied(False), NO_DROPOUT),
    only={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    block={**_DECODER_BLOCK, "window_size": None},
)
MISTRAL = _decoder(
    name="MistralForCausalLM",
    model_type="mistral",
    defaults={"num_key_value_heads": 8},
    rules=(HEADS, ROTARY, window(4096), tied(False), NO_DROPOUT),
    only=_SILU,
    block=_DECODER_BLOCK,
)
QWEN2 = _decoder(
    name="Qwen2ForCausalLM",
    model_type="qwen2",
    defaults={"num_key_value_heads": 32},
    rules=(HEADS, ROTARY, FULL_ATTENTION, tied(False), NO_DROPOUT),
    only=_NO_WINDOW,
    block={**_DECODER_BLOCK, "window_size": None, "add_qkv_bias": True},
)
QWEN3 = _decoder(
    name="Qwen3ForCausalLM",
    model_type="qwen3",
    defaults={"num_key_value_heads": 32, "head_dim": 128},
    rules=(HEADS, ROTARY, FULL_ATTENTION, tied(False), NO_DROPOUT),
    only={**_NO_WINDOW, "attention_bias": (False,)},
    block={**_DECODER_BLOCK, "window_size": None, "qk_layernorm": True},
)
_PARTLY_TURNED = {name: value for name, value in _DECODER_BLOCK.items() if name != "rotary_percent"}
_LAYER_NORM = {name: value for name, value in _PARTLY_TURNED.items() if name != "add_qkv_bias"} | {
    "normalization": "LayerNorm",
    "window_size": None,
}
PHI3 = _decoder(
    name="Phi3ForCausalLM",
    model_type="phi3",
    rules=(HEADS, rotary(1.0, ("default",)), window(None), tied(False), no_padding(32000)),
    fields=(*_with_epsilon("rms_norm_eps", 1e-5), Field("resid_pdrop", "hidden_dropout", 0.0)),
    only={**_SILU, "embd_pdrop": (0.0,)},
    block={**_PARTLY_TURNED, "position_embedding_type": ROPE, **dict.fromkeys(SCALINGS)}
    | {"use_rope_scaling": False},
    places={
        **_DECODER_PLACES,
        _LAYER + "self_attention.linear_qkv": (
            ("layers.{}.self_attn.qkv_proj",),
            fused_query_key_value,
        ),
        _LAYER + "mlp.linear_fc1": (("layers.{}.mlp.gate_up_proj",), fused_stacked),
    },
)
STABLELM = _decoder(
    name="StableLmForCausalLM",
    model_type="stablelm",
    defaults={"num_key_value_heads": 32},
    rules=(HEADS, rotary(0.25), tied(False), NO_DROPOUT),
    fields=(*_with_epsilon("layer_norm_eps", 1e-5), Field("use_qkv_bias", "add_qkv_bias", False)),
    only={
        **_SILU,
        "use_parallel_residual": (False,),
        "qk_layernorm": (False,),
        "hidden_dropout": (0.0,),
    },
    block=_LAYER_NORM,
    own_head_size=False,
)
OLMO = _decoder(
    name="OlmoForCausalLM",
    model_type="olmo",
    rules=(HEADS, ROTARY, tied(False), NO_DROPOUT),
    fields=_DECODER_FIELDS,
    only={**_SILU, "attention_bias": (False,), "clip_qkv": (None,)},
    block={
        **_DECODER_BLOCK,
        "normalization": "PlainLayerNorm",
        "layernorm_epsilon": 1e-5,
        "window_size": None,
    },
)
GPT_NEOX = Architecture(
    name="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    prefix="gpt_neox.",
    fields=(
        *_with_epsilon("layer_norm_eps", 1e-5),
        Field("hidden_dropout", "hidden_dropout", 0.0),
        Field("use_parallel_residual", "parallel_residual", True),
    ),
    rules=(rotary(0.25, names=("rotary_emb_base", "rotary_pct")), tied(False)),
    only={"hidden_act": ("gelu",), "attention_bias": (True,)},
    block={
        **{name: value for name, value in _LAYER_NORM.items() if name != "parallel_residual"},
        "disable_bias_linear": False,
        "swiglu": False,
        "squared_relu": False,
        "bias_gelu_fusion": False,
        "openai_gelu": False,
        "group_query_attention": False,
    },
    places={
        "embedding.word_embeddings": (("embed_in",), whole),
        _LAYER + "input_layernorm": (("layers.{}.input_layernorm",), whole),
        _LAYER + "self_attention.linear_qkv": (("layers.{}.attention.query_key_value",), whole),
        _LAYER + "self_attention.linear_proj": (("layers.{}.attention.dense",), whole),
        _LAYER + "pre_mlp_layernorm": (("layers.{}.post_attention_layernorm",), whole),
        _LAYER + "mlp.linear_fc1": (("layers.{}.mlp.dense_h_to_4h",), whole),
        _LAYER + "mlp.linear_fc2": (("layers.{}.mlp.dense_4h_to_h",), whole),
        "decoder.final_layernorm": (("final_layer_norm",), whole),
        OUTPUT: (("embed_out",), whole),
    },
    unused=re.compile(
        r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    ),
    own_head_size=False,
)
GRANITE = _decoder(
    name="GraniteForCausalLM",
    model_type="granite",
    rules=(HEADS, ROTARY, tied(False), NO_DROPOUT, MULTIPLIED),
    only={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    block={
        name: value
        for name, value in _DECODER_BLOCK.items()
        if name not in (*MULTIPLIERS, "attention_multiplier")
    }
    | {"window_size": None},
)
GEMMA = _decoder(
    name="GemmaForCausalLM",
    model_type="gemma",
    defaults={"num_key_value_heads": 16, "head_dim": 256},
    rules=(HEADS, ROTARY, tied(True), NO_DROPOUT, SCALED_WORDS),
    only={
        "hidden_act": ("gelu_pytorch_tanh", "gelu"),
        "hidden_activation": (None, "gelu_pytorch_tanh"),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    block={name: value for name, value in _DECODER_BLOCK.items() if name != "embedding_multiplier"}
    | {
        "normalization": "RMSNorm",
        "apply_layernorm_1p": True,
        "swiglu": False,
        "geglu": True,
        "window_size": None,
    },
    also=lambda model: model.embedding_multiplier == model.hidden_size**0.5,
)
FALCON = Architecture(
    name="FalconForCausalLM",
    model_type="falcon",
    prefix="transformer.",
    fields=(
        *(
            row
            for row in _with_epsilon("layer_norm_epsilon", 1e-5)
            if row.theirs not in ("intermediate_size", "max_position_embeddings")
        ),
        Field("ffn_hidden_size", "ffn_hidden_size", None),
        Field("max_position_embeddings", "max_position_embeddings", 2048),
    ),
    rules=(NEW_FALCON, ROTARY, tied(True), NO_DROPOUT),
    only={
        "activation": ("gelu",),
        "alibi": (False,),
        "parallel_attn": (True,),
        "bias": (False,),
        "hidden_dropout": (0.0,),
        "num_ln_in_parallel_attn": (2, None),
    },
    block={
        **_DECODER_BLOCK,
        "normalization": "LayerNorm",
        "window_size": None,
        "swiglu": False,
        "squared_relu": False,
        "openai_gelu": False,
        "parallel_residual": True,
    },
    places={
        "embedding.word_embeddings": (("word_embeddings",), whole),
        _LAYER + "input_layernorm": (("h.{}.ln_attn",), whole),
        _LAYER + "self_attention.linear_qkv": (("h.{}.self_attention.query_key_value",), whole),
        _LAYER + "self_attention.linear_proj": (("h.{}.self_attention.dense",), whole),
        _LAYER + "pre_mlp_layernorm": (("h.{}.ln_mlp",), whole),
        _LAYER + "mlp.linear_fc1": (("h.{}.mlp.dense_h_to_4h",), whole),
        _LAYER + "mlp.linear_fc2": (("h.{}.mlp.dense_4h_to_h",), whole),
        "decoder.final_layernorm": (("ln_f",), whole),
        OUTPUT: (("lm_head",), whole),
    },
    own_head_size=False,
)

# The expert's gate and what it multiplies are two tensors of each expert.
_EXPERT_BLOCK = {name: value for name, value in _DECODER_BLOCK.items() if name != "num_experts"} | {
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_enable_expert_bias": False,
}
_EXPERT_PLACES = {
    **_DECODER_PLACES,
    _LAYER + "mlp.router": (("layers.{}.mlp.gate",), whole),
    _LAYER + "mlp.experts.linear_fc1": (
        tuple(f"layers.{{}}.mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up")),
        stacked_of_expert,
    ),
    _LAYER + "mlp.experts.linear_fc2": (("layers.{}.mlp.experts.{expert}.down_proj",), of_expert),
    _LAYER + "mlp.shared_experts.linear_fc1": (
        tuple(f"layers.{{}}.mlp.shared_expert.{part}_proj" for part in ("gate", "up")),
        stacked,
    ),
    _LAYER + "mlp.shared_experts.linear_fc2": (("layers.{}.mlp.shared_expert.down_proj",), whole),
    _LAYER + "mlp.shared_experts.gate": (("layers.{}.mlp.shared_expert_gate",), whole),
}
_NO_SHARED = {"moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False}
_OF_A_TOKEN = Field("num_experts_per_tok", "moe_router_topk")
_OF_AN_EXPERT = Field("moe_intermediate_size", "moe_ffn_hidden_size")
MIXTRAL = _decoder(
    name="MixtralForCausalLM",
    model_type="mixtral",
    defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
    rules=(HEADS, ROTARY, window(None), tied(False), NO_DROPOUT),
    fields=(
        *_with_epsilon("rms_norm_eps", 1e-5),
        _OF_A_TOKEN,
        Field("num_local_experts", "num_experts"),
    ),
    only={**_SILU, "router_jitter_noise": (0.0,)},
    block={**_EXPERT_BLOCK, **_NO_SHARED, "moe_router_pre_softmax": False, "moe_layer_freq": "1"},
    also=lambda model: model.moe_ffn_hidden_size == model.ffn_hidden_size,
    places={
        **_EXPERT_PLACES,
        _LAYER + "mlp.router": (("layers.{}.block_sparse_moe.gate",), whole),
        _LAYER + "mlp.experts.linear_fc1": (
            tuple(
                f"layers.{{}}.block_sparse_moe.experts.{{expert}}.{part}" for part in ("w1", "w3")
            ),
            stacked_of_expert,
        ),
        _LAYER + "mlp.experts.linear_fc2": (
            ("layers.{}.block_sparse_moe.experts.{expert}.w2",),
            of_expert,
        ),
    },
)
_SPARSE_RULES = (HEADS, ROTARY, FULL_ATTENTION, tied(False), NO_DROPOUT, EXPERTS, SPARSE_LAYERS)
QWEN2_MOE = _decoder(
    name="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults={"num_key_value_heads": 16},
    rules=_SPARSE_RULES,
    places=_EXPERT_PLACES,
    fields=(
        *_with_epsilon("rms_norm_eps", 1e-6),
        _OF_A_TOKEN,
        _OF_AN_EXPERT,
        Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    ),
    only={**_NO_WINDOW, "qkv_bias": (True,)},
    block={
        **_EXPERT_BLOCK,
        "moe_shared_expert_gate": True,
        "window_size": None,
        "add_qkv_bias": True,
    },
)
QWEN3_MOE = _decoder(
    name="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={"num_key_value_heads": 4},
    rules=_SPARSE_RULES,
    places=_EXPERT_PLACES,
    fields=(*_with_epsilon("rms_norm_eps", 1e-6), _OF_A_TOKEN, _OF_AN_EXPERT),
    only={**_NO_WINDOW, "attention_bias": (False,)},
    block={**_EXPERT_BLOCK, **_NO_SHARED, "window_size": None, "qk_layernorm": True},
)
OLMOE = _decoder(
    name="OlmoeForCausalLM",
    model_type="olmoe",
    places=_EXPERT_PLACES,
    rules=(HEADS, ROTARY, tied(False), NO_DROPOUT, EXPERTS),
    fields=(*_with_epsilon("rms_norm_eps", 1e-5), _OF_A_TOKEN),
    only={**_SILU, "attention_bias": (False,), "clip_qkv": (None,)},
    block={
        **_EXPERT_BLOCK,
        **_NO_SHARED,
        "window_size": None,
        "qk_layernorm": True,
        "qk_layernorm_all_heads": True,
        "moe_layer_freq": "1",
    },
    also=lambda model: model.moe_ffn_hidden_size == model.ffn_hidden_size,
    own_head_size=False,
)

ARCHITECTURES = [
    GPT2,
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    PHI3,
    STABLELM,
    OLMO,
    GPT_NEOX,
    GRANITE,
    GEMMA,
    FALCON,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
]
# model_type of an architecture that is near to these -> what it has that the block does not build.
_AFTER, _EXPERTS, _SLOPES, _COMPRESSED = (
    f"{what} not supported"
    for what in (
        "norms after attention and after the MLP are",
        "this variant of experts is",
        "positions as a slope of each head (ALiBi) are",
        "keys and values compressed into a latent vector (MLA) are",
    )
)
REFUSED = {
    "olmo2": _AFTER,
    "olmo3": _AFTER,
    "gemma2": "soft-capped logits are not supported",
    "gemma3_text": "windows in some layers only are not supported",
    "gemma3": "images are not supported",
    "phi": "a bias of the output layer is not supported",
    "deepseek_v2": _COMPRESSED,
    "deepseek_v3": _COMPRESSED,
    "gpt_oss": "attention sinks, clamped gates and biases of experts, and MXFP4 weights, are not supported",
    "phimoe": _EXPERTS,
    "granitemoe": _EXPERTS,
    "bloom": _SLOPES,
    "mpt": _SLOPES,
}
