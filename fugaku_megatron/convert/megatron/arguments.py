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
from ...config.experts import EXPERTS
from ...config.fields import FieldValues, as_tuples, check, check_type, flag, is_off
from ...config.hybrid import PER_SYMBOL, Pattern, parse_pattern, with_layers
from ...config.layer_kinds import DENSE_SYMBOL, EXPERTS_SYMBOL, MIXERS, layer_pattern
from ...config.megatron_flags import OTHER_FLAGS, saved_arguments
from ...config.model import (
    LEARNED,
    MASKED,
    MLP_OF_EXPERTS,
    NO_POSITIONS,
    ROPE,
    ROPE_SCALING,
    VANILLA,
    ModelConfig,
)

VERSION = 3.0  # of checkpoints that are written; since 2.0 each head, or group, has its queries, key and value together
# Ours -> the values that arguments of theirs describe.
_DESCRIBED: dict[str, tuple[Any, ...]] = {
    "normalization": ("LayerNorm", "RMSNorm"),
    "qk_layernorm_all_heads": (False,),
    "geglu": (False,),
    "activation_func": (None,),
    "parallel_residual": (False,),
    "embedding_multiplier": (1.0,),
    "rope_dynamic_factor": (None,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (None,),
    "logits_scaling": (1.0,),
    "window_rotary_base": (None,),
    "norm_placement": ("pre",),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "xielu": (False,),
}
# Arguments of both programs, whose weights are not converted -> the values that are.
_NOT_CONVERTED: dict[str, tuple[Any, ...]] = {
    "softmax_type": (VANILLA,),
    "quick_geglu": (False,),
    "glu_linear_offset": (0,),
    "activation_func_clamp_value": (None,),
}
_CONSTANTS = ROPE_SCALING[
    1:
]  # fields without an argument there: Megatron-LM computes the defaults of here
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
        "norm_epsilon",
        "padded_vocab_size",
        "use_rotary_position_embeddings",
        *(f.name for f in fields(ModelConfig) if f.name != "layer_types"),
    }
)
# Arguments that are a number or a list there, and text here.
BY_LAYER = (*PER_SYMBOL, "linear_attention_freq")
_OWN = (
    *EXPERTS,
    "disable_bias_linear",
    "position_embedding_type",
    "window_size",
    *BY_LAYER,
    "layer_types",
    "vocab_size",
    "padded_vocab_size",
    "make_vocab_size_divisible_by",
    "mask_vocab_padding",
)


def by_name(args: FieldValues | argparse.Namespace) -> FieldValues:
    return args if isinstance(args, dict) else vars(args)


def check_saved(given: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
    """Raise ValueError for a saved argument that is on, and unknown or changes the model.

    ignored: names that the user declares harmless
    """
    for name, converted in _NOT_CONVERTED.items():
        value = given.get(name)
        check(
            value is None or value in converted,
            f"{name} is {value!r:.60}: Megatron-LM's weights of such layers are not converted",
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
    values |= {name: str(given[name]) for name in BY_LAYER if not is_off(given.get(name))}
    pattern = pattern_of(given)
    if pattern is not None:
        values["hybrid_layer_pattern"] = pattern
        for name in ("moe_layer_freq", "linear_attention_freq"):  # not read by a HybridModel
            values.pop(name, None)
    model = ModelConfig(**with_layers(values))
    _check_biases(model)
    return model


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
    left_out = {*_OWN}
    if given.get("num_experts") is not None:
        left_out -= {*EXPERTS}
    if given.get("norm_epsilon") is not None:  # the newer name
        given = {**given, "layernorm_epsilon": given["norm_epsilon"]}
    values: FieldValues = {}
    for f in fields(ModelConfig):
        value = given.get(f.name)
        if value is None or f.name in left_out:
            continue
        if f.name == "moe_layer_freq":
            value = str(value)
        elif f.type.startswith("tuple") and not isinstance(value, list | tuple):
            value = (value,)
        check_type(f, value)
        values[f.name] = value
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
    for name, values in (_DESCRIBED | _NOT_CONVERTED).items():
        check(
            getattr(model, name) in values,
            f"{flag(name)} is {getattr(model, name)}, and Megatron-LM's GPT computes "
            f"{' or '.join(map(str, values))}",
        )
    for f in fields(ModelConfig):
        value = getattr(model, f.name)
        check(
            f.name not in _CONSTANTS or not model.use_rope_scaling or value == f.default,
            f"{flag(f.name)} is {value}, and "
            f"Megatron-LM computes {f.default}, for which it has no argument",
        )
    same = {f.name: getattr(model, f.name) for f in fields(ModelConfig) if f.name not in _OWN}
    same["num_query_groups"] = (
        model.num_query_groups or 1
    )  # its default, which counts with group_query_attention
    window = None if model.window is None else (model.window - 1, 0)
    same |= {name: _by_layer(model, name) for name in BY_LAYER}
    return argparse.Namespace(
        **same,
        norm_epsilon=model.layernorm_epsilon,
        add_bias_linear=not model.disable_bias_linear,
        position_embedding_type=model.position_embedding_type,
        add_position_embedding=model.learned_positions,
        window_size=window,
        vocab_size=model.vocab_size,
        padded_vocab_size=rows,
        make_vocab_size_divisible_by=model.make_vocab_size_divisible_by,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=None,
        **_expert_arguments(model),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        tokenizer_type="GPT2BPETokenizer",
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


def _by_layer(model: ModelConfig, name: str) -> int | list[int] | None:
    text = getattr(model, name)
    found = None if text is None else layer_pattern(name, text, model.num_layers)
    return list(map(int, found)) if isinstance(found, tuple) else found


def _expert_arguments(model: ModelConfig) -> FieldValues:
    if model.num_experts is None:
        return {"num_experts": None}
    values = {name: getattr(model, name) for name in EXPERTS}
    values["moe_layer_freq"] = _by_layer(model, "moe_layer_freq")
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        several = values[name]
        values[name] = list(several) if len(several) > 1 else several[0]
    return values
