"""Flags of Megatron-LM and its forks that are not fields of `config`: what each means here, or why it is refused.

Scripts written for them start unchanged, unless they ask for something that would change the model or be lost. The table is
megatron_flags.txt, whose first lines say how it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("megatron_flags.txt")


@dataclass(frozen=True)
class OtherFlag:
    """A row of the table. values: how many follow the flag, as argparse has it. accepted: values that a refused flag may have."""

    values: int | str
    refused: bool
    meaning: str
    accepted: tuple[str, ...] = ()

    def refuses(self, given: Sequence[str]) -> bool:
        """Whether these values of the flag are refused."""
        accepted = [any(_same(value, other) for other in self.accepted) for value in given]
        return self.refused and not (accepted and all(accepted))

    @property
    def note(self) -> str:
        """What the log says where the flag is accepted."""
        return "the given value is what this program does" if self.refused else self.meaning


def _same(given: str, accepted: str) -> bool:
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def _rows(text: str) -> Iterator[tuple[str, OtherFlag]]:
    for line in text.splitlines():
        if line.startswith(("noted: ", "refused: ")):
            status, _, meaning = line.partition(": ")
        elif line.startswith("  "):
            for word in line.split():
                name, takes, value = word.partition("=")
                accepted = () if value.startswith("X") or not takes else tuple(value.removesuffix("...").split("|"))
                yield name, OtherFlag((1, "+")[value.endswith("...")] if takes else 0, status == "refused", meaning, accepted)


OTHER_FLAGS: dict[str, OtherFlag] = dict(_rows(TABLE.read_text(encoding="utf-8")))
