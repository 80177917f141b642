"""Fields that are part of the meaning of saved weights."""

from __future__ import annotations

import math
from dataclasses import MISSING, replace

from .fields import FieldValues, as_tuples, declarations, named, of_topic
from .layer_kinds import LAYERS
from .model import ModelConfig
from .rows import ACTIVATIONS, COUNTED, ROPE, YARN
from .run_config import RunConfig
from .training import BatchConfig

# A run that loads weights must have the saved values.
ARCHITECTURE = named(ModelConfig, lambda each: each.meaning.weights)

# Rotary angles: a run that starts from weights may change them, to train for longer sequences.
ANGLES = named(ModelConfig, lambda each: each.meaning.angles)

_LAYERS = of_topic(ModelConfig, LAYERS)

_ACTIVATIONS = frozenset(row.flag for row in ACTIVATIONS.values())


def architecture(
    model: ModelConfig, saved: FieldValues | None = None, begins: bool = False
) -> FieldValues:
    """Return the fields in ARCHITECTURE; the sequence length only if it is a weight's shape.

    saved: model of the weights to load; its spelling is used if the layers are the same
    begins: a run starts from the weights; omit the fields in ANGLES, which the run may change
    """
    free: tuple[str, ...] = ()
    if saved and begins and model.rotary and saved.get("position_embedding_type") in (ROPE, YARN):
        free = ANGLES
    if not model.learned_positions:
        free = (*free, "max_position_embeddings")
    model = _spelled(model, saved or {})
    return {name: getattr(model, name) for name in ARCHITECTURE if name not in free}


def _spelled(model: ModelConfig, saved: FieldValues) -> ModelConfig:
    """Return the model with the saved fields for its layers if they describe the same layers."""
    texts = {name: saved[name] for name in _LAYERS if name in saved}
    try:
        other = replace(model, **texts)
        return other if other.layer_kinds == model.layer_kinds else model
    except ValueError:  # of another number of layers
        return model


def same_weights(first: ModelConfig, second: ModelConfig) -> bool:
    """Return True if both models compute the same of the same weights, up to the rounding of a factor."""
    one = _meaning(first)
    two = _meaning(second)
    return one.keys() == two.keys() and all(
        value == two[name]
        or {type(value), type(two[name])} == {float}
        and math.isclose(value, two[name])
        for name, value in one.items()
    )


def _meaning(model: ModelConfig) -> FieldValues:
    """Return the values that have an effect on the weights' meaning, one for all spellings."""
    run = RunConfig(model=model, batch=BatchConfig(micro_batch_size=1))
    saved = architecture(model)
    values: FieldValues = {}
    neutral = set()
    for each in declarations(ModelConfig):
        if each.part_of:
            values[each.part_of] = getattr(model, each.part_of)
        elif each.name in saved and each.name not in (*_LAYERS, *_ACTIVATIONS):
            if all(need.is_met(run) for need in each.needs):
                values[each.name] = saved[each.name]
            if each.neutral is not None and values.get(each.name) == each.neutral:
                neutral.add(each.name)
    if "moe_router_num_groups" in neutral:
        neutral.add("moe_router_group_topk")
    return values | dict.fromkeys(neutral)


def with_block(saved: FieldValues) -> FieldValues:
    """Complete the model of a program that had fewer flags by their defaults."""
    before: FieldValues = {"mask_vocab_padding": COUNTED}
    for each in declarations(ModelConfig):
        if each.name in ARCHITECTURE and each.default is not MISSING:
            before[each.name] = each.default
    if saved.get("disable_bias_linear") and not saved.get("swiglu"):
        before["openai_gelu"] = True  # older programs computed the tanh form
    if {"hidden_size", "num_attention_heads"} <= saved.keys():
        before["kv_channels"] = saved["hidden_size"] // saved["num_attention_heads"]
    return {**before, **as_tuples(saved)}
