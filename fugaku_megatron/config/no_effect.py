"""Flags without effect, for want of another one or because one takes precedence."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .fields import flag
from .run_config import RunConfig, all_flags


def no_effect_notes(
    run: RunConfig, values: Mapping[str, Any], passed: Collection[str] | None
) -> list[str]:
    """Return a note for each given value without effect.

    passed: fields that notes may mention; None: all of `values`
    """
    mentioned = values if passed is None else passed
    notes = [
        f"{flag(each.name)} has no effect without {need.text}"
        for each in all_flags()
        for need in each.needs
        if each.name in values and each.name in mentioned and not need.is_met(run)
    ]
    if values.get("lr_warmup_tokens") and values.get("lr_warmup_fraction"):
        notes.append("--lr-warmup-fraction has no effect with --lr-warmup-tokens, which wins")
    return notes
