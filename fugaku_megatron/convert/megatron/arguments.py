"""Arguments in Megatron-LM's checkpoints, old and new (megatron/training/{arguments,checkpointing}.py)."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from ...cli.arguments import add_flags
from ...cli.parser import Parser
from ...config.experts import ExpertFields
from ...config.fields import (
    BY_LAYER,
    CONSTANT,
    OTHER_WEIGHTS,
    OWN_FORM,
    Declaration,
    FieldValues,
    as_tuples,
    check,
    check_type,
    declarations,
    flag,
    is_off,
)
from ...config.hybrid import PER_SYMBOL, Pattern, parse_pattern, with_layers
from ...config.layer_kinds import DENSE_SYMBOL, EXPERTS_SYMBOL, MIXERS, layer_pattern
from ...config.megatron_flags import OTHER_FLAGS, saved_arguments
from ...config.model import ModelConfig
from ...config.multi_latent_attention import LatentAttentionFields
from ...config.rows import LEARNED, MASKED, MLP_OF_EXPERTS, NO_POSITIONS, NORMS, ROPE

EXPERTS = tuple(each.name for each in declarations(ExpertFields))
# Numbers of latent attention, of which Megatron-LM saves defaults with every model.
_LATENT = tuple(each.name for each in declarations(LatentAttentionFields) if each.kind is not bool)
# Fields that Megatron-LM's latent attention does not read.
_UNREAD_BY_LATENT = (
    "use_rope_scaling",
    "rotary_seq_len_interpolation_factor",
    "no_rope_freq",
    "yarn_correction_range_round_to_int",
)
# Arguments of megatron-core's latent attention, which Megatron-LM has no flags for -> fields.
_LATENT_YARN = {
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
VERSION = 3.0  # of checkpoints that are written; since 2.0 each head, or group, has its queries, key and value together
# Arguments of experts that change what their weights mean.
_EXPERT_VARIANTS = (
    "moe_apply_probs_on_input",
    "moe_latent_size",
    "moe_mlp_glu_interleave_size",
    "moe_shared_expert_glu_interleave_size",
)
# Arguments with the layers of a HybridModel, the newest first.
PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
# Arguments that `model_of` reads, next to ModelConfig's fields.
READ = frozenset(
    {
        "add_bias_linear",
        "add_position_embedding",
        *PATTERNS,
        *_LATENT_YARN,
        "norm_epsilon",
        "padded_vocab_size",
        "use_rotary_position_embeddings",
        *(f.name for f in fields(ModelConfig) if f.name != "layer_types"),
    }
)


def by_name(args: FieldValues | argparse.Namespace) -> FieldValues:
    return args if isinstance(args, dict) else vars(args)


def check_saved(given: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Raise ValueError for a saved argument that is on, and unknown or changes the model.

    ignored: names that the user declares harmless
    """
    for each in declarations(ModelConfig):
        value = given.get(each.name)
        check(
            each.megatron != OTHER_WEIGHTS or value is None or value == each.default,
            f"{each.name} is {value!r:.60}: Megatron-LM's weights of such layers are not converted",
        )
    variants = () if given.get("num_experts") is None else _EXPERT_VARIANTS
    for name in variants:
        check(
            is_off(given.get(name)),
            f"{name} is {given.get(name)!r:.60}: this variant of experts is not supported",
        )
    fields = {"hybrid_layer_pattern": pattern_of(given)}
    unknown = []
    for name, value in given.items():
        row = OTHER_FLAGS.get(flag(name))
        zero = row is not None and isinstance(value, int | float) and value == 0
        if name in READ or name in ignored or is_off(value) or zero:
            continue
        values = [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        check(
            row is None or not row.changes_model or not row.refuses(values, fields),
            f"{name} is {value!r:.60}: {row.meaning if row else ''}",
        )
        if row is None and name not in _harmless_arguments():
            unknown.append(f"{name} ({value!r:.40})")
    check(
        not unknown,
        f"the saved arguments {', '.join(unknown[:8])} are unknown, and may change the model: "
        "pass those that do not with --ignore-saved-arguments, to train or to convert",
    )


@functools.cache
def _harmless_arguments() -> frozenset[str]:
    parser = Parser()
    add_flags(parser)
    flags = {
        name
        for action in parser._actions
        for name in (action.dest, *(word[2:].replace("-", "_") for word in action.option_strings))
    }
    return saved_arguments() | flags


def model_of(
    given: FieldValues, rows: int, vocab_size: int | None, ignored: Collection[str] = ()
) -> ModelConfig:
    """Return the model that Megatron-LM's arguments describe.

    rows: embedding rows
    vocab_size: from the user, or None
    ignored: see `check_saved`

    Raise ValueError with argument and value if it is unsupported.
    """
    check_saved(given, ignored)
    values: FieldValues = {
        **_values(given),
        "vocab_size": vocab_size or given.get("vocab_size") or rows,
        "mask_vocab_padding": MASKED,
        "position_embedding_type": _positions(given),
        "disable_bias_linear": not given.get("add_bias_linear", True),
    }
    check(
        0 < values["vocab_size"] <= rows,
        f"the vocabulary has {values['vocab_size']} tokens, its embedding {rows} rows",
    )
    if window := given.get("window_size"):
        values["window_size"] = window if isinstance(window, str) else ",".join(map(str, window))
    pattern = pattern_of(given)
    if pattern is not None:
        values["hybrid_layer_pattern"] = pattern
        for name in ("moe_layer_freq", "linear_attention_freq"):  # not read by a HybridModel
            values.pop(name, None)
    if given.get("multi_latent_attention"):
        _read_latent(values, given)
    model = ModelConfig(**with_layers(values))
    _check_biases(model)
    return model


def _read_latent(values: FieldValues, given: FieldValues) -> None:
    """Change values to those that Megatron-LM's latent attention reads."""
    for name in _UNREAD_BY_LATENT:
        values.pop(name, None)
    if values["position_embedding_type"] != LEARNED:
        values["position_embedding_type"] = ROPE
    for theirs, ours in _LATENT_YARN.items():
        values.pop(ours, None)
        if given.get(theirs) is not None:
            values[ours] = given[theirs]
    if given.get("rope_type") == ROPE:
        factor = values.pop("rotary_scaling_factor", 1.0)
        scale = values.pop("mscale_all_dim", 0.0)
        check(
            factor == 1.0 or scale == 0.0,
            f"mscale_all_dim is {scale} and rotary_scaling_factor {factor} with rope_type rope: Megatron-LM scales the scores "
            "by them, which is supported with yarn alone",
        )


def checked_model(
    path: Path, given: FieldValues, rows: int, vocab_size: int | None, ignored: Collection[str]
) -> ModelConfig:
    try:
        return model_of(given, rows, vocab_size, ignored)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def _check_biases(model: ModelConfig) -> None:
    check(
        model.num_experts is None or model.disable_bias_linear,
        "--num-experts is converted for experts without biases (--disable-bias-linear) alone",
    )


def _values(given: FieldValues) -> FieldValues:
    """Return the values of fields of the same name."""
    left_out = set(EXPERTS if given.get("num_experts") is None else ())
    if not given.get("multi_latent_attention"):
        left_out.update(_LATENT)
    if given.get("norm_epsilon") is not None:  # the newer name
        given = {**given, "layernorm_epsilon": given["norm_epsilon"]}
    values: FieldValues = {}
    for each in declarations(ModelConfig):
        value = given.get(each.name)
        by_layer = each.megatron == BY_LAYER
        absent = is_off(value) if by_layer else value is None
        if absent or each.megatron == OWN_FORM or each.name in left_out:
            continue
        if by_layer:
            value = str(value)
        elif each.nargs == "+" and not isinstance(value, list | tuple):
            value = (value,)
        check_type(each, value)
        values[each.name] = value
    return as_tuples(values)


def pattern_of(given: Mapping[str, Any]) -> str | None:
    """Return the letters of a HybridModel's layers, None for a GPTModel."""
    pattern = next((given[name] for name in PATTERNS if given.get(name)), None)
    return None if pattern is None else str(pattern)


def model_pattern(model: ModelConfig) -> Pattern:
    """Return a model's layers in a HybridModel's form."""
    mlps = {None: "", MLP_OF_EXPERTS: EXPERTS_SYMBOL, model.activation: DENSE_SYMBOL}
    layers = (
        ("" if kind.mixer is None else MIXERS[kind.mixer].symbol) + mlps[kind.mlp]
        for kind in model.layer_kinds
    )
    return Pattern(tuple(layers), (model.num_layers,))


def check_pattern(pattern: str, model: ModelConfig) -> None:
    """Raise ValueError unless a HybridModel with these layers equals the model."""
    right = "".join(model_pattern(model).layers)
    check(
        "".join(parse_pattern(pattern).layers) == right,
        f"--hybrid-layer-pattern is {pattern!r:.80}, and the layers of the model are {right!r:.80}",
    )
    for name in PER_SYMBOL:
        check(
            is_off(getattr(model, name)),
            f"{flag(name)} is {getattr(model, name)}: in a HybridModel it numbers other layers: leave "
            "--hybrid-layer-pattern out",
        )


def _positions(given: FieldValues) -> str:
    if given.get("use_rotary_position_embeddings"):
        return ROPE
    kind = given.get("position_embedding_type", LEARNED)
    return (
        NO_POSITIONS if kind == LEARNED and not given.get("add_position_embedding", True) else kind
    )


def arguments_of(
    model: ModelConfig, rows: int, dtype: torch.dtype, tp: int, pp: int
) -> argparse.Namespace:
    """Return Megatron-LM's arguments for a model. rows: embedding rows

    Raise ValueError for a model that Megatron-LM cannot describe.
    """
    _check_biases(model)
    _check_described(model)
    same = {each.name: _argument(model, each) for each in declarations(ModelConfig)}
    for each in declarations(ModelConfig):
        experts_alone = each.name in EXPERTS and each.name != "num_experts"
        if each.megatron == OWN_FORM or (experts_alone and model.num_experts is None):
            del same[each.name]
    same["num_query_groups"] = (
        model.num_query_groups or 1
    )  # its default, which counts with group_query_attention
    positions = ROPE if model.multi_latent_attention else model.position_embedding_type
    window = None if model.window is None else (model.window - 1, 0)
    return argparse.Namespace(
        **same,
        norm_epsilon=model.layernorm_epsilon,
        add_bias_linear=not model.disable_bias_linear,
        position_embedding_type=positions,
        add_position_embedding=model.learned_positions,
        window_size=window,
        vocab_size=model.vocab_size,
        padded_vocab_size=rows,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tokenizer_type="GPT2BPETokenizer",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _check_described(model: ModelConfig) -> None:
    """Raise ValueError for a value without an argument of Megatron-LM, or whose weights are not converted."""
    for each in declarations(ModelConfig):
        value = getattr(model, each.name)
        described = [each.default]
        if each.name == "normalization":
            described = [name for name, row in NORMS.items() if row.megatron]
        elif each.megatron not in (None, OTHER_WEIGHTS):
            continue
        check(
            value in described,
            f"{flag(each.name)} is {value}, and Megatron-LM's GPT computes "
            f"{' or '.join(map(str, described))}",
        )
    if model.multi_latent_attention:
        for name in (*_UNREAD_BY_LATENT, *_LATENT_YARN.values()):
            value = getattr(model, name)
            default = ModelConfig.__dataclass_fields__[name].default
            check(
                value == default,
                f"{flag(name)} is {value}, and Megatron-LM's latent attention computes {default}, for which it has no argument",
            )
    for each in declarations(ModelConfig):
        value = getattr(model, each.name)
        check(
            each.megatron != CONSTANT or not model.use_rope_scaling or value == each.default,
            f"{flag(each.name)} is {value}, and Megatron-LM computes {each.default}, for which it "
            "has no argument",
        )


def _argument(model: ModelConfig, field: Declaration) -> Any:
    """Return a value in Megatron-LM's form: patterns as numbers or lists, tuples of one value as the value."""
    value = getattr(model, field.name)
    if value is None:
        return None
    if field.megatron == BY_LAYER:
        found = layer_pattern(field.name, value, model.num_layers)
        return list(map(int, found)) if isinstance(found, tuple) else found
    if isinstance(value, tuple):
        return value[0] if len(value) == 1 else list(value)
    return value
