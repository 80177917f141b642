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
    sets: ModelConfig values by which `read` changes the block
    """

    read: Callable[[JsonObject], JsonObject]
    write: Callable[[ModelConfig], JsonObject] = lambda model: {}
    names: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()


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


def _read_heads(config: JsonObject) -> JsonObject:
    channels = integer(config, "head_dim")
    return {**_read_groups(config, "num_key_value_heads"), "kv_channels": channels}


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
    _read_heads,
    lambda model: {"num_key_value_heads": model.query_groups, "head_dim": model.kv_channels},
    ("num_key_value_heads", "head_dim"),
)


def _window(config: JsonObject, default: int | None) -> int | None:
    size: int | None = integer({"sliding_window": default, **config}, "sliding_window")
    return size


def window(default: int | None) -> Rule:
    """Convert sliding_window w: a token sees itself and w - 1 before it; null: all. default: if
    missing.
    """

    def read(config: JsonObject) -> JsonObject:
        size = _window(config, default)
        kind = FULL if size is None else WINDOWED
        _check_layers(config, kind, default=kind)
        return {"window_size": None if size is None else f"{size - 1},0"}

    return Rule(
        read,
        lambda model: {"sliding_window": model.window},
        ("sliding_window", "layer_types"),
        ("window_size",),
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


def _are_full(kinds: Any, other: str, layers: int) -> list[bool]:
    right = isinstance(kinds, list) and len(kinds) == layers and {*map(str, kinds)} <= {other, FULL}
    check(
        right,
        f"{FILE}: layer_types is {kinds!r:.80}, not {other} or {FULL} for each of {layers} layers",
    )
    return [kind == FULL for kind in kinds]


def full_layers(config: JsonObject, default: int | None, every: int | None) -> list[bool]:
    """Return True for each layer without a window.

    default, every: as in `windows_by_layer`
    """
    layers = layer_count(config)
    kinds = config.get("layer_types")
    if kinds is not None:
        return _are_full(kinds, WINDOWED, layers)
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


def windows_by_layer(default: int | None, every: int | None = None) -> Rule:
    """Convert sliding_window and layer_types.

    default: sliding_window if missing
    every: without layer_types, every Nth layer has no window; None: all layers have one, or none
    """

    def read(config: JsonObject) -> JsonObject:
        full = full_layers(config, default, every)
        if all(full):
            return {"window_size": None, "window_attn_skip_freq": None}
        size = _window(config, default)
        if size is None:
            raise ValueError(
                f"{FILE}: layer_types has {WINDOWED}, and sliding_window is null: correct one of them"
            )
        return {
            "window_size": f"{size - 1},0",
            "window_attn_skip_freq": layer_pattern_of(full),
        }

    def write(model: ModelConfig) -> JsonObject:
        kinds = [FULL if kind.window is None else WINDOWED for kind in model.layer_kinds]
        return {"sliding_window": model.window, "layer_types": kinds}

    names = ("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern")
    return Rule(read, write, names, ("window_size", "window_attn_skip_freq"))


LINEAR = "linear_attention"


def _read_linear_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    kinds = config.get("layer_types")
    if kinds is None:
        full = every_nth(integer(config, "full_attention_interval", 4), layers)
    else:
        full = _are_full(kinds, LINEAR, layers)
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
    ("experimental_attention_variant", "linear_attention_freq"),
)


def _read_query_scale(config: JsonObject) -> JsonObject:
    size = number(config, "query_pre_attn_scalar", 256)
    head = integer(config, "head_dim")
    return {"attention_multiplier": None if size == head else float(size) ** -0.5}


QUERY_SCALE = Rule(
    _read_query_scale,
    lambda model: {"query_pre_attn_scalar": query_scale(model)},
    ("query_pre_attn_scalar",),
    ("attention_multiplier",),
)


def query_scale(model: ModelConfig) -> int:
    return round(model.attention_scale**-2)


def _read_glm_experts(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    groups = integer(config, "n_group", 1)
    best = integer(config, "topk_group", 1)
    chosen = integer(config, "num_experts_per_tok", 8)
    check(
        groups == 1 or chosen == 2 * best,
        f"{FILE}: topk_group is {best} and num_experts_per_tok {chosen}, and the block computes groups "
        "by the sum of two experts for two experts of each",
    )
    dense = config.get("first_k_dense_replace", 1)
    right = type(dense) is int and 0 <= dense < layers
    check(
        right,
        f"{FILE}: first_k_dense_replace is {dense!r:.60}, not a number of layers below {layers}",
    )
    width = integer(config, "moe_intermediate_size", 1408)
    factor = float(number(config, "routed_scaling_factor", 1.0))
    return {
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * integer(config, "n_shared_experts", 1),
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": best if groups > 1 else None,
        "moe_router_topk_scaling_factor": None if factor == 1.0 else factor,
        "moe_layer_freq": _list(layer >= dense for layer in range(layers)) if dense else "1",
    }


def _write_glm_experts(model: ModelConfig) -> JsonObject:
    width = model.moe_ffn_hidden_size or 1
    return {
        "moe_intermediate_size": width,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
        "first_k_dense_replace": model.mlps.index("experts"),
    }


GLM_EXPERTS = Rule(
    _read_glm_experts,
    _write_glm_experts,
    (
        "moe_intermediate_size",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
    ),
)


def has_glm_experts(model: ModelConfig) -> bool:
    """Return True for dense layers before layers with experts, and a shared expert of whole experts' width."""
    mlps = list(model.mlps)
    shared = model.moe_shared_expert_intermediate_size or 0
    return (
        model.num_experts is not None
        and "experts" not in mlps[: mlps.count(model.activation)]
        and shared > 0
        and shared % (model.moe_ffn_hidden_size or 1) == 0
        and (
            model.moe_router_group_topk is None
            or model.moe_router_topk == 2 * model.moe_router_group_topk
        )
    )


def _read_attention_layers(config: JsonObject) -> JsonObject:
    _check_layers(config, "attention", FULL, default="mamba")
    return {}


ATTENTION_LAYERS = Rule(
    _read_attention_layers,
    lambda model: {"layer_types": [FULL for _ in range(model.num_layers)]},
    ("layer_types",),
)


def _read_logit_scale(config: JsonObject) -> JsonObject:
    return {"logits_scaling": 1.0 / float(number(config, "logit_scale", 0.0625))}


LOGIT_SCALE = Rule(
    _read_logit_scale,
    lambda model: {"logit_scale": 1.0 / model.logits_scaling},
    ("logit_scale",),
    ("logits_scaling",),
)


def _check_layers(config: JsonObject, *names: str, default: str = FULL) -> None:
    kinds = sorted({*map(str, config.get("layer_types") or [default])})
    check(
        {*kinds} <= {*names},
        f"{FILE}: layer_types has {' and '.join(kinds)}, and the block computes {names[0]} in all layers",
    )


def _read_full(config: JsonObject) -> JsonObject:
    _check_layers(config, FULL)
    return {}


FULL_ATTENTION = Rule(_read_full, names=("layer_types",))
NO_DROPOUT = Rule(
    lambda config: {"hidden_dropout": 0.0}
)  # these architectures have none between layers

SCALED_EMBEDDING = Rule(
    lambda config: {"embedding_multiplier": integer(config, "hidden_size") ** 0.5},
    sets=("embedding_multiplier",),
)
MULTIPLIERS = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
_MULTIPLIED = (*MULTIPLIERS, "attention_multiplier")


def _read_multipliers(config: JsonObject) -> JsonObject:
    return {name: float(number(config, name, 1.0)) for name in _MULTIPLIED}


MULTIPLIED = Rule(
    _read_multipliers,
    lambda model: {
        "attention_multiplier": model.attention_scale,
        **{name: getattr(model, name) for name in MULTIPLIERS},
    },
    _MULTIPLIED,
    _MULTIPLIED,
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
    ("num_experts",),
)
EXPERTS = Rule(
    _read_experts,
    lambda model: {
        "num_experts": model.num_experts,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    },
    ("num_experts", "num_local_experts", "norm_topk_prob"),
    ("num_experts",),
)


def _read_sparse_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    dense = config.get("mlp_only_layers") or []
    step = integer(config, "decoder_sparse_step", 1)
    right = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    check(right, f"{FILE}: mlp_only_layers is {dense!r:.60}, not a list of layers")
    experts = [
        chosen and layer not in dense for layer, chosen in enumerate(every_nth(step, layers))
    ]
    return {"moe_layer_freq": "1" if all(experts) else _list(experts)}


def _write_sparse_layers(model: ModelConfig) -> JsonObject:
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, mlp in enumerate(model.mlps) if mlp != "experts"],
    }


SPARSE_LAYERS = Rule(
    _read_sparse_layers, _write_sparse_layers, ("decoder_sparse_step", "mlp_only_layers")
)
