"""Megatron-LM's flags that are not fields of `config`: what each does here (`megatron_flags.txt`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Flags of Megatron-LM and its forks that are not fields of `config`: what each means here, or why it is refused. Scripts written
# for them start unchanged, unless they ask for something that would change the model or be lost. The table is megatron_flags.txt,
# whose first lines say how it is read.

TABLE = Path(__file__).with_name("megatron_flags.txt")


SAVED = "saved"  # the status of arguments that are no flags


@dataclass(frozen=True)
class OtherFlag:
    """A row of the table.

    values: how many follow the flag, as argparse has it. accepted: values that a refused flag may
    have. changes_model: a checkpoint that was saved with it holds another model than its weights say.
    """

    values: int | str
    refused: bool
    meaning: str
    accepted: tuple[str, ...] = ()
    changes_model: bool = False

    def refuses(self, given: Sequence[str]) -> bool:
        """Whether these values of the flag are refused."""
        accepted = [any(_same(value, other) for other in self.accepted) for value in given]
        return self.refused and not (accepted and all(accepted))

    @property
    def note(self) -> str:
        """What the log says where the flag is accepted."""
        return "the value passed is what this program does" if self.refused else self.meaning


def _same(given: str, accepted: str) -> bool:
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def _groups(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield status, meaning and words of each line of words in the table."""
    status, meaning = "", ""
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
            accepted = (
                ()
                if value.startswith("X") or not takes
                else tuple(value.removesuffix("...").split("|"))
            )
            yield (
                name,
                OtherFlag(
                    (1, "+")[value.endswith("...")] if takes else 0,
                    status in ("refused", "model"),
                    meaning,
                    accepted,
                    status == "model",
                ),
            )


OTHER_FLAGS: dict[str, OtherFlag] = dict(_rows())


def saved_reasons() -> dict[str, tuple[str, ...]]:
    """Return the arguments that Megatron-LM saves, no flag here is named after, and change no model, by the reason."""
    reasons: dict[str, tuple[str, ...]] = {}
    for status, meaning, names in GROUPS:
        if status == SAVED:
            reasons[meaning] = (*reasons.get(meaning, ()), *names)
    return reasons


def saved_arguments() -> frozenset[str]:
    """Return the names in `saved_reasons`."""
    return frozenset(name for names in saved_reasons().values() for name in names)
