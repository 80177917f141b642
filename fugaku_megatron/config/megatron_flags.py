"""Flags of Megatron-LM and its forks that are not fields of `config`, from `megatron_flags.txt`.

Megatron-LM's scripts start unchanged, unless a flag would change the model or be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .fields import Requirement, flag

TABLE = Path(__file__).with_name("megatron_flags.txt")
SAVED = "saved"  # status of saved arguments that are not flags
# Condition of a status -> the reason why other runs refuse the flag.
CONDITIONS = {
    "rotary": Requirement(
        "it goes with rope, as in Megatron-LM: pass --position-embedding-type rope, or none for no positions at all",
        lambda run: run.model.rotary,
    ),
    "one_stage": Requirement(
        "--pipeline-model-parallel-size is above 1: leave one of them out",
        lambda run: run.pp == 1,
    ),
    "no_experts": Requirement(
        "this variant of experts is not supported: leave it out",
        lambda run: run.model.num_experts is None,
    ),
}


@dataclass(frozen=True)
class OtherFlag:
    """A row in the table.

    values: as argparse's nargs
    accepted: values that are accepted although the flag is refused
    changes_model: True if a checkpoint saved with the flag is another model than its weights
        suggest
    unless: field that has precedence over the flag; if it is set, the flag is accepted
    condition: the runs that accept the flag, and the reason of the others
    """

    values: int | str
    refused: bool
    meaning: str
    accepted: tuple[str, ...] = ()
    changes_model: bool = False
    unless: str = ""
    condition: Requirement | None = None

    def refuses(self, given: Sequence[str], fields: Mapping[str, object] | None = None) -> bool:
        """Return True for a refused value. fields: others on the command line"""
        if not self.refused or (fields or {}).get(self.unless):
            return False
        accepted = [any(_same(value, other) for other in self.accepted) for value in given]
        return not (accepted and all(accepted))

    @property
    def note(self) -> str:
        if self.unless:
            return f"{flag(self.unless)} has precedence"
        return "the value passed is what this program does" if self.refused else self.meaning


def _same(given: str, accepted: str) -> bool:
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def _groups(text: str) -> Iterator[tuple[str, str, list[str]]]:
    status = ""
    meaning = ""
    for line in text.splitlines():
        if line.startswith("  "):
            yield status, meaning, line.split()
        elif not line.startswith("#"):
            status, _, meaning = line.partition(": ")


GROUPS = tuple(_groups(TABLE.read_text(encoding="utf-8")))


def _rows() -> Iterator[tuple[str, OtherFlag]]:
    for status, meaning, words in GROUPS:
        if status == SAVED:
            continue
        for word in words:
            name, takes, value = word.partition("=")
            values: int | str = 0
            accepted: tuple[str, ...] = ()
            if takes:
                values = "+" if value.endswith("...") else 1
                if not value.startswith("X"):
                    accepted = tuple(value.removesuffix("...").split("|"))
            kind, *exception = status.split()
            named = dict([exception] if exception else [])
            yield (
                name,
                OtherFlag(
                    values,
                    refused=kind in ("refused", "model"),
                    meaning=meaning,
                    accepted=accepted,
                    changes_model=kind == "model",
                    unless=named.get("unless", ""),
                    condition=CONDITIONS.get(named.get("if", "")),
                ),
            )


OTHER_FLAGS: dict[str, OtherFlag] = dict(_rows())


def saved_reasons() -> dict[str, tuple[str, ...]]:
    """Return Megatron-LM's saved arguments without a flag here that change no model, by reason."""
    reasons: dict[str, tuple[str, ...]] = {}
    for status, meaning, names in GROUPS:
        if status == SAVED:
            reasons[meaning] = (*reasons.get(meaning, ()), *names)
    return reasons


def saved_arguments() -> frozenset[str]:
    return frozenset(name for names in saved_reasons().values() for name in names)
