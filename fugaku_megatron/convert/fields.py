"""Fields of config.json that are not one field of ModelConfig each: heads, rope, the window, the tied head.

A rule reads some fields of theirs as values of ours, and writes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..config.checks import check
from ..config.model_config import ROPE, ModelConfig

FILE = "config.json"
POSITIONS = "original_max_position_embeddings"
# What Llama 3's scaling has -> ModelConfig's names.
LLAMA3 = {"factor": "rope_scaling_factor", "low_freq_factor": "rope_scaling_low_freq_factor",
          "high_freq_factor": "rope_scaling_high_freq_factor", POSITIONS: "rope_scaling_original_max_position_embeddings"}
LARGEST = 1e30  # of a number that is no size


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


def _read_rope(config: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters of transformers 5, or rope_theta and rope_scaling before it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    check(isinstance(rope, dict), f"{FILE}: rope_parameters is {rope!r:.60}, not an object")
    share = number({**config, **rope}, "partial_rotary_factor", 1.0)
    check(share == 1.0, f"{FILE}: partial_rotary_factor is {share}, and the block of this architecture rotates whole heads")
    values = {"position_embedding_type": ROPE, "rotary_base": float(number({**config, **rope}, "rope_theta", 10000.0))}
    kind = rope.get("rope_type", rope.get("type", "default"))
    check(kind in ("default", "llama3"), f"{FILE}: rope_scaling has type {kind!r:.40}, and the block computes "
          "llama3 or default")
    if kind == "default":
        return values
    positions = config.get(POSITIONS, rope.get(POSITIONS, config.get("max_position_embeddings")))  # as transformers has it
    rope = {**rope, POSITIONS: positions}
    for name, ours in LLAMA3.items():
        check(rope.get(name) is not None, f"{FILE}: rope_scaling of type llama3 has no {name}")
        values[ours] = number(rope, name, None, whole=True) if name == POSITIONS else float(number(rope, name, None))
    return {**values, "use_rope_scaling": True}


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", **{name: getattr(model, ours) for name, ours in LLAMA3.items()}}
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling if model.use_rope_scaling else None}


ROTARY = Rule(_read_rope, _write_rope)


def _read_window(config: dict[str, Any]) -> dict[str, Any]:
    """Mistral's sliding_window w: a token sees itself and w - 1 before it; left out it is 4096, null: all."""
    given = config.get("sliding_window", 4096)
    window = None if given is None else number(config, "sliding_window", 4096, whole=True)
    _check_layers(config, "full_attention" if window is None else "sliding_attention")
    return {"window_size": None if window is None else f"{window - 1},0"}


WINDOW = Rule(_read_window, lambda model: {"sliding_window": model.window})


def _check_layers(config: dict[str, Any], kind: str) -> None:
    """All layers attend alike."""
    kinds = sorted({*map(str, config.get("layer_types") or [kind])})
    check(kinds == [kind], f"{FILE}: layer_types has {' and '.join(kinds)}, and the block computes {kind} in all layers")


def _read_full(config: dict[str, Any]) -> dict[str, Any]:
    _check_layers(config, "full_attention")
    return {}


FULL_ATTENTION = Rule(_read_full, lambda model: {})
NO_DROPOUT = Rule(lambda config: {"hidden_dropout": 0.0}, lambda model: {})  # these architectures have none between layers
