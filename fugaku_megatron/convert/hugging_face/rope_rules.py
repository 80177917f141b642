"""Rules for rotary positions: fields of config.json and ours."""

from __future__ import annotations

import math
from collections.abc import Collection

from ...config.fields import check, is_off
from ...config.model import ModelConfig, yarn_growth
from ...config.rows import ROPE, YARN
from ...text.named_files import JsonObject
from .rules import (
    FILE,
    FULL,
    WINDOWED,
    Rule,
    boolean,
    every_nth,
    full_layers,
    integer,
    layer_count,
    layer_pattern_of,
    number,
)

POSITIONS = "original_max_position_embeddings"

# The types of rope_scaling that ROPE_INIT_FUNCTIONS of transformers' modeling_rope_utils computes: what each has -> ModelConfig's
# names. The factor of attention of yarn and longrope follows from others, and the positions of dynamic stand next to rope_scaling.
MAXIMUM = "max_position_embeddings"

ORIGINAL = "rope_scaling_original_max_position_embeddings"

SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rotary_seq_len_interpolation_factor"},
    "dynamic": {"factor": "rope_dynamic_factor", MAXIMUM: ORIGINAL},
    "longrope": {
        "short_factor": "longrope_short_factors",
        "long_factor": "longrope_long_factors",
        POSITIONS: ORIGINAL,
    },
    "llama3": {
        "factor": "rope_scaling_factor",
        "low_freq_factor": "rope_scaling_low_freq_factor",
        "high_freq_factor": "rope_scaling_high_freq_factor",
        POSITIONS: ORIGINAL,
    },
    "yarn": {
        "factor": "rotary_scaling_factor",
        POSITIONS: "yarn_original_max_position_embeddings",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "truncate": "yarn_correction_range_round_to_int",
    },
}

_FIXED = ("default", "linear", "llama3", "yarn")  # frequencies that do not follow the length

_LEFT_OUT = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}  # what it means to leave them out

ROPE_FIELDS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", POSITIONS)

# What rope_parameters and rope_scaling may hold; what has no effect on the type that is computed is ignored.
ROPE_NAMES = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", POSITIONS, MAXIMUM),
    *(name for names in SCALINGS.values() for name in names),
    *("attention_factor", "mscale", "mscale_all_dim"),
    "finetuned",  # of early yarn models: whether they were trained with it
}


def rotary(
    share: float | None = None,
    kinds: Collection[str] = SCALINGS,
    names: tuple[str, str] = ("rope_theta", "partial_rotary_factor"),
    ignored: Collection[str] = (),
) -> Rule:
    """Convert rope.

    share: default rotated share per head; None: whole heads only
    kinds: supported scalings
    names: base and share outside rope_parameters
    ignored: names in rope_parameters without an effect here
    """

    def read(config: JsonObject) -> JsonObject:
        given = {
            ours: config[theirs]
            for ours, theirs in zip(("rope_theta", "partial_rotary_factor"), names)
            if theirs in config
        }
        return _read_rope({**config, **given}, share, kinds, ignored=ignored)

    def write(model: ModelConfig) -> JsonObject:
        partial = {} if share is None else {names[1]: model.rotary_percent}
        return {names[0]: model.rotary_base, **_write_scaling(model), **partial}

    return Rule(read, write, (*names, *ROPE_FIELDS))


def _read_rope(
    config: JsonObject,
    share: float | None,
    kinds: Collection[str],
    latent: bool = False,
    ignored: Collection[str] = (),
) -> JsonObject:
    """Read rope_scaling, or else transformers 5's rope_parameters; their base precedes rope_theta.

    latent: yarn's `mscale_all_dim` also multiplies the scores, as in latent attention
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    check(isinstance(rope, dict), f"{FILE}: rope_parameters is {rope!r:.60}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(
        kind in kinds,
        f"{FILE}: rope_scaling has type {kind!r:.40}, and the block computes {' or '.join(kinds)}",
    )
    for name, value in rope.items():
        check(
            name in ROPE_NAMES or name in ignored or is_off(value),
            f"{FILE}: rope_parameters has {name}, which is {value!r:.60} and may change the model: "
            "remove it if it does not",
        )
    percent = number({**config, **rope}, "partial_rotary_factor", share or 1.0)
    check(
        share or percent == 1.0,
        f"{FILE}: partial_rotary_factor is {percent}, and the block of this architecture rotates whole "
        "heads",
    )
    values = {
        "position_embedding_type": ROPE,
        "rotary_base": float(number({**config, **rope}, "rope_theta", 10000.0)),
        "rotary_percent": float(percent),
    }
    maximum = config.get(MAXIMUM)
    positions = config.get(POSITIONS, rope.get(POSITIONS, maximum))  # as transformers has it
    rope = {**_LEFT_OUT, **rope, POSITIONS: positions, MAXIMUM: maximum}
    return {**values, **_read_scaling(kind, rope, latent)}


def _read_scaling(kind: str, rope: JsonObject, latent: bool) -> JsonObject:
    values: JsonObject = {}
    for name, ours in SCALINGS[kind].items():
        check(rope.get(name) is not None, f"{FILE}: rope_scaling of type {kind} has no {name}")
        if name == "truncate":
            values[ours] = boolean(rope, name)
        elif name in (POSITIONS, MAXIMUM):
            values[ours] = integer(rope, name)
        elif kind == "longrope":
            values[ours] = _read_factors(rope, name)
        else:
            values[ours] = float(number(rope, name, None))
    if kind == "longrope":
        values["longrope_attention_factor"] = _longrope_attention_factor(rope)
    elif kind == "llama3":
        values["use_rope_scaling"] = True
    elif kind == "yarn":
        values |= {
            "position_embedding_type": YARN,
            **_read_mscale(rope, values["rotary_scaling_factor"], latent),
        }
    return values


def _read_factors(rope: JsonObject, name: str) -> tuple[float, ...]:
    factors = rope[name]
    check(
        isinstance(factors, (list, tuple))
        and all(type(factor) in (int, float) and factor > 0 for factor in factors),
        f"{FILE}: {name} of rope_scaling is {factors!r:.60}, not a list of positive numbers",
    )
    return tuple(map(float, factors))


def _longrope_attention_factor(rope: JsonObject) -> float:
    """Return the factor of queries and keys as _compute_longrope_parameters of transformers does."""
    given = number(rope, "attention_factor", None)
    if given is not None:
        return float(given)
    original = integer(rope, POSITIONS)
    factor = number(rope, "factor", None) or integer(rope, MAXIMUM) / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _read_mscale(rope: JsonObject, factor: float, latent: bool) -> JsonObject:
    """Return ModelConfig's numbers for yarn's growth of cosines and sines."""
    names = ("mscale", "mscale_all_dim", "attention_factor")
    mscale, all_dim, attention = (number(rope, name, None) for name in names)
    if attention is None and mscale and all_dim:
        return {"mscale": float(mscale), "mscale_all_dim": float(all_dim)}
    if not latent:
        all_dim = None
    if attention is None and not all_dim:
        return {}
    check(
        factor > 1 or attention in (None, 1),
        f"{FILE}: attention_factor is {attention}, and the block computes 1 with a factor of "
        f"{factor}",
    )
    all_dim = float(all_dim or 0.0)
    if factor <= 1:
        return {"mscale": 1.0, "mscale_all_dim": all_dim}
    grown = (attention or yarn_growth(factor, 1.0)) * yarn_growth(factor, all_dim)
    return {"mscale": (grown - 1.0) / (0.1 * math.log(factor)), "mscale_all_dim": all_dim}


def _write_scaling(model: ModelConfig) -> JsonObject:
    kinds = {
        "yarn": model.position_embedding_type == YARN,
        "longrope": model.longrope_short_factors,
        "llama3": model.use_rope_scaling,
        "linear": model.rotary_seq_len_interpolation_factor,
        "dynamic": model.rope_dynamic_factor,
    }
    kind = next((kind for kind, on in kinds.items() if on), None)
    if kind is None:
        return {"rope_scaling": None}
    scaling = {
        "rope_type": kind,
        **{name: getattr(model, ours) for name, ours in SCALINGS[kind].items()},
    }
    if kind == "yarn" and (model.mscale, model.mscale_all_dim) != (
        1.0,
        0.0,
    ):  # transformers reads both or neither
        scaling["attention_factor"] = model.yarn_attention_factor
    elif kind == "longrope":
        scaling["attention_factor"] = model.longrope_attention_factor
    original = {MAXIMUM: scaling.pop(MAXIMUM)} if MAXIMUM in scaling else {}
    return {"rope_scaling": scaling, **original}


ROTARY = rotary()


def _read_latent_rope(config: JsonObject) -> JsonObject:
    values = _read_rope(config, None, ("default", "yarn", "longrope"), latent=True)
    return {**values, "rope_type": values["position_embedding_type"]}


def _write_latent_rope(model: ModelConfig) -> JsonObject:
    written = {"rope_theta": model.rotary_base, **_write_scaling(model)}
    scaling = written["rope_scaling"]
    if scaling and model.mscale_all_dim:
        scaling["mscale_all_dim"] = model.mscale_all_dim
        if model.mscale:
            scaling["mscale"] = model.mscale
            scaling.pop("attention_factor", None)  # which only yarn has
    return written


# Rope of the rotated elements of latent attention, as transformers' DeepSeek-V2 and V3 have it.
LATENT_ROTARY = Rule(_read_latent_rope, _write_latent_rope, ROPE_FIELDS)

# Rope of a text in a model that also rotates by the places in images: positions of a text are equal in each section.
ROTARY_OF_TEXT = rotary(0.25, _FIXED, ignored=("mrope_section", "mrope_interleaved"))


def _rope_parameters(model: ModelConfig) -> JsonObject:
    scaling = _write_scaling(model)["rope_scaling"] or {"rope_type": "default"}
    return {**scaling, "rope_theta": model.rotary_base}


def named_rotary(scaled: JsonObject) -> Rule:
    """Convert rope of an architecture that is scaled if the file says nothing of rope. scaled: its rope_parameters then"""
    plain = rotary(None, _FIXED)

    def read(config: JsonObject) -> JsonObject:
        if not (config.get("rope_scaling") or config.get("rope_parameters")):
            for name in ("rope_scaling", "rope_theta"):
                check(
                    name not in config,
                    f"{FILE}: {name} is {config.get(name)!r:.40} without rope_parameters, which transformers 4 and 5 "
                    "read differently: write rope_parameters with rope_type and rope_theta",
                )
            config = {**config, "rope_parameters": scaled}
        return plain.read({"rope_theta": scaled["rope_theta"], **config})

    return Rule(
        read,
        lambda model: {"rope_scaling": None, "rope_parameters": _rope_parameters(model)},
        ROTARY.names,
    )


def _read_no_rope_layers(config: JsonObject) -> JsonObject:
    layers = layer_count(config)
    rotated = config.get("no_rope_layers")  # 1: rotated
    if rotated is None:
        step = integer(config, "no_rope_layer_interval", 4)
        rotated = [int(not without) for without in every_nth(step, layers)]
    right = (
        isinstance(rotated, list) and len(rotated) >= layers and {*map(str, rotated)} <= {"0", "1"}
    )
    check(
        right, f"{FILE}: no_rope_layers is {rotated!r:.60}, not 0 or 1 for each of {layers} layers"
    )
    without = [not layer for layer in rotated[:layers]]
    return {"no_rope_freq": layer_pattern_of(without, of_rope=True)}


NO_ROPE_LAYERS = Rule(
    _read_no_rope_layers,
    lambda model: {"no_rope_layers": [int(kind.rope is not None) for kind in model.layer_kinds]},
    ("no_rope_layers", "no_rope_layer_interval"),
)


def rotary_by_layer(base: float, window_base: float, name: str | None, every: int) -> Rule:
    """Convert rope of layers without a window, and its base in layers with one, where nothing is scaled.

    base, window_base: if missing
    name: of the window's base outside rope_parameters; None: there `base` alone is converted
    every: as in `windows_by_layer`
    """

    def read(config: JsonObject) -> JsonObject:
        rope = config.get("rope_parameters")
        windowed: JsonObject = {}
        if isinstance(rope, dict) and {FULL, WINDOWED} & {*rope}:
            others = sorted({*rope} - {FULL, WINDOWED})
            check(not others, f"{FILE}: rope_parameters has {others[:1]} next to {FULL}")
            windowed = rope.get(WINDOWED) or {}
            own = {**(rope.get(FULL) or {})}
            config = {**config, "rope_theta": base, "rope_parameters": own, "rope_scaling": None}
        elif rope:
            raise ValueError(f"{FILE}: rope_parameters has no {FULL} and no {WINDOWED}: name them")
        elif name is None:
            given = number(config, "rope_theta", base)
            check(
                given == base,
                f"{FILE}: rope_theta is {given}, and transformers computes {base} in layers with a "
                f"window: write rope_parameters with {FULL} and {WINDOWED}",
            )
        else:
            windowed = {"rope_theta": config.get(name, window_base)}
        values = _read_rope({"rope_theta": base, **config}, None, _FIXED)
        others = sorted({*windowed} - {"rope_theta", "rope_type", "partial_rotary_factor"})
        kind = windowed.get("rope_type", "default")
        check(
            kind == "default" and not others and windowed.get("partial_rotary_factor", 1.0) == 1.0,
            f"{FILE}: rope_parameters of {WINDOWED} are {windowed!r:.80}, and the block computes rope "
            "without scaling there",
        )
        local = float(number(windowed, "rope_theta", window_base))
        plain = {"rope_type", "type", "rope_theta"} >= {
            *(config.get("rope_scaling") or config.get("rope_parameters") or {})
        }
        one_rope = local == values["rotary_base"] and plain
        if one_rope or all(full_layers(config, 1, every)):
            return values
        return {**values, "window_rotary_base": local}

    def write(model: ModelConfig) -> JsonObject:
        window = model.window_rotary_base or model.rotary_base
        return {
            "rope_parameters": {
                FULL: _rope_parameters(model),
                WINDOWED: {"rope_type": "default", "rope_theta": window},
            }
        }

    names = ROPE_FIELDS if name is None else (*ROPE_FIELDS, name)
    return Rule(read, write, names)
