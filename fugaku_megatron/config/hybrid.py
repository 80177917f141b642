"""The layers of Megatron-LM's HybridModel, --hybrid-layer-pattern, as layers of a GPT.

The symbols are in megatron/core/models/hybrid/hybrid_layer_allocation.py there. An attention and the MLP or experts after
it are one layer here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from .fields import FieldValues, check, declarations, flag, optional
from .layer_kinds import (
    ATTENTION,
    EXPERTS_SYMBOL,
    GATED_DELTA_NET,
    MIXERS,
    MLP_SYMBOLS,
    MULTI_LATENT_ATTENTION,
    marked_layers,
)
from .model import ModelConfig
from .pipeline_layout import stage_fields

BORDER = "|"
UNSUPPORTED = {
    "M": "a Mamba-2 layer",
    "D": "a layer of DeepSeek Sparse Attention",
    "/": "the begin of layers that predict several tokens",
}
# Field with a number of symbols -> counted from the last one.
_COUNTS = {"decoder_first_pipeline_num_layers": False, "decoder_last_pipeline_num_layers": True}
# Fields with an entry for each symbol, or a number.
PER_SYMBOL = ("window_attn_skip_freq", "no_rope_freq")


@dataclass(frozen=True, kw_only=True)
class HybridFields:
    """Flags of a HybridModel, which set fields of the model and the layout."""

    hybrid_layer_pattern: str | None = optional(
        "the layers in place of --num-layers, as in Megatron-LM's HybridModel: * attention, + latent attention, - an MLP, E experts, "
        "| between stages, G a gated delta net, such as '*-*-|*E*E'; an attention and the MLP or experts after it are one layer here",
        aliases=("--hybrid-override-pattern",),
        excludes=(
            "layer_types",
            "moe_layer_freq",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
        ),
    )


class Pattern(NamedTuple):
    """A parsed pattern. layers: symbols of each layer. stages: layers of each segment"""

    layers: tuple[str, ...]
    stages: tuple[int, ...]


def parse_pattern(text: str) -> Pattern:
    """Cut a pattern into layers. Raises ValueError with the position for an unknown symbol."""
    mixers = [row.symbol for row in MIXERS.values()]
    layers: list[str] = []
    stages = [0]
    before = ""
    for position, symbol in enumerate(f"{text}{BORDER}", 1):
        place = f"--hybrid-layer-pattern {text!r:.80}: {symbol} at position {position}"
        if symbol == BORDER:
            check(stages[-1] > 0, f"{place} ends a stage without layers: add some")
            stages.append(0)
        elif symbol in MLP_SYMBOLS and before in mixers:
            layers[-1] += symbol
        else:
            check(
                symbol not in UNSUPPORTED,
                f"{place} is {UNSUPPORTED.get(symbol)}, which is not supported: *, +, G, -, E and | are",
            )
            check(
                symbol in (*mixers, *MLP_SYMBOLS),
                f"{place} is no layer: * is attention, + latent attention, G a gated delta net, - an MLP, E experts, "
                "| the border of a stage",
            )
            layers.append(symbol)
            stages[-1] += 1
        before = symbol
    return Pattern(tuple(layers), tuple(stages[:-1]))


def with_layers(values: FieldValues) -> FieldValues:
    """Replace a pattern among field values by the fields that it sets, or raise ValueError.

    As in Megatron-LM, the pattern has precedence over --num-layers, and over --num-experts if no layer has experts.
    """
    fields = dict(values)
    text = fields.pop("hybrid_layer_pattern", None)
    if text is None:
        return fields
    pattern = parse_pattern(text)
    by_borders = ("pipeline_split", *_COUNTS) if len(pattern.stages) > 1 else ()
    (declared,) = declarations(HybridFields)
    for name in (*declared.excludes, *by_borders):
        check(
            fields.get(name) is None,
            f"{flag(name)} {fields.get(name)} and --hybrid-layer-pattern {text!r:.80} exclude each other: the pattern says it",
        )
    fields["num_layers"] = len(pattern.layers)
    latent = MIXERS[MULTI_LATENT_ATTENTION].symbol in text or bool(
        fields.get("multi_latent_attention")
    )
    check(
        not latent or MIXERS[ATTENTION].symbol not in text,
        f"--hybrid-layer-pattern {text!r:.80} has * in a model with latent attention, +: write one of them for all layers with "
        "attention",
    )
    fields["multi_latent_attention"] = latent
    fields |= _layer_types(pattern)
    if EXPERTS_SYMBOL not in text:
        fields["num_experts"] = None
    fields |= _by_layer(fields, pattern)
    if len(pattern.stages) > 1:
        place = f"--hybrid-layer-pattern {text!r:.80}"
        fields |= stage_fields(place, pattern.stages, fields.get("pipeline_model_parallel_size"))
    return fields


def _layer_types(pattern: Pattern) -> dict[str, str | None]:
    """Return --layer-types, or the flags that layers with a mixer and an MLP each have in its place."""
    if any(len(layer) == 1 for layer in pattern.layers):
        return {"layer_types": ",".join(pattern.layers), "moe_layer_freq": "1"}
    experts = [EXPERTS_SYMBOL in layer for layer in pattern.layers]
    freq = "1"
    if any(experts) and not all(experts):
        freq = str([*map(int, experts)])
    found: dict[str, str | None] = {"layer_types": None, "moe_layer_freq": freq}
    delta = [int(layer[0] == MIXERS[GATED_DELTA_NET].symbol) for layer in pattern.layers]
    if any(delta):
        found["experimental_attention_variant"] = GATED_DELTA_NET
        found["linear_attention_freq"] = f"[{','.join(map(str, delta))}]"
    return found


def _by_layer(fields: FieldValues, pattern: Pattern) -> FieldValues:
    """Return the fields that count symbols, as in Megatron-LM, counted by layers: the first symbol decides the entry."""
    found: FieldValues = {}
    ends = [*accumulate(map(len, pattern.layers))]
    firsts = [0, *ends[:-1]]
    symbols = ends[-1]
    for name in PER_SYMBOL:
        if fields.get(name) is not None:
            each = marked_layers(name, fields[name], symbols)
            found[name] = str([int(each[first]) for first in firsts])
    for name, from_last in _COUNTS.items():
        if fields.get(name) is not None:
            borders = [symbols - first for first in reversed(firsts)] if from_last else ends
            check(
                fields[name] in borders,
                f"{flag(name)} {fields[name]} counts the symbols of --hybrid-layer-pattern and cuts a layer here, an attention "
                "and its MLP: pass a number that does not",
            )
            found[name] = 1 + borders.index(fields[name])
    types = fields.get("cp_comm_type") or ()
    if len(types) == symbols:
        found["cp_comm_type"] = tuple(types[first] for first in firsts)
    return found


def hybrid_notes(values: FieldValues, model: ModelConfig) -> list[str]:
    """Return notes on values that the pattern replaces. Raises ValueError for E in a model without experts."""
    text = values.get("hybrid_layer_pattern")
    if text is None:
        return []
    check(
        EXPERTS_SYMBOL not in text or model.num_experts is not None,
        f"--hybrid-layer-pattern {text!r:.80} has E, a layer with experts: pass --num-experts, or - in its place",
    )
    notes = []
    layers = values.get("num_layers")
    if layers not in (None, model.num_layers):
        notes.append(
            f"--num-layers {layers} has no effect: --hybrid-layer-pattern {text!r:.80} has {model.num_layers} layers here, of "
            "which an attention and the MLP after it are one"
        )
    if EXPERTS_SYMBOL not in text and values.get("num_experts"):
        notes.append(f"--num-experts has no effect: --hybrid-layer-pattern {text!r:.80} has no E")
    return notes
