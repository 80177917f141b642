"""Hugging Face architectures that the block implements: config.json fields and tensor names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from ...config.architecture import same_weights
from ...config.fields import check, check_type
from ...config.model import ModelConfig
from ...config.rows import LEARNABLE, MASKED
from ...nn.ops.activation import QUICK, XIELU_BETA, XIELU_LIMIT
from ...text.named_files import JsonObject, about
from .rope_rules import (
    LATENT_ROTARY,
    NO_ROPE_LAYERS,
    ROTARY,
    ROTARY_OF_TEXT,
    named_rotary,
    rotary,
    rotary_by_layer,
)
from .rules import (
    ATTENTION_LAYERS,
    EXPERT_WIDTHS,
    EXPERTS,
    FILE,
    FIRST_DENSE,
    FULL_ATTENTION,
    GREEDY_GROUPS,
    GROUPS,
    HEADS,
    LATENT_HEADS,
    LINEAR_LAYERS,
    LOGIT_SCALE,
    MLP_LAYERS,
    MULTIPLIED,
    NEW_FALCON,
    NORMALISED_EXPERTS,
    PREDICTIONS,
    QUERY_SCALE,
    SCALED_DEPTH,
    SCALED_EMBEDDING,
    SPARSE_LAYERS,
    SWIGLU_LIMIT,
    Rule,
    no_padding,
    tied,
    window,
    windows_by_layer,
)
from .tensor_views import (
    Arrangement,
    conv_query_key_value,
    delta_convolution,
    delta_parts,
    delta_projections,
    fused_query_key_value,
    fused_stacked,
    interleaved,
    keys_in_halves,
    queries_in_halves,
    query_key_value,
    stacked,
    stacked_experts,
    stacked_of_expert,
    transposed,
    transposed_experts,
    whole,
)

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


class Counterpart(NamedTuple):
    """Their names for one of our tensors, without the architecture's prefix, and the arrangement."""

    names: tuple[str, ...]
    arranged: Arrangement = whole


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row in ARCHITECTURES.

    name, model_type: as in config.json
    prefix: on all tensors but the head's; published files may lack it
    fields: with a counterpart in ModelConfig; rules: the others
    only: their field -> supported values; the first is written, and is the default
    block: ModelConfig values that no field says, apart from defaults
    places: by our name without "weight" or "bias"
    experts: places of transformers 5's modules, and of some files, with all experts of a layer in one parameter
    unused: stored tensors that are not weights
    own_head_size: the head size may differ from h / n
    defaults: their field -> transformers' default, if neither a field nor a rule has it
    constants: stored numbers of each layer that the block computes with, by their name
    leaves_predictions_out: files may have multi-token-prediction layers in a form that is left out
    """

    name: str
    model_type: str
    prefix: str
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...]
    only: Mapping[str, tuple[Any, ...]]
    block: Mapping[str, Any]
    places: Mapping[str, Counterpart]
    unused: re.Pattern[str] = field(default=re.compile(r".*\.rotary_emb\.inv_freq"))
    own_head_size: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    leaves_predictions_out: bool = False
    experts: Mapping[str, Counterpart] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return f"{self.places[OUTPUT].names[0]}.weight"

    @property
    def embedding(self) -> str:
        return f"{self.prefix}{self.places[_WORD_EMBEDDINGS].names[0]}.weight"

    @property
    def with_stacked_experts(self) -> Architecture:
        return replace(self, places={**self.places, **self.experts})

    @property
    def without_head(self) -> str:
        return re.sub("(ForCausalLM|LMHeadModel)$", "Model", self.name)

    def read(self, config: JsonObject) -> ModelConfig:
        """Return the model of a config.json with supported values. Raise ValueError for others."""
        config = {**self.defaults, **config}
        values = {**self.block, "mask_vocab_padding": MASKED}
        ours = {f.name: f for f in fields(ModelConfig)}
        for row in self.fields:
            value = config.get(row.theirs, row.default)
            check(value is not REQUIRED, f"{FILE} has no {row.theirs}")
            try:
                check_type(ours[row.ours], value)
            except ValueError:
                raise ValueError(
                    f"{FILE}: {row.theirs} is {value!r:.60}, not {ours[row.ours].type}"
                ) from None
            values[row.ours] = value
        for rule in self.rules:
            values |= rule.read(config)
        with about(FILE):
            return ModelConfig(**{"seq_length": values["max_position_embeddings"], **values})

    def write(self, model: ModelConfig) -> JsonObject:
        """Return the fields of config.json that describe a model. Raise ValueError if none do."""
        config = {row.theirs: getattr(model, row.ours) for row in self.fields}
        for rule in self.rules:
            config |= rule.write(model)
        return config

    def fits(self, model: ModelConfig) -> bool:
        """Return True if config.json describes the model: the same weights then compute the same."""
        divided = model.kv_channels * model.num_attention_heads == model.hidden_size
        routes = _ROUTER in self.places
        if (
            model.sinkhorn
            or routes != bool(model.num_experts)
            or not (divided or self.own_head_size)
        ):
            return False
        with suppress(ValueError, ArithmeticError):
            return same_weights(self.read(self.write(model)), model)
        return False


OUTPUT = "output_layer"
_ROUTER = "decoder.layers.{}.mlp.router"
_WORD_EMBEDDINGS = "embedding.word_embeddings"
_POSITION_EMBEDDINGS = "embedding.position_embeddings"
_FINAL_NORM = "decoder.final_layernorm"


def _places(
    layer: Mapping[str, str | Counterpart],
    prefix: str = "layers.{}.",
    outside: Mapping[str, str] = {},
) -> dict[str, Counterpart]:
    """Return an architecture's places. A name alone: their tensor equals ours.

    prefix: of their names in a layer
    """
    places = {ours: Counterpart((theirs,)) for ours, theirs in outside.items()}
    for ours, theirs in layer.items():
        names, arranged = Counterpart((theirs,)) if isinstance(theirs, str) else theirs
        names = tuple(prefix + name for name in names)
        places[f"decoder.layers.{{}}.{ours}"] = Counterpart(names, arranged)
    return places


def _counterpart(arranged: Arrangement, *names: str) -> Counterpart:
    return Counterpart(names, arranged)


def _only(values: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the supported values of an architecture's fields, a tuple or one value each."""
    return {name: value if isinstance(value, tuple) else (value,) for name, value in values.items()}


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
    only=_only(
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        }
    ),
    block={},
    places=_places(
        prefix="h.{}.",
        layer={
            "input_layernorm": "ln_1",
            "self_attention.linear_qkv": _counterpart(conv_query_key_value, "attn.c_attn"),
            "self_attention.linear_proj": _counterpart(transposed, "attn.c_proj"),
            "pre_mlp_layernorm": "ln_2",
            "mlp.linear_fc1": _counterpart(transposed, "mlp.c_fc"),
            "mlp.linear_fc2": _counterpart(transposed, "mlp.c_proj"),
        },
        outside={
            _WORD_EMBEDDINGS: "wte",
            _POSITION_EMBEDDINGS: "wpe",
            _FINAL_NORM: "ln_f",
            OUTPUT: "lm_head",
        },
    ),
    unused=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),  # causal masks
)

# Architectures near to Llama's, which differ from it in some values.
_FIELDS = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("initializer_range", "init_method_std", 0.02),
    Field("attention_dropout", "attention_dropout", 0.0),
)
_MAX_POSITIONS = Field("max_position_embeddings", "max_position_embeddings")
_EPSILON = Field("rms_norm_eps", "layernorm_epsilon", 1e-6)
_SIZE_FIELDS = (*_FIELDS, Field("intermediate_size", "ffn_hidden_size"), _MAX_POSITIONS)
_DECODER_FIELDS = (*_SIZE_FIELDS, _EPSILON)
_LARGER_EPSILON = Field("rms_norm_eps", "layernorm_epsilon", 1e-5)
_UNTIED_HEAD = tied(False)
_SILU = {"hidden_act": ("silu", "swish")}
_NO_WINDOW = {"use_sliding_window": False}
_NO_BIAS = {"attention_bias": False}
_NO_BIASES = {**_NO_BIAS, "mlp_bias": False}
_DECODER_BLOCK = {
    "normalization": "RMSNorm",
    "disable_bias_linear": True,
    "swiglu": True,
    "hidden_dropout": 0.0,
}
_DECODER_PLACES = _places(
    {
        "input_layernorm": "input_layernorm",
        "self_attention.linear_qkv": _counterpart(
            query_key_value, *(f"self_attn.{part}_proj" for part in "qkv")
        ),
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "self_attention.linear_proj": "self_attn.o_proj",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.linear_fc1": _counterpart(stacked, "mlp.gate_proj", "mlp.up_proj"),
        "mlp.linear_fc2": "mlp.down_proj",
    },
    outside={_WORD_EMBEDDINGS: "embed_tokens", _FINAL_NORM: "norm", OUTPUT: "lm_head"},
)
_STACKED_EXPERTS = _places(
    prefix="layers.{}.mlp.",
    layer={
        "mlp.router": "gate",
        "mlp.experts.linear_fc1.weight": _counterpart(stacked_experts, "experts.gate_up_proj"),
        "mlp.experts.linear_fc2.weight": "experts.down_proj",
    },
)


def _decoder(
    name: str,
    model_type: str,
    *,
    only: Mapping[str, Any] = {},
    block: Mapping[str, Any] = {},
    rope: Rule = ROTARY,
    head: Rule = _UNTIED_HEAD,
    more: tuple[Field | Rule, ...] = (),
    **others: Any,
) -> Architecture:
    """Build a row near to LLAMA.

    only, block, more, places: next to Llama's values, or in place of them
    others: as in `Architecture`, Llama's by default
    """
    fields = [each for each in more if isinstance(each, Field)]
    rules = [each for each in more if isinstance(each, Rule)]
    replaced = {field.ours for field in fields}
    kept = (field for field in _DECODER_FIELDS if field.ours not in replaced)
    row: dict[str, Any] = {
        "name": name,
        "model_type": model_type,
        "prefix": "model.",
        "fields": (*kept, *fields),
        "rules": (HEADS, rope, head, *rules),
        "experts": _STACKED_EXPERTS,
        **others,
        "places": _DECODER_PLACES | others.get("places", {}),
    }
    return Architecture(only=_only({**_SILU, **only}), block={**_DECODER_BLOCK, **block}, **row)


LLAMA = _decoder("LlamaForCausalLM", "llama", only=_NO_BIASES)
_GEMMA_ONLY = {
    "hidden_act": (None, "gelu_pytorch_tanh"),
    "hidden_activation": "gelu_pytorch_tanh",
    **_NO_BIAS,
    "use_bidirectional_attention": (None, False),
}
_GEMMA_BLOCK = {"apply_layernorm_1p": True, "swiglu": False, "geglu": True}
# Norms of the outputs of attention and the MLP, and around both.
_POST_PLACES = _places(
    {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
)
_SANDWICH_PLACES = _POST_PLACES | _places({"pre_mlp_layernorm": "pre_feedforward_layernorm"})
_QK_NORM_ALL_HEADS = {"qk_layernorm": True, "qk_layernorm_all_heads": True}

# The expert's gate and what it multiplies are two tensors of each expert.
_EXPERT_PLACES = _places(
    prefix="layers.{}.mlp.",
    layer={
        "mlp.router": "gate",
        "mlp.experts.linear_fc1": _counterpart(
            stacked_of_expert, "experts.{expert}.gate_proj", "experts.{expert}.up_proj"
        ),
        "mlp.experts.linear_fc2": _counterpart(stacked, "experts.{expert}.down_proj"),
        "mlp.shared_experts.linear_fc1": _counterpart(
            stacked, "shared_expert.gate_proj", "shared_expert.up_proj"
        ),
        "mlp.shared_experts.linear_fc2": "shared_expert.down_proj",
        "mlp.shared_experts.gate": "shared_expert_gate",
    },
)
_ROUTER_TOPK = Field("num_experts_per_tok", "moe_router_topk")
_EXPERT_WIDTH = Field("moe_intermediate_size", "moe_ffn_hidden_size")
_SPARSE_RULES = (FULL_ATTENTION, EXPERTS, SPARSE_LAYERS)
GLM = _decoder(
    "GlmForCausalLM",
    "glm",
    defaults={"num_key_value_heads": 2, "head_dim": 128},
    more=(
        Field("rms_norm_eps", "layernorm_epsilon", 1.5625e-07),
        Field("attention_bias", "add_qkv_bias", True),
        no_padding(151329),
    ),
    rope=rotary(0.5),
    block={"rotary_interleaved": True},
    places=_places({"mlp.linear_fc1": _counterpart(fused_stacked, "mlp.gate_up_proj")}),
)
_SIGMOID_EXPERT_BLOCK = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
_SHARED_EXPERT_PLACES = _EXPERT_PLACES | _places(
    prefix="layers.{}.mlp.",
    layer={
        "mlp.router.expert_bias": "gate.e_score_correction_bias",
        "mlp.shared_experts.linear_fc1": _counterpart(
            stacked, "shared_experts.gate_proj", "shared_experts.up_proj"
        ),
        "mlp.shared_experts.linear_fc2": "shared_experts.down_proj",
    },
)
# Of an MTP module, which is stored as a layer, with copies of the word embedding and the head.
PREDICTION_PLACES = _places(
    {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "final_layernorm": "shared_head.norm",
    }
)
EMBEDDING_COPY = "layers.{}.embed_tokens.weight"
HEAD_COPY = "layers.{}.shared_head.head.weight"
_ROUTED_EXPERTS = Field("n_routed_experts", "num_experts")
_LATENT_BLOCK = {"multi_latent_attention": True, "qk_layernorm": True}
_LATENT_FIELDS = (
    Field("q_lora_rank", "q_lora_rank"),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_nope_head_dim", "qk_head_dim"),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim"),
)
_VALUE_SIZE = Field("v_head_dim", "v_head_dim")
_LATENT_RULES = (LATENT_ROTARY, LATENT_HEADS)
_LATENT_PLACES = _places(
    {
        "self_attention.linear_q_proj": "self_attn.q_proj",
        "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.q_layernorm": "self_attn.q_a_layernorm",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj",
    }
)
DEEPSEEK_V3 = _decoder(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    more=(
        *_LATENT_FIELDS,
        _VALUE_SIZE,
        _ROUTED_EXPERTS,
        _ROUTER_TOPK,
    ),
    rules=(*_LATENT_RULES, _UNTIED_HEAD, EXPERT_WIDTHS, GROUPS, FIRST_DENSE, PREDICTIONS),
    only={
        **_NO_BIAS,
        "rope_interleave": True,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    block={**_LATENT_BLOCK, **_SIGMOID_EXPERT_BLOCK},
    places=_SHARED_EXPERT_PLACES | _LATENT_PLACES | PREDICTION_PLACES,
)
_DELTA_NET_FIELDS = tuple(
    Field(name, name, default)
    for name, default in (
        ("linear_conv_kernel_dim", 4),
        ("linear_key_head_dim", 128),
        ("linear_value_head_dim", 128),
        ("linear_num_key_heads", 16),
        ("linear_num_value_heads", 32),
    )
)
_DELTA_NET_BLOCK = {
    "apply_layernorm_1p": True,
    "qk_layernorm": True,
    "attention_output_gate": True,
}
_DELTA_NET_PLACES = _places(
    prefix="layers.{}.linear_attn.",
    layer={
        "self_attention.in_proj": _counterpart(delta_projections, "in_proj_qkvz", "in_proj_ba"),
        "self_attention.conv1d": _counterpart(delta_convolution, "conv1d"),
        "self_attention.dt_bias": "dt_bias",
        "self_attention.A_log": "A_log",
        "self_attention.out_norm": "norm",
        "self_attention.out_proj": "out_proj",
    },
)
_SHARED_EXPERT_WIDTH = Field(
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 512
)
_QWEN3_5_PLACES = _DELTA_NET_PLACES | _places(
    prefix="layers.{}.linear_attn.",
    layer={
        "self_attention.in_proj": _counterpart(
            delta_parts, "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
        )
    },
)
_QWEN3_5_ONLY = {
    **_NO_BIAS,
    "attn_output_gate": True,
    "output_gate_type": (None, "swish"),  # of a gated delta net's norm
}

_GPT_OSS_EXPERTS = _places(
    {
        "mlp.experts.linear_fc1.weight": _counterpart(interleaved, "mlp.experts.gate_up_proj"),
        "mlp.experts.linear_fc2.weight": _counterpart(transposed_experts, "mlp.experts.down_proj"),
    },
)

ARCHITECTURES = [
    GPT2,
    LLAMA,
    _decoder(
        "MistralForCausalLM",
        "mistral",
        defaults={"num_key_value_heads": 8},
        more=(window(4096),),
    ),
    _decoder(
        "Qwen2ForCausalLM",
        "qwen2",
        defaults={"num_key_value_heads": 32},
        more=(FULL_ATTENTION,),
        only=_NO_WINDOW,
        block={"add_qkv_bias": True},
    ),
    _decoder(
        "Qwen3ForCausalLM",
        "qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128},
        more=(FULL_ATTENTION,),
        only={**_NO_WINDOW, **_NO_BIAS},
        block={"qk_layernorm": True},
    ),
    _decoder(
        "Phi3ForCausalLM",
        "phi3",
        rules=(
            HEADS,
            rotary(1.0, ("default", "longrope")),
            window(None),
            _UNTIED_HEAD,
            no_padding(32000),
        ),
        more=(_LARGER_EPSILON, Field("resid_pdrop", "hidden_dropout", 0.0)),
        only={"embd_pdrop": 0.0},
        places=_places(
            {
                "self_attention.linear_qkv": _counterpart(
                    fused_query_key_value, "self_attn.qkv_proj"
                ),
                "mlp.linear_fc1": _counterpart(fused_stacked, "mlp.gate_up_proj"),
            },
        ),
    ),
    _decoder(
        "StableLmForCausalLM",
        "stablelm",
        defaults={"num_key_value_heads": 32},
        rope=rotary(0.25),
        more=(
            Field("layer_norm_eps", "layernorm_epsilon", 1e-5),
            Field("use_qkv_bias", "add_qkv_bias", False),
        ),
        only={
            "use_parallel_residual": False,
            "qk_layernorm": False,
            "hidden_dropout": 0.0,
        },
        block={"normalization": "LayerNorm"},
        own_head_size=False,
    ),
    _decoder(
        "OlmoForCausalLM",
        "olmo",
        fields=_SIZE_FIELDS,
        only={**_NO_BIAS, "clip_qkv": None},
        block={"normalization": "PlainLayerNorm", "layernorm_epsilon": 1e-5},
    ),
    _decoder(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        prefix="gpt_neox.",
        more=(
            Field("layer_norm_eps", "layernorm_epsilon", 1e-5),
            Field("hidden_dropout", "hidden_dropout", 0.0),
            Field("use_parallel_residual", "parallel_residual", True),
        ),
        rules=(
            rotary(0.25, names=("rotary_emb_base", "rotary_pct")),
            _UNTIED_HEAD,
        ),
        only={"hidden_act": "gelu", "attention_bias": True},
        block={
            "normalization": "LayerNorm",
            "disable_bias_linear": False,
            "swiglu": False,
            "bias_gelu_fusion": False,
        },
        places=_places(
            {
                "input_layernorm": "input_layernorm",
                "self_attention.linear_qkv": "attention.query_key_value",
                "self_attention.linear_proj": "attention.dense",
                "pre_mlp_layernorm": "post_attention_layernorm",
                "mlp.linear_fc1": "mlp.dense_h_to_4h",
                "mlp.linear_fc2": "mlp.dense_4h_to_h",
            },
            outside={
                _WORD_EMBEDDINGS: "embed_in",
                _FINAL_NORM: "final_layer_norm",
                OUTPUT: "embed_out",
            },
        ),
        unused=re.compile(
            r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        ),
    ),
    _decoder(
        "GraniteForCausalLM",
        "granite",
        more=(MULTIPLIED,),
        only=_NO_BIASES,
    ),
    _decoder(
        "GemmaForCausalLM",
        "gemma",
        defaults={"num_key_value_heads": 16, "head_dim": 256},
        head=tied(True),
        more=(SCALED_EMBEDDING,),
        only={
            **_GEMMA_ONLY,
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": (None, "gelu_pytorch_tanh"),
        },
        block=_GEMMA_BLOCK,
    ),
    Architecture(
        name="FalconForCausalLM",
        model_type="falcon",
        prefix="transformer.",
        fields=(
            *_FIELDS,
            Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
            Field("ffn_hidden_size", "ffn_hidden_size", None),
            Field("max_position_embeddings", "max_position_embeddings", 2048),
        ),
        rules=(NEW_FALCON, ROTARY, tied(True)),
        only=_only(
            {
                "activation": "gelu",
                "alibi": False,
                "parallel_attn": True,
                "bias": False,
                "hidden_dropout": 0.0,
                "num_ln_in_parallel_attn": (2, None),
            }
        ),
        block={"disable_bias_linear": True, "parallel_residual": True, "hidden_dropout": 0.0},
        places=_places(
            prefix="h.{}.",
            layer={
                "input_layernorm": "ln_attn",
                "self_attention.linear_qkv": "self_attention.query_key_value",
                "self_attention.linear_proj": "self_attention.dense",
                "pre_mlp_layernorm": "ln_mlp",
                "mlp.linear_fc1": "mlp.dense_h_to_4h",
                "mlp.linear_fc2": "mlp.dense_4h_to_h",
            },
            outside={_WORD_EMBEDDINGS: "word_embeddings", _FINAL_NORM: "ln_f", OUTPUT: "lm_head"},
        ),
    ),
    _decoder(
        "MixtralForCausalLM",
        "mixtral",
        defaults={"num_key_value_heads": 8, "rope_theta": 1e6},
        more=(
            _LARGER_EPSILON,
            _ROUTER_TOPK,
            Field("num_local_experts", "num_experts"),
            window(None),
        ),
        only={"router_jitter_noise": 0.0},
        places=_EXPERT_PLACES
        | _places(
            prefix="layers.{}.block_sparse_moe.",
            layer={
                "mlp.router": "gate",
                "mlp.experts.linear_fc1": _counterpart(
                    stacked_of_expert, "experts.{expert}.w1", "experts.{expert}.w3"
                ),
                "mlp.experts.linear_fc2": _counterpart(stacked, "experts.{expert}.w2"),
            },
        ),
    ),
    _decoder(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        defaults={"num_key_value_heads": 16},
        more=(
            _ROUTER_TOPK,
            _EXPERT_WIDTH,
            Field("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
            *_SPARSE_RULES,
        ),
        places=_EXPERT_PLACES,
        only={**_NO_WINDOW, "qkv_bias": True},
        block={"moe_shared_expert_gate": True, "add_qkv_bias": True},
    ),
    _decoder(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        defaults={"num_key_value_heads": 4},
        more=(_ROUTER_TOPK, _EXPERT_WIDTH, *_SPARSE_RULES),
        places=_EXPERT_PLACES,
        only={
            **_NO_WINDOW,
            **_NO_BIAS,
            "shared_expert_intermediate_size": (None, 0),
            "use_qk_norm": (None, True),
        },
        block={"qk_layernorm": True},
    ),
    _decoder(
        "OlmoeForCausalLM",
        "olmoe",
        places=_EXPERT_PLACES,
        more=(_LARGER_EPSILON, _ROUTER_TOPK, EXPERTS),
        only={**_NO_BIAS, "clip_qkv": None},
        block=_QK_NORM_ALL_HEADS,
        own_head_size=False,
    ),
    _decoder(
        "SmolLM3ForCausalLM",
        "smollm3",
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
        head=tied(True),
        more=(FULL_ATTENTION, NO_ROPE_LAYERS, no_padding(128004)),
        only={
            **_NO_WINDOW,
            **_NO_BIASES,
            "pretraining_tp": (1, 2, None),  # transformers' class does not read it
        },
    ),
    _decoder(
        "MinistralForCausalLM",
        "ministral",
        defaults={"num_key_value_heads": 8},
        more=(windows_by_layer(4096),),
    ),
    _decoder(
        "Olmo2ForCausalLM",
        "olmo2",
        more=(_LARGER_EPSILON,),
        only=_NO_BIAS,
        block={**_QK_NORM_ALL_HEADS, "norm_placement": "post"},
        places=_POST_PLACES,
        own_head_size=False,
    ),
    _decoder(
        "Olmo3ForCausalLM",
        "olmo3",
        more=(_LARGER_EPSILON, windows_by_layer(4096, every=4)),
        rope=rotary_by_layer(500000.0, 500000.0, name=None, every=4),
        only=_NO_BIAS,
        block={**_QK_NORM_ALL_HEADS, "norm_placement": "post"},
        places=_POST_PLACES,
        own_head_size=False,
    ),
    _decoder(
        "Exaone4ForCausalLM",
        "exaone4",
        defaults={"num_key_value_heads": 32},
        more=(
            _LARGER_EPSILON,
            windows_by_layer(4096, every=4, no_rope=False),
        ),
        only={"reorder_qk_norm": True},
        block={"qk_layernorm": True, "norm_placement": "post"},
        places=_POST_PLACES,
    ),
    _decoder(
        "Gemma2ForCausalLM",
        "gemma2",
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        more=(
            Field("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            Field("final_logit_softcapping", "final_logit_softcapping", 30.0),
            SCALED_EMBEDDING,
            QUERY_SCALE,
            windows_by_layer(4096, every=2),
        ),
        head=tied(True),
        only=_GEMMA_ONLY,
        block={**_GEMMA_BLOCK, "norm_placement": "both"},
        places=_SANDWICH_PLACES,
    ),
    _decoder(
        "Gemma3ForCausalLM",
        "gemma3_text",
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
        },
        more=(
            Field("final_logit_softcapping", "final_logit_softcapping", None),
            SCALED_EMBEDDING,
            QUERY_SCALE,
            windows_by_layer(4096, every=6),
        ),
        rope=rotary_by_layer(1e6, 1e4, name="rope_local_base_freq", every=6),
        head=tied(True),
        only={**_GEMMA_ONLY, "attn_logit_softcapping": None},
        block={**_GEMMA_BLOCK, "norm_placement": "both", "qk_layernorm": True},
        places=_SANDWICH_PLACES,
    ),
    _decoder(
        "Cohere2ForCausalLM",
        "cohere2",
        more=(
            Field("layer_norm_eps", "layernorm_epsilon", 1e-5),
            LOGIT_SCALE,
            windows_by_layer(4096, every=4, no_rope=True),
        ),
        head=tied(True),
        only=_NO_BIAS,
        block={
            "normalization": "LayerNormWithoutBias",
            "parallel_residual": True,
            "parallel_shared_norm": True,
            "rotary_interleaved": True,
        },
        own_head_size=False,
    ),
    GLM,
    replace(
        GLM,
        name="Glm4ForCausalLM",
        model_type="glm4",
        block={**GLM.block, "norm_placement": "both"},
        places={
            **GLM.places,
            **_places(
                {
                    "post_self_attn_layernorm": "post_self_attn_layernorm",
                    "post_mlp_layernorm": "post_mlp_layernorm",
                },
            ),
        },
    ),
    _decoder(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        defaults={"num_key_value_heads": 8},
        more=(
            _LARGER_EPSILON,
            Field("attention_bias", "add_qkv_bias", False),
            Field("use_qk_norm", "qk_layernorm", False),
            _ROUTED_EXPERTS,
            _ROUTER_TOPK,
            EXPERT_WIDTHS,
            GROUPS,
            FIRST_DENSE,
            PREDICTIONS,
        ),
        rope=rotary(0.5),
        only={"norm_topk_prob": True},
        block=_SIGMOID_EXPERT_BLOCK,
        places=_SHARED_EXPERT_PLACES | PREDICTION_PLACES,
    ),
    _decoder(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        defaults={
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
        },
        more=(*_LATENT_FIELDS, _VALUE_SIZE, _ROUTED_EXPERTS, _ROUTER_TOPK),
        rules=(*_LATENT_RULES, _UNTIED_HEAD, EXPERT_WIDTHS, GREEDY_GROUPS, FIRST_DENSE),
        only={
            **_NO_BIASES,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "moe_layer_freq": 1,
        },
        block={
            **_LATENT_BLOCK,
            "moe_router_pre_softmax": True,
        },
        places=_SHARED_EXPERT_PLACES | _LATENT_PLACES,
    ),
    DEEPSEEK_V3,
    replace(DEEPSEEK_V3, model_type="kimi_k2"),
    replace(
        DEEPSEEK_V3,
        name="Glm4MoeLiteForCausalLM",
        model_type="glm4_moe_lite",
        defaults={
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "rms_norm_eps": 1e-5,
        },
        rules=(*_LATENT_RULES, _UNTIED_HEAD, EXPERT_WIDTHS, GROUPS, MLP_LAYERS, PREDICTIONS),
    ),
    _decoder(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        defaults={
            "rms_norm_eps": 1e-5,
            "initializer_range": 0.1,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        more=_LATENT_FIELDS,
        rules=(*_LATENT_RULES, tied(True), SCALED_DEPTH),
        only=_NO_BIASES,
        block=_LATENT_BLOCK,
        places={
            **_LATENT_PLACES,
            **_places(
                {
                    "self_attention.linear_q_proj": _counterpart(
                        queries_in_halves, "self_attn.q_proj"
                    ),
                    "self_attention.linear_q_up_proj": _counterpart(
                        queries_in_halves, "self_attn.q_b_proj"
                    ),
                    "self_attention.linear_kv_down_proj": _counterpart(
                        keys_in_halves, "self_attn.kv_a_proj_with_mqa"
                    ),
                }
            ),
        },
    ),
    _decoder(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        defaults={"position_embedding_type": None, "num_local_experts": 8},
        more=(
            Field("shared_intermediate_size", "ffn_hidden_size", 1024),
            MULTIPLIED,
            ATTENTION_LAYERS,
        ),
        only={
            **_NO_BIAS,
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "normalization_function": "rmsnorm",
        },
        places=_places(
            prefix="layers.{}.shared_mlp.",
            layer={
                "mlp.linear_fc1": _counterpart(fused_stacked, "input_linear"),
                "mlp.linear_fc2": "output_linear",
            },
        ),
    ),
    _decoder(
        "GptOssForCausalLM",
        "gpt_oss",
        defaults={"num_key_value_heads": 8, "head_dim": 64},
        more=(
            _LARGER_EPSILON,
            _ROUTER_TOPK,
            Field("num_local_experts", "num_experts"),
            SWIGLU_LIMIT,
            windows_by_layer(128, every=2),
        ),
        rope=named_rotary(
            {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            }
        ),
        only={"attention_bias": True, "swiglu_alpha": QUICK},
        block={
            "disable_bias_linear": False,
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "softmax_type": LEARNABLE,
        },
        places=_places(
            {
                "self_attention.core_attention.softmax_offset": "self_attn.sinks",
                "mlp.router": "mlp.router",
                "mlp.experts.linear_fc1.bias": _counterpart(
                    interleaved, "mlp.experts.gate_up_proj_bias"
                ),
                "mlp.experts.linear_fc2.bias": "mlp.experts.down_proj_bias",
            },
        )
        | _GPT_OSS_EXPERTS,
        experts=_GPT_OSS_EXPERTS,
    ),
    _decoder(
        "ApertusForCausalLM",
        "apertus",
        more=(_LARGER_EPSILON,),
        rope=named_rotary(
            {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        ),
        only={
            "hidden_act": "xielu",
            **_NO_BIASES,
            "post_norm": False,
            "qk_norm": True,
        },
        block={"qk_layernorm": True, "swiglu": False, "xielu": True},
        places=_places(
            {
                "input_layernorm": "attention_layernorm",
                "pre_mlp_layernorm": "feedforward_layernorm",
                "mlp.linear_fc1": "mlp.up_proj",
                "mlp.activation.alpha_p": "mlp.act_fn.alpha_p",
                "mlp.activation.alpha_n": "mlp.act_fn.alpha_n",
            },
        ),
        constants={
            "layers.{}.mlp.act_fn.beta": XIELU_BETA,
            "layers.{}.mlp.act_fn.eps": XIELU_LIMIT,
        },
    ),
    _decoder(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        defaults={"num_key_value_heads": 4, "head_dim": 256},
        rope=ROTARY_OF_TEXT,
        more=(*_DELTA_NET_FIELDS, LINEAR_LAYERS),
        only=_QWEN3_5_ONLY,
        block=_DELTA_NET_BLOCK,
        places=_QWEN3_5_PLACES,
        leaves_predictions_out=True,
    ),
    _decoder(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        defaults={"num_key_value_heads": 2, "head_dim": 256, "num_experts": 256},
        rope=ROTARY_OF_TEXT,
        more=(LINEAR_LAYERS, NORMALISED_EXPERTS),
        fields=(
            *_FIELDS,
            _MAX_POSITIONS,
            _EPSILON,
            Field("num_experts_per_tok", "moe_router_topk", 8),
            Field("moe_intermediate_size", "moe_ffn_hidden_size", 512),
            _SHARED_EXPERT_WIDTH,
            *_DELTA_NET_FIELDS,
        ),
        only=_QWEN3_5_ONLY,
        block={
            **_DELTA_NET_BLOCK,
            "moe_shared_expert_gate": True,
        },
        places=_EXPERT_PLACES | _QWEN3_5_PLACES,
        leaves_predictions_out=True,
    ),
    _decoder(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 256,
            "num_experts": 512,
            "norm_topk_prob": True,
        },
        rope=rotary(0.25),
        more=(
            _ROUTER_TOPK,
            _EXPERT_WIDTH,
            _SHARED_EXPERT_WIDTH,
            *_DELTA_NET_FIELDS,
            LINEAR_LAYERS,
            EXPERTS,
            SPARSE_LAYERS,
        ),
        only=_NO_BIAS,
        block={**_DELTA_NET_BLOCK, "moe_shared_expert_gate": True},
        places=_EXPERT_PLACES | _DELTA_NET_PLACES,
        leaves_predictions_out=True,
    ),
]
# What the block does not build -> model_types that are near to these.
_UNSUPPORTED = {
    "a bias of the output layer is": ("phi",),
    "this variant of experts is": ("phimoe", "granitemoe"),
    "positions as a slope of each head (ALiBi) are": ("bloom", "mpt"),
}
# model_type with a text_config -> text model types whose language model is converted; the other towers are left out.
TEXT_OF = {
    "gemma3": ("gemma3_text",),
    "mistral3": ("mistral",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
}
# model_type of files whose experts' weights may be MXFP4.
MXFP4_MODELS = ("gpt_oss",)
REFUSED = {kind: f"{what} not supported" for what, kinds in _UNSUPPORTED.items() for kind in kinds}
