"""Units of a stage's parameters, in the order in which backward finishes them; a gradient bucket has whole units."""

from __future__ import annotations

from ..config.run_config import RunConfig
from .stages import stage_layers

HEAD = "final norm, with an untied head"
EMBEDDING = "embeddings"
TIED = "word embedding that another stage also has"
Unit = int | str  # a layer's number, or one of these


def holds_tied_copy(run: RunConfig, stage: int) -> bool:
    first = run.placement.owner(0)[0]
    last = run.placement.last_stage
    return run.model.tied and not run.lora.on and first != last and stage in (first, last)


def units(run: RunConfig, stage: int) -> list[Unit]:
    """Return a stage's units in backward order, the tied copy last."""
    placement = run.placement
    found: list[Unit] = []
    if stage == placement.last_stage:
        found.append(HEAD)
    for model_chunk in reversed(stage_layers(run, stage)):
        found += reversed(model_chunk)
    if stage == placement.owner(0)[0]:
        found.append(EMBEDDING)
    if holds_tied_copy(run, stage):
        found.append(TIED)
    return found
