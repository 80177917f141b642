"""The architectures of Hugging Face that the block can be: a row each, with what config.json and the tensors are called there.

A new architecture is a row of ARCHITECTURES. How their tensors lie in ours is a view of ours, used to read and to write. Fields of
config.json that are not one field of ModelConfig each (heads, rope, the window, the tied head) have a rule, which reads some of
them as values of ours, and writes them. Left out: reading and writing files (hugging_face.py).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..config.checks import check
from ..config.model_config import LEARNED, ROPE, ModelConfig

FILE = "config.json"
POSITIONS = "original_max_position_embeddings"
# What Llama 3's scaling has -> ModelConfig's names.
LLAMA3 = {"factor": "rope_scaling_factor", "low_freq_factor": "rope_scaling_low_freq_factor",
          "high_freq_factor": "rope_scaling_high_freq_factor", POSITIONS: "rope_scaling_original_max_position_embeddings"}
LARGEST = 1e30  # of a number that is not a size


@dataclass(frozen=True)
class Rule:
    """read: config.json's values -> ModelConfig's. write: a model -> config.json's values."""

    read: Callable[[dict[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


def number(config: dict[str, Any], name: str, default: float | None, whole: bool = False) -> Any:
    """A number or null of config.json, above 0. whole: a whole number. ValueError for anything else."""
    value = config.get(name, default)
    kinds = (int,) if whole else (int, float)
    right = value is None or isinstance(value, kinds) and not isinstance(value, bool) and 0 < value < LARGEST
    what = "a whole number" if whole else "a number"
    check(right, f"{FILE}: {name} is {value!r:.60}, not {what} above 0")
    return default if value is None else value


def tied(default: bool) -> Rule:
    """Whether the head is the word embedding. default: what it means to leave the field out."""
    name = "tie_word_embeddings"

    def read(config: dict[str, Any]) -> dict[str, Any]:
        value = config.get(name, default)
        check(isinstance(value, bool), f"{FILE}: {name} is {value!r:.60}, not bool")
        return {"untie_embeddings_and_output_weights": not value}

    return Rule(read, lambda model: {name: model.tied})


def _read_heads(config: dict[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads")
    groups = number(config, "num_key_value_heads", heads, whole=True)
    shared = {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}
    return {**shared, "kv_channels": number(config, "head_dim", None, whole=True)}


HEADS = Rule(_read_heads, lambda model: {"num_key_value_heads": model.query_groups, "head_dim": model.kv_channels})


def rotary(share: float | None = None, kinds: tuple[str, ...] = ("default",)) -> Rule:
    """Rope. share: of a head that is rotated where config.json does not say it; None: whole heads only. kinds: of scaling."""
    def read(config: dict[str, Any]) -> dict[str, Any]:
        return _read_rope(config, share, kinds)

    def write(model: ModelConfig) -> dict[str, Any]:
        scaling = {"rope_type": "llama3", **{name: getattr(model, ours) for name, ours in LLAMA3.items()}}
        partial = {} if share is None else {"partial_rotary_factor": model.rotary_percent}
        return {"rope_theta": model.rotary_base, "rope_scaling": scaling if model.use_rope_scaling else None, **partial}

    return Rule(read, write)


def _read_rope(config: dict[str, Any], share: float | None, kinds: tuple[str, ...]) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling before it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check(isinstance(rope, dict), f"{FILE}: rope_parameters is {rope!r:.60}, not an object")
    percent = number({**config, **rope}, "partial_rotary_factor", share or 1.0)
    check(share or percent == 1.0, f"{FILE}: partial_rotary_factor is {percent}, and the block of this architecture rotates whole "
          "heads")
    values = {"position_embedding_type": ROPE, "rotary_base": float(number({**config, **rope}, "rope_theta", 10000.0)),
              "rotary_percent": float(percent)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(kind in kinds, f"{FILE}: rope_scaling has type {kind!r:.40}, and the block computes {' or '.join(kinds)}")
    if kind == "default":
        return values
    positions = config.get(POSITIONS, rope.get(POSITIONS, config.get("max_position_embeddings")))  # as transformers has it
    rope = {**rope, POSITIONS: positions}
    for name, ours in LLAMA3.items():
        check(rope.get(name) is not None, f"{FILE}: rope_scaling of type llama3 has no {name}")
        values[ours] = number(rope, name, None, whole=True) if name == POSITIONS else float(number(rope, name, None))
    return {**values, "use_rope_scaling": True}


ROTARY = rotary(kinds=("llama3", "default"))


def window(default: int | None) -> Rule:
    """sliding_window w: a token sees itself and w - 1 before it; null: all. default: what it means to leave the field out."""
    def read(config: dict[str, Any]) -> dict[str, Any]:
        given = config.get("sliding_window", default)
        size = None if given is None else number(config, "sliding_window", default, whole=True)
        _check_layers(config, "full_attention" if size is None else "sliding_attention")
        return {"window_size": None if size is None else f"{size - 1},0"}

    return Rule(read, lambda model: {"sliding_window": model.window})


def _check_layers(config: dict[str, Any], kind: str) -> None:
    """All layers attend alike."""
    kinds = sorted({*map(str, config.get("layer_types") or [kind])})
    check(kinds == [kind], f"{FILE}: layer_types has {' and '.join(kinds)}, and the block computes {kind} in all layers")


def _read_full(config: dict[str, Any]) -> dict[str, Any]:
    _check_layers(config, "full_attention")
    return {}


FULL_ATTENTION = Rule(_read_full, lambda model: {})
NO_DROPOUT = Rule(lambda config: {"hidden_dropout": 0.0}, lambda model: {})  # these architectures have none between layers


def no_padding(default: int) -> Rule:
    """No token that stands for padding where the vocabulary does not have the one that a missing pad_token_id means."""
    return Rule(lambda config: {}, lambda model: {"pad_token_id": None} if (model.vocab_size or 0) <= default else {})


Shape = tuple[int, ...]
Arrangement = Callable[[Tensor, int, ModelConfig], tuple[list[Tensor], Shape]]
"""(our tensor, number of theirs among those that make it, model) -> (views of ours, whose elements one view after another are those
of theirs; their shape)."""


def whole(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The same tensor."""
    return [ours], tuple(ours.shape)


def transposed(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """GPT-2's Conv1D holds (inputs, outputs)."""
    return [ours.t()], tuple(ours.t().shape)


def conv_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """GPT-2's c_attn: (h, 3 n d), all queries, all keys, all values; ours has a head's three after another, (n 3 d, h)."""
    heads = ours.view(model.num_attention_heads, 3, -1, *ours.shape[1:]).transpose(0, 1)  # (3, n, d, h) or (3, n, d)
    theirs = heads.movedim(-1, 0) if ours.dim() == 2 else heads
    return [theirs], (*ours.shape[1:], len(ours))


def query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """Queries (n d, h), keys (g d, h) or values (g d, h); ours has of each group its queries, its key and its value."""
    queries = model.num_attention_heads // model.query_groups
    groups = ours.view(model.query_groups, queries + 2, model.kv_channels, *ours.shape[1:])
    theirs = groups[:, (slice(0, queries), slice(queries, queries + 1), slice(queries + 1, queries + 2))[part]]
    return [theirs], (theirs.shape[0] * theirs.shape[1] * theirs.shape[2], *ours.shape[1:])


def stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The gate (f, h) and what it multiplies, (f, h); ours is (2, f, h)."""
    return [ours[part]], tuple(ours.shape[1:])


def fused_query_key_value(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """All queries, all keys, all values, ((n + 2 g) d, h); ours as in `query_key_value`."""
    return [query_key_value(ours, number, model)[0][0] for number in range(3)], tuple(ours.shape)


def fused_stacked(ours: Tensor, part: int, model: ModelConfig) -> tuple[list[Tensor], Shape]:
    """The gate and what it multiplies, (2 f, h); ours is (2, f, h)."""
    return [ours], (2 * ours.shape[1], *ours.shape[2:])


REQUIRED = object()
# As Architecture.only, of every architecture.
ONLY = {"quantization_config": (None,), "rope_interleaved": (False, None), "pretraining_tp": (1, None)}


@dataclass(frozen=True)
class Field:
    """A field of config.json that is one of ModelConfig's. default: what it means to leave it out; REQUIRED: a mistake."""

    theirs: str
    ours: str
    default: Any = REQUIRED


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A row.

    name, model_type: as config.json has them. prefix: of all tensors but the head's; published files may lack it. fields: those
    that are one of ours. rules: those that are not. only: fields of theirs -> the values that the block computes, the first one
    written, which is what leaving the field out means. block: our values that are what this architecture is. places: our places ->
    names of theirs, without the prefix, and how they lie in ours. unused: tensors of published files that are not weights.
    own_head_size: heads may be of another size than h / n.
    """

    name: str
    model_type: str
    prefix: str
    fields: tuple[Field, ...]
    rules: tuple[Rule, ...]
    only: Mapping[str, tuple[Any, ...]]
    block: Mapping[str, Any]
    places: Mapping[str, tuple[tuple[str, ...], Arrangement]]
    unused: re.Pattern = field(default=re.compile(r".*\.rotary_emb\.inv_freq"))
    own_head_size: bool = True

    @property
    def without_head(self) -> str:
        """What transformers calls the model without its head, which a tied head needs no tensor for."""
        return re.sub("(ForCausalLM|LMHeadModel)$", "Model", self.name)

    def fits(self, model: ModelConfig) -> bool:
        """Whether a model is of this architecture."""
        divided = model.kv_channels * model.num_attention_heads == model.hidden_size
        return (divided or self.own_head_size) and all(getattr(model, name) == value for name, value in self.block.items())


_LAYER = "decoder.layers.{}."
GPT2 = Architecture(
    name="GPT2LMHeadModel", model_type="gpt2", prefix="transformer.",
    fields=(Field("n_layer", "num_layers"), Field("n_embd", "hidden_size"), Field("n_head", "num_attention_heads"),
            Field("n_inner", "ffn_hidden_size", None), Field("n_positions", "max_position_embeddings"),
            Field("vocab_size", "vocab_size"), Field("layer_norm_epsilon", "layernorm_epsilon", 1e-5),
            Field("initializer_range", "init_method_std", 0.02), Field("resid_pdrop", "hidden_dropout", 0.1),
            Field("attn_pdrop", "attention_dropout", 0.1)),
    rules=(tied(True),),
    only={"activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "scale_attn_weights": (True,),
          "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    block={"normalization": "LayerNorm", "disable_bias_linear": False, "position_embedding_type": LEARNED, "swiglu": False,
           "squared_relu": False, "bias_gelu_fusion": True, "group_query_attention": False, "qk_layernorm": False,
           "window_size": None},
    places={"embedding.word_embeddings": (("wte",), whole), "embedding.position_embeddings": (("wpe",), whole),
            _LAYER + "input_layernorm": (("h.{}.ln_1",), whole),
            _LAYER + "self_attention.linear_qkv": (("h.{}.attn.c_attn",), conv_query_key_value),
            _LAYER + "self_attention.linear_proj": (("h.{}.attn.c_proj",), transposed),
            _LAYER + "pre_mlp_layernorm": (("h.{}.ln_2",), whole),
            _LAYER + "mlp.linear_fc1": (("h.{}.mlp.c_fc",), transposed),
            _LAYER + "mlp.linear_fc2": (("h.{}.mlp.c_proj",), transposed),
            "decoder.final_layernorm": (("ln_f",), whole), "output_layer": (("lm_head",), whole)},
    unused=re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),  # causal masks
    own_head_size=False)

_DECODER_FIELDS = (
    Field("num_hidden_layers", "num_layers"), Field("hidden_size", "hidden_size"),
    Field("num_attention_heads", "num_attention_heads"), Field("intermediate_size", "ffn_hidden_size"),
    Field("max_position_embeddings", "max_position_embeddings"), Field("vocab_size", "vocab_size"),
    Field("initializer_range", "init_method_std", 0.02), Field("attention_dropout", "attention_dropout", 0.0))


def _with_epsilon(theirs: str, default: float) -> tuple[Field, ...]:
    return (*_DECODER_FIELDS, Field(theirs, "layernorm_epsilon", default))


_SILU = {"hidden_act": ("silu", "swish")}
_NO_WINDOW = {**_SILU, "use_sliding_window": (False,)}
_DECODER_BLOCK = {"normalization": "RMSNorm", "disable_bias_linear": True, "position_embedding_type": ROPE, "swiglu": True,
                  "rotary_percent": 1.0, "rotary_interleaved": False, "rotary_seq_len_interpolation_factor": None,
                  "add_qkv_bias": False, "qk_layernorm": False}
_DECODER_PLACES = {
    "embedding.word_embeddings": (("embed_tokens",), whole),
    _LAYER + "input_layernorm": (("layers.{}.input_layernorm",), whole),
    _LAYER + "self_attention.linear_qkv": (tuple(f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"), query_key_value),
    _LAYER + "self_attention.q_layernorm": (("layers.{}.self_attn.q_norm",), whole),
    _LAYER + "self_attention.k_layernorm": (("layers.{}.self_attn.k_norm",), whole),
    _LAYER + "self_attention.linear_proj": (("layers.{}.self_attn.o_proj",), whole),
    _LAYER + "pre_mlp_layernorm": (("layers.{}.post_attention_layernorm",), whole),
    _LAYER + "mlp.linear_fc1": (("layers.{}.mlp.gate_proj", "layers.{}.mlp.up_proj"), stacked),
    _LAYER + "mlp.linear_fc2": (("layers.{}.mlp.down_proj",), whole),
    "decoder.final_layernorm": (("norm",), whole), "output_layer": (("lm_head",), whole)}
_decoder = functools.partial(Architecture, prefix="model.", fields=_with_epsilon("rms_norm_eps", 1e-6), places=_DECODER_PLACES)

LLAMA = _decoder(
    name="LlamaForCausalLM", model_type="llama", rules=(HEADS, ROTARY, tied(False), NO_DROPOUT),
    only={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)}, block={**_DECODER_BLOCK, "window_size": None})
MISTRAL = _decoder(
    name="MistralForCausalLM", model_type="mistral", rules=(HEADS, ROTARY, window(4096), tied(False), NO_DROPOUT),
    only=_SILU, block=_DECODER_BLOCK)
QWEN2 = _decoder(
    name="Qwen2ForCausalLM", model_type="qwen2", rules=(HEADS, ROTARY, FULL_ATTENTION, tied(False), NO_DROPOUT),
    only=_NO_WINDOW, block={**_DECODER_BLOCK, "window_size": None, "add_qkv_bias": True})
QWEN3 = _decoder(
    name="Qwen3ForCausalLM", model_type="qwen3", rules=(HEADS, ROTARY, FULL_ATTENTION, tied(False), NO_DROPOUT),
    only={**_NO_WINDOW, "attention_bias": (False,)}, block={**_DECODER_BLOCK, "window_size": None, "qk_layernorm": True})
_PARTLY_TURNED = {name: value for name, value in _DECODER_BLOCK.items() if name != "rotary_percent"} | {"use_rope_scaling": False}
_LAYER_NORM = {name: value for name, value in _PARTLY_TURNED.items() if name != "add_qkv_bias"} | {
    "normalization": "LayerNorm", "window_size": None}
PHI3 = _decoder(
    name="Phi3ForCausalLM", model_type="phi3", rules=(HEADS, rotary(1.0), window(None), tied(False), no_padding(32000)),
    fields=(*_with_epsilon("rms_norm_eps", 1e-5), Field("resid_pdrop", "hidden_dropout", 0.0)),
    only={**_SILU, "embd_pdrop": (0.0,)}, block=_PARTLY_TURNED,
    places={**_DECODER_PLACES, _LAYER + "self_attention.linear_qkv": (("layers.{}.self_attn.qkv_proj",), fused_query_key_value),
            _LAYER + "mlp.linear_fc1": (("layers.{}.mlp.gate_up_proj",), fused_stacked)})
STABLELM = _decoder(
    name="StableLmForCausalLM", model_type="stablelm", rules=(HEADS, rotary(0.25), tied(False), NO_DROPOUT),
    fields=(*_with_epsilon("layer_norm_eps", 1e-5), Field("use_qkv_bias", "add_qkv_bias", False)),
    only={**_SILU, "use_parallel_residual": (False,), "qk_layernorm": (False,), "hidden_dropout": (0.0,)},
    block=_LAYER_NORM, own_head_size=False)

ARCHITECTURES = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, STABLELM)
# model_type of an architecture that is near to these -> what it has that the block does not build.
REFUSED = {
    "olmo": "norms without weights are not built", "granite": "multipliers of the residual stream and the logits are not built",
    "gemma": "norms with weights stored as their difference from 1, and gates with GELU, are not built",
    "gpt_neox": "attention and MLP in parallel are not built", "olmo2": "norms after attention and after the MLP are not built",
    "olmo3": "norms after attention and after the MLP are not built", "gemma2": "soft-capped logits are not built",
    "gemma3_text": "layers that differ in their window are not built", "gemma3": "images are not built",
    "phi": "a bias of the output layer is not built",
    "falcon": "a multi-query layout with one norm for attention and MLP in parallel is not built",
    "phimoe": "experts are not built", "mixtral": "experts are not built", "qwen2_moe": "experts are not built",
    "qwen3_moe": "experts are not built", "olmoe": "experts are not built", "granitemoe": "experts are not built",
    "bloom": "positions by a slope of each head (ALiBi) are not built",
    "mpt": "positions by a slope of each head (ALiBi) are not built"}
