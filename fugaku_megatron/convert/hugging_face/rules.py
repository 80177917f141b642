"""Rules for config.json fields without a ModelConfig counterpart: heads, windows, experts, tied head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ...config.fields import check
from ...config.layer_kinds import ATTENTION, GATED_DELTA_NET
from ...config.model import ModelConfig
from ...text.named_files import JsonObject

FILE = "config.json"
LARGEST = 1e30  # of a number that is not a size


@dataclass(frozen=True)
class Rule:
    """Conversion between several config.json fields and ModelConfig.

    read: config.json -> ModelConfig values
    write: model -> config.json values
    names: fields that `read` uses
    """

    read: Callable[[JsonObject], JsonObject]
    write: Callable[[ModelConfig], JsonObject] = lambda model: {}
    names: tuple[str, ...] = ()


def number(config: JsonObject, name: str, default: float | None, whole: bool = False) -> Any:
    """Return a number above 0 or null. Raise ValueError for anything else. whole: an integer"""
    value = config.get(name, default)
    kinds = (int,) if whole else (int, float)
    right = (
        value is None
        or isinstance(value, kinds)
        and not isinstance(value, bool)
        and 0 < value < LARGEST
    )
    what = "a whole number" if whole else "a number"
    check(right, f"{FILE}: {name} is {value!r:.60}, not {what} above 0")
    return default if value is None else value


def integer(config: JsonObject, name: str, default: int | None = None) -> Any:
    return number(config, name, default, whole=True)


def layer_count(config: JsonObject) -> int:
    return integer(config, "num_hidden_layers") or 0


def every_nth(step: int, layers: int) -> list[bool]:
    return [(layer + 1) % step == 0 for layer in range(layers)]


def boolean(config: JsonObject, name: str, default: bool | None = None) -> bool:
    value = config.get(name, default)
    check(isinstance(value, bool), f"{FILE}: {name} is {value!r:.60}, not bool")
    return bool(value)


def tied(default: bool) -> Rule:
    name = "tie_word_embeddings"
    return Rule(
        lambda config: {"untie_embeddings_and_output_weights": not boolean(config, name, default)},
        lambda model: {name: model.tied},
        (name,),
    )


def _read_groups(config: JsonObject, name: str) -> JsonObject:
    heads = config.get("num_attention_heads")
    groups = integer(config, name, heads)
    return {"group_query_attention": True, "num_query_groups": groups} if groups != heads else {}


def _read_new_falcon(config: JsonObject) -> JsonObject:
    new = config.get("new_decoder_architecture", False)
    check(
        new is True,
        f"{FILE}: new_decoder_architecture is {new!r:.40}, and the block computes True: two norms in a layer",
    )
    return _read_groups(config, "num_kv_heads")


NEW_FALCON = Rule(
    _read_new_falcon,
    lambda model: {"new_decoder_architecture": True, "num_kv_heads": model.query_groups},
    ("new_decoder_architecture", "num_kv_heads"),
)
HEADS = Rule(
    lambda config: {
        **_read_groups(config, "num_key_value_heads"),
        "kv_channels": integer(config, "head_dim"),
    },
    lambda model: {"num_key_value_heads": model.query_groups, "head_dim": model.kv_channels},
    ("num_key_value_heads", "head_dim"),
)


def window(default: int | None) -> Rule:
    """Convert sliding_window w: a token sees itself and w - 1 before it; null: all. default: if
    missing.
    """

    def read(config: JsonObject) -> JsonObject:
        size = integer({"sliding_window": default, **config}, "sliding_window")
        kind = FULL if size is None else WINDOWED
        _check_layers(config, kind, default=kind)
        return {"window_size": None if size is None else f"{size - 1},0"}

    return Rule(
        read,
        lambda model: {"sliding_window": model.window},
        ("sliding_window", "layer_types"),
    )


WINDOWED = "sliding_attention"
FULL = "full_attention"


def _pattern_length(pattern: object) -> int | None:
    """Return N of a pattern in which every Nth layer is FULL: N, or as EXAONE 4 writes it, "LLLG" for 4."""
    if isinstance(pattern, str) and re.fullmatch("L*G", pattern):
        return len(pattern)
    name = "sliding_window_pattern"
    length: int | None = integer({name: pattern}, name)
    return length


def _which(name: str, kinds: Any, layers: int, either: tuple[str, str]) -> list[bool]:
    """Return True for each layer of the second kind. Raise ValueError for other values of a field."""
    right = isinstance(kinds, list) and len(kinds) == layers and {*map(str, kinds)} <= {*either}
    check(
        right,
        f"{FILE}: {name} is {kinds!r:.80}, not {' or '.join(either)} for each of {layers} layers",
    )
    return [kind == either[1] for kind in kinds]


def full_layers(config: JsonObject, default: int | None, every: int | None) -> list[bool]:
    """Return True for each layer without a window.

    default, every: as in `windows_by_layer`
    """
    layers = layer_count(config)
    kinds = config.get("layer_types")
    if kinds is not None:
        return _which("layer_types", kinds, layers, (WINDOWED, FULL))
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", every))
    step = _pattern_length(pattern)
    if config.get("sliding_window", default) is None:
        step = 1
    return every_nth(step or layers + 1, layers)


def _list(layers: Iterable[bool]) -> str:
    return f"[{','.join(str(int(layer)) for layer in layers)}]"


def layer_pattern_of(exceptions: list[bool], of_rope: bool = False) -> str | None:
    """Return the value of a flag for these layers: None without exceptions, N if they are every Nth layer, or a list.

    of_rope: the list has 1 for an exception, and N must divide the number of layers
    """
    if not any(exceptions):
        return None
    layers = len(exceptions)
    step = exceptions.index(True) + 1
    regular = every_nth(step, layers) == exceptions
    if regular and not (of_rope and layers % step):
        return str(step)
    return _list(exception == of_rope for exception in exceptions)


def windows_by_layer(
    default: int | None, every: int | None = None, no_rope: bool | None = None
) -> Rule:
    """Convert sliding_window and layer_types.

    default: sliding_window if missing
    every: without layer_types, every Nth layer has no window; None: all layers have one, or none
    no_rope: layers without a window are not rotated; True: also in a model without any window
    """

    def read(config: JsonObject) -> JsonObject:
        config = {"sliding_window": default, **config}
        full = full_layers(config, default, every)
        values: JsonObject = {}
        if not all(full):
            size = integer(config, "sliding_window")
            if size is None:
                raise ValueError(
                    f"{FILE}: layer_types has {WINDOWED}, and sliding_window is null: correct one of them"
                )
            values["window_size"] = f"{size - 1},0"
            values["window_attn_skip_freq"] = layer_pattern_of(full)
        if no_rope or no_rope is not None and config["sliding_window"] is not None:
            values["no_rope_freq"] = layer_pattern_of(full, of_rope=True)
        return values

    def write(model: ModelConfig) -> JsonObject:
        kinds = [FULL if kind.window is None else WINDOWED for kind in model.layer_kinds]
        return {"sliding_window": model.window, "layer_types": kinds}

    names = ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern")
    return Rule(read, write, names)


LINEAR = "linear_attention"


def _read_linear_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    kinds = config.get("layer_types")
    if kinds is None:
        full = every_nth(integer(config, "full_attention_interval", 4), layers)
    else:
        full = _which("layer_types", kinds, layers, (LINEAR, FULL))
    if all(full):
        return {"experimental_attention_variant": None, "linear_attention_freq": None}
    freq = layer_pattern_of(full)
    return {
        "experimental_attention_variant": GATED_DELTA_NET,
        "linear_attention_freq": freq or _list(True for _ in full),
    }


LINEAR_LAYERS = Rule(
    _read_linear_layers,
    lambda model: {
        "layer_types": [FULL if kind.mixer == ATTENTION else LINEAR for kind in model.layer_kinds]
    },
    ("layer_types", "full_attention_interval"),
)


def _read_query_scale(config: JsonObject) -> JsonObject:
    size = number(config, "query_pre_attn_scalar", 256)
    head = integer(config, "head_dim")
    return {"attention_multiplier": None if size == head else float(size) ** -0.5}


QUERY_SCALE = Rule(
    _read_query_scale,
    lambda model: {"query_pre_attn_scalar": round(model.attention_scale**-2)},
    ("query_pre_attn_scalar",),
)


def _read_expert_widths(config: JsonObject) -> JsonObject:
    width = integer(config, "moe_intermediate_size", 1408)
    factor = float(number(config, "routed_scaling_factor", 1.0))
    return {
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * integer(config, "n_shared_experts", 1),
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
    }


def _write_expert_widths(model: ModelConfig) -> JsonObject:
    width = model.moe_ffn_hidden_size or 1
    return {
        "moe_intermediate_size": width,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


# Experts and shared experts of one width, and the factor of their scores.
EXPERT_WIDTHS = Rule(
    _read_expert_widths,
    _write_expert_widths,
    ("moe_intermediate_size", "n_shared_experts", "routed_scaling_factor"),
)


def _group_values(config: JsonObject, scored: int) -> JsonObject:
    """Return the values of `n_group` and `topk_group`. scored: experts whose scores are summed for a group's"""
    groups = integer(config, "n_group", 1)
    best = integer(config, "topk_group", 1)
    chosen = integer(config, "num_experts_per_tok", 8)
    experts = {1: "one expert", 2: "two experts"}[scored]
    check(
        groups == 1 or chosen == scored * best,
        f"{FILE}: topk_group is {best} and num_experts_per_tok {chosen}, and the block computes groups "
        f"by the sum of {experts} for {experts} of each",
    )
    return {
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
    }


def _write_groups(model: ModelConfig) -> JsonObject:
    return {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
    }


def _read_sigmoid_groups(config: JsonObject) -> JsonObject:
    check(
        config.get("num_experts_per_tok") != 1,
        f"{FILE}: num_experts_per_tok is 1, whose score transformers replaces by 1: the block does not",
    )
    return _group_values(config, scored=2)


# Groups of experts with sigmoid scores.
GROUPS = Rule(_read_sigmoid_groups, _write_groups, ("n_group", "topk_group"))

_GREEDY = "greedy"
_GREEDY_GROUPS = "group_limited_greedy"


def _read_greedy_groups(config: JsonObject) -> JsonObject:
    method = config.get("topk_method", _GREEDY)
    check(
        method in (_GREEDY, _GREEDY_GROUPS),
        f"{FILE}: topk_method is {method!r:.60}, and the block computes '{_GREEDY}' or '{_GREEDY_GROUPS}'",
    )
    if method == _GREEDY:
        config = {**config, "n_group": 1}
    return _group_values(config, scored=1)


# Groups of experts with softmax scores, where a group is chosen by its best expert.
GREEDY_GROUPS = Rule(
    _read_greedy_groups,
    lambda model: {
        **_write_groups(model),
        "topk_method": _GREEDY_GROUPS if model.moe_router_num_groups else _GREEDY,
    },
    ("n_group", "topk_group", "topk_method"),
)


def _expert_layers(experts: list[bool]) -> JsonObject:
    return {"moe_layer_freq": "1" if all(experts) else _list(experts)}


def _read_first_dense(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    dense = config.get("first_k_dense_replace", 1)
    right = type(dense) is int and 0 <= dense < layers
    check(
        right,
        f"{FILE}: first_k_dense_replace is {dense!r:.60}, not a number of layers below {layers}",
    )
    return _expert_layers([layer >= dense for layer in range(layers)])


FIRST_DENSE = Rule(
    _read_first_dense,
    lambda model: {"first_k_dense_replace": model.mlps.index("experts")},
    ("first_k_dense_replace",),
)


def _read_mlp_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        kinds = ["dense", *("sparse" for _ in range(layers - 1))]
    experts = _which("mlp_layer_types", kinds, layers, ("dense", "sparse"))
    dense = config.get("first_k_dense_replace")
    check(
        dense is None or experts == [layer >= dense for layer in range(layers)],
        f"{FILE}: first_k_dense_replace is {dense!r:.40}, which transformers does not read, and mlp_layer_types "
        f"{kinds!r:.80}: correct one of them",
    )
    return _expert_layers(experts)


def _write_mlp_layers(model: ModelConfig) -> JsonObject:
    kinds = ["sparse" if mlp == "experts" else "dense" for mlp in model.mlps]
    dense = kinds.count("dense")
    first = None if "sparse" in kinds[:dense] else dense
    return {"mlp_layer_types": kinds, "first_k_dense_replace": first}


# Layers with experts, by name; other programs read the number of dense layers before them.
MLP_LAYERS = Rule(_read_mlp_layers, _write_mlp_layers, ("mlp_layer_types", "first_k_dense_replace"))


def _read_predictions(config: JsonObject) -> JsonObject:
    name = "num_nextn_predict_layers"
    count = config.get(name) or 0
    check(
        type(count) is int and count >= 0,
        f"{FILE}: {name} is {count!r:.60}, not a number of layers",
    )
    return {"mtp_num_layers": count or None}


def _write_predictions(model: ModelConfig) -> JsonObject:
    check(
        not model.predictions or model.mlps[-1] == "experts",
        "an MTP module without experts has no names",
    )
    return {"num_nextn_predict_layers": model.predictions}


# MTP modules, stored as layers behind the others.
PREDICTIONS = Rule(
    _read_predictions,
    _write_predictions,
    ("num_nextn_predict_layers",),
)

_LATENT_EPSILON = 1e-6  # of norms of latent vectors in transformers' modules


def _read_latent_heads(config: JsonObject) -> JsonObject:
    heads = integer(config, "num_attention_heads")
    rotated = integer(config, "qk_rope_head_dim") or 0
    equal = {
        "num_key_value_heads": heads,
        "head_dim": rotated,
        "qk_head_dim": rotated + (integer(config, "qk_nope_head_dim") or 0),
    }
    for name, value in equal.items():
        given = config.get(name)
        check(
            given in (None, value),
            f"{FILE}: {name} is {given!r:.40}, and the block of latent attention has {value}",
        )
    epsilon = number(config, "rms_norm_eps", _LATENT_EPSILON)
    return {"latent_layernorm_epsilon": None if epsilon == _LATENT_EPSILON else _LATENT_EPSILON}


# What follows from other fields of a model with latent attention.
LATENT_HEADS = Rule(
    _read_latent_heads,
    lambda model: {"num_key_value_heads": model.num_attention_heads},
    ("num_key_value_heads", "head_dim", "qk_head_dim"),
)


def _read_scaled_depth(config: JsonObject) -> JsonObject:
    hidden = integer(config, "hidden_size") or 1
    layers = layer_count(config) or 1
    value_size = hidden // (integer(config, "num_attention_heads") or 1)
    return {
        "v_head_dim": integer(config, "v_head_dim", value_size),
        "embedding_multiplier": float(number(config, "scale_emb", 12)),
        "residual_multiplier": float(number(config, "scale_depth", layers**0.5)) / layers**0.5,
        "logits_scaling": hidden / integer(config, "dim_model_base", hidden),
    }


# Multipliers of MiniCPM3.
SCALED_DEPTH = Rule(
    _read_scaled_depth,
    lambda model: {
        "v_head_dim": model.v_head_dim,
        "scale_emb": model.embedding_multiplier,
        "scale_depth": round(model.residual_multiplier * model.num_layers**0.5, 12),
        "dim_model_base": round(model.hidden_size / model.logits_scaling),
    },
    ("v_head_dim", "scale_emb", "scale_depth", "dim_model_base"),
)


ATTENTION_LAYERS = Rule(
    lambda config: _check_layers(config, "attention", FULL, default="mamba"),
    lambda model: {"layer_types": [FULL for _ in range(model.num_layers)]},
    ("layer_types",),
)


LOGIT_SCALE = Rule(
    lambda config: {"logits_scaling": 1.0 / float(number(config, "logit_scale", 0.0625))},
    lambda model: {"logit_scale": 1.0 / model.logits_scaling},
    ("logit_scale",),
)


def _check_layers(config: JsonObject, *names: str, default: str = FULL) -> JsonObject:
    """Return no values. Raise ValueError for other layers than those of the names."""
    kinds = sorted({*map(str, config.get("layer_types") or [default])})
    check(
        {*kinds} <= {*names},
        f"{FILE}: layer_types has {' and '.join(kinds)}, and the block computes {names[0]} in all layers",
    )
    return {}


FULL_ATTENTION = Rule(lambda config: _check_layers(config, FULL), names=("layer_types",))
SCALED_EMBEDDING = Rule(
    lambda config: {"embedding_multiplier": integer(config, "hidden_size") ** 0.5}
)
_MULTIPLIED = (
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
    "attention_multiplier",
)


MULTIPLIED = Rule(
    lambda config: {name: float(number(config, name, 1.0)) for name in _MULTIPLIED},
    lambda model: {
        **{name: getattr(model, name) for name in _MULTIPLIED},
        "attention_multiplier": model.attention_scale,
    },
    _MULTIPLIED,
)


_LIMIT = "swiglu_limit"
SWIGLU_LIMIT = Rule(
    lambda config: {"activation_func_clamp_value": float(number(config, _LIMIT, 7.0))},
    lambda model: {_LIMIT: model.activation_func_clamp_value},
    (_LIMIT,),
)


def no_padding(default: int) -> Rule:
    """Write a null pad_token_id if the vocabulary lacks the default padding token."""
    return Rule(
        lambda config: {},
        lambda model: {"pad_token_id": None} if (model.vocab_size or 0) <= default else {},
    )


def _read_experts(config: JsonObject) -> JsonObject:
    normalized = boolean(config, "norm_topk_prob", False)
    names = [
        name for name in ("num_experts", "num_local_experts") if name in config
    ]  # transformers 5 writes either
    check(bool(names), f"{FILE} has no num_experts")
    return {
        "num_experts": integer(config, names[0]),
        "moe_router_pre_softmax": not normalized,
    }


# Experts of an architecture that always normalises the chosen scores.
NORMALISED_EXPERTS = Rule(
    lambda config: _read_experts({**config, "norm_topk_prob": True}),
    lambda model: {"num_experts": model.num_experts},
    ("num_experts", "num_local_experts"),
)
EXPERTS = Rule(
    _read_experts,
    lambda model: {
        "num_experts": model.num_experts,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    },
    ("num_experts", "num_local_experts", "norm_topk_prob"),
)


def _read_sparse_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    dense = config.get("mlp_only_layers") or []
    step = integer(config, "decoder_sparse_step", 1)
    right = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    check(right, f"{FILE}: mlp_only_layers is {dense!r:.60}, not a list of layers")
    return _expert_layers(
        [chosen and layer not in dense for layer, chosen in enumerate(every_nth(step, layers))]
    )


SPARSE_LAYERS = Rule(
    _read_sparse_layers,
    lambda model: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, mlp in enumerate(model.mlps) if mlp != "experts"],
    },
    ("decoder_sparse_step", "mlp_only_layers"),
)
