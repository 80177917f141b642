"""The layers of Megatron-LM's HybridModel, --hybrid-layer-pattern, as layers of a GPT.

The symbols are in megatron/core/models/hybrid/hybrid_layer_allocation.py there. An attention and the MLP or experts after
it are one layer here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .fields import check, flag, optional
from .layer_kinds import layer_pattern
from .model import ModelConfig
from .pipeline_layout import stage_fields

ATTENTION = "*"
EXPERTS = "E"
MLPS = ("-", EXPERTS)
BORDER = "|"
UNSUPPORTED = {
    "M": "a Mamba-2 layer",
    "G": "a Gated Delta Network layer",
    "D": "a layer of DeepSeek Sparse Attention",
    "+": "a layer of multi-latent attention",
    "/": "the begin of layers that predict several tokens",
}
# Fields in symbols.
_COUNTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
# Field with an entry for each symbol, or a number N -> entry of every Nth symbol, the opposite of the others.
_PER_SYMBOL = {"window_attn_skip_freq": False, "no_rope_freq": True}
# Fields that the pattern replaces.
_BY_PATTERN = (
    "moe_layer_freq",
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
)


@dataclass(frozen=True, kw_only=True)
class HybridFields:
    """Flags of a HybridModel, which set fields of the model and the layout."""

    hybrid_layer_pattern: str | None = optional(
        "the layers in place of --num-layers, as in Megatron-LM's HybridModel: * attention and - MLP or E experts after it, "
        "| between stages, such as '*-*-|*E*E'",
        aliases=("--hybrid-override-pattern",),
    )


class Pattern(NamedTuple):
    """A parsed pattern. experts: True for each layer with experts. stages: layers of each segment"""

    experts: tuple[bool, ...]
    stages: tuple[int, ...]


def parse_pattern(text: str) -> Pattern:
    """Raise ValueError, one line with the position, for a pattern that no GPT equals."""
    experts: list[bool] = []
    stages = [0]
    before = ""
    for position, symbol in enumerate(f"{text}{BORDER}", 1):
        _check_symbol(text, position, symbol)
        place = f"--hybrid-layer-pattern {text!r:.80}: {symbol} at position {position}"
        if before == ATTENTION:
            check(
                symbol in MLPS,
                f"--hybrid-layer-pattern {text!r:.80}: * at position {position - 1} has no - or E after it, and "
                "a layer here has both: add one",
            )
            experts.append(symbol == EXPERTS)
            stages[-1] += 1
        elif symbol == BORDER:
            check(stages[-1] > 0, f"{place} ends a stage without layers: add some")
            stages.append(0)
        else:
            check(
                symbol == ATTENTION,
                f"{place} has no * before it, and a layer here has both: add it",
            )
        before = symbol
    return Pattern(tuple(experts), tuple(stages[:-1]))


def _check_symbol(text: str, position: int, symbol: str) -> None:
    place = f"--hybrid-layer-pattern {text!r:.80}: {symbol} at position {position}"
    check(
        symbol not in UNSUPPORTED,
        f"{place} is {UNSUPPORTED.get(symbol)}, which is not supported: *, -, E and | are",
    )
    check(
        symbol in (ATTENTION, *MLPS, BORDER),
        f"{place} is no layer: * is attention, - an MLP, E experts, | the border of a stage",
    )


def with_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a pattern among field values by the fields that it sets. Raises ValueError, one line.

    As in Megatron-LM, the pattern has precedence over --num-layers, and over --num-experts if no layer has experts.
    """
    fields = dict(values)
    text = fields.pop("hybrid_layer_pattern", None)
    if text is None:
        return fields
    pattern = parse_pattern(text)
    by_borders = ("pipeline_split", *_COUNTS) if len(pattern.stages) > 1 else ()
    for name in (*_BY_PATTERN, *by_borders):
        check(
            fields.get(name) is None,
            f"{flag(name)} {fields.get(name)} and --hybrid-layer-pattern {text!r:.80} exclude each other: the pattern says it",
        )
    fields["num_layers"] = len(pattern.experts)
    fields["moe_layer_freq"] = str([*map(int, pattern.experts)])
    if all(pattern.experts) or not any(pattern.experts):
        fields["moe_layer_freq"] = "1"
    if not any(pattern.experts):
        fields["num_experts"] = None
    fields |= _of_attention(fields, 2 * len(pattern.experts))
    if len(pattern.stages) > 1:
        place = f"--hybrid-layer-pattern {text!r:.80}"
        fields |= stage_fields(place, pattern.stages, fields.get("pipeline_model_parallel_size"))
    return fields


def _of_attention(fields: Mapping[str, Any], symbols: int) -> dict[str, Any]:
    """Return the fields that count every symbol, as in Megatron-LM, counted by attentions, which are every other symbol."""
    found: dict[str, Any] = {}
    for name, of_every_nth in _PER_SYMBOL.items():
        if fields.get(name) is not None:
            each = layer_pattern(name, fields[name], symbols)
            if isinstance(each, int):
                each = tuple((place % each == 0) == of_every_nth for place in range(1, symbols + 1))
            found[name] = str([*map(int, each[::2])])
    for name in _COUNTS:
        if fields.get(name) is not None:
            check(
                fields[name] % 2 == 0,
                f"{flag(name)} {fields[name]} counts the symbols of --hybrid-layer-pattern, of which two are a layer here: "
                "pass an even number",
            )
            found[name] = fields[name] // 2
    if len(fields.get("cp_comm_type") or ()) == symbols:
        found["cp_comm_type"] = fields["cp_comm_type"][::2]
    return found


def hybrid_notes(values: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """Return notes on values that the pattern replaces. Raises ValueError for E in a model without experts."""
    text = values.get("hybrid_layer_pattern")
    if text is None:
        return []
    check(
        EXPERTS not in text or model.num_experts is not None,
        f"--hybrid-layer-pattern {text!r:.80} has E, a layer with experts: pass --num-experts, or - in its place",
    )
    notes = []
    layers = values.get("num_layers")
    if layers not in (None, model.num_layers):
        notes.append(
            f"--num-layers {layers} has no effect: --hybrid-layer-pattern {text!r:.80} has {model.num_layers} pairs of an "
            "attention and an MLP, which are the layers here"
        )
    if EXPERTS not in text and values.get("num_experts"):
        notes.append(f"--num-experts has no effect: --hybrid-layer-pattern {text!r:.80} has no E")
    return notes
