"""Megatron-LM's --pipeline-model-parallel-layout, the layers of each virtual stage in letters.

The grammar is in megatron/core/transformer/pipeline_parallel_layer_layout.py there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .fields import FieldValues, check, declarations, flag, optional

EMBEDDING = "E"
LAYER = "t"
LOSS = "L"
BORDER = "|"
PREDICTION = "m"  # an MTP module
LONGEST = 2**14  # letters
_GROUP = re.compile(r"\(([^()]*)\)\*(\d{1,5})")
_LETTER = re.compile(r"([^()*\d])\*(\d{1,5})")


@dataclass(frozen=True, kw_only=True)
class PipelineLayoutFields:
    """The flag of a layout in letters, which sets fields of the layout."""

    pipeline_model_parallel_layout: str | None = optional(
        "layers of each model chunk in the order of the model, as in Megatron-LM: E the embedding, t a layer, m a module of "
        "--mtp-num-layers, L the loss, | a border, *N repetitions, such as 'Et*3|(tt|)*6L'; the first and the last may have no t",
        excludes=(
            "pipeline_split",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
    )


def parse_layout(text: str, predictions: int = 0) -> tuple[int, ...]:
    """Return the layers of each virtual stage. Raises ValueError for another text.

    predictions: MTP modules of the model, all next to the loss; their stage needs no layer
    """
    place = f"--pipeline-model-parallel-layout {text!r:.80}"
    letters = text.replace(",", "")
    for repeated in (_GROUP, _LETTER):
        letters = repeated.sub(_unrolled, letters)
    check(len(letters) < LONGEST, f"{place} has more than {LONGEST} letters: shorten it")
    known = (EMBEDDING, LAYER, PREDICTION, LOSS, BORDER)
    wrong = next((each for each in letters if each not in known), "")
    check(not wrong, f"{place} has {wrong!r}: pass E, t, m, L, | and repetitions such as (tt|)*6")
    middle = letters.removeprefix(EMBEDDING).removesuffix(LOSS)
    check(
        len(middle) == len(letters) - 2 and not {EMBEDDING, LOSS} & {*middle},
        f"{place}: the embedding E is first and the loss L last, once each",
    )
    found = middle.count(PREDICTION)
    check(
        found == predictions,
        f"{place} has {found} m, and --mtp-num-layers is {predictions or None}: change one, so that "
        "each MTP module is an m",
    )
    layers = middle.removesuffix(PREDICTION * predictions)
    check(
        PREDICTION not in layers,
        f"{place} has an m in another place than before L: end it with {PREDICTION * predictions}L",
    )
    stages = tuple(map(len, layers.split(BORDER)))
    check(
        all(stages[1:-1]) and any(stages),
        f"{place} has a stage without layers between the first and the last: move a t there",
    )
    return stages


def _unrolled(repeated: re.Match[str]) -> str:
    return repeated[1] * min(int(repeated[2]), LONGEST)


def with_stages(values: FieldValues) -> FieldValues:
    """Replace a layout among field values by the fields that it sets, or raise ValueError."""
    fields = dict(values)
    text = fields.pop("pipeline_model_parallel_layout", None)
    if text is None:
        return fields
    stages = parse_layout(text, fields.get("mtp_num_layers") or 0)
    place = f"--pipeline-model-parallel-layout {text!r:.80}"
    (declared,) = declarations(PipelineLayoutFields)
    for name in declared.excludes:
        check(
            not fields.get(name),
            f"{flag(name)} {fields.get(name)} and {place} exclude each other: the layout says it",
        )
    layers = fields.get("num_layers")
    check(
        layers in (None, sum(stages)),
        f"{place} has {sum(stages)} layers, and --num-layers is {layers}: change one",
    )
    return fields | stage_fields(place, stages, fields.get("pipeline_model_parallel_size"))


def stage_fields(place: str, layers: tuple[int, ...], stages: int | None) -> FieldValues:
    """Return the fields that virtual stages with these layers need. place: flag and value, for a mistake"""
    size = stages or 1
    check(
        len(layers) % size == 0,
        f"{place} has {len(layers)} stages, and --pipeline-model-parallel-size is {size}: pass a multiple of it",
    )
    if size == 1:
        return {}
    fields: FieldValues = {"pipeline_split": ",".join(map(str, layers))}
    if len(layers) > size:
        fields["num_virtual_stages_per_pipeline_rank"] = len(layers) // size
    return fields
