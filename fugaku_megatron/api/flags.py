"""Flags that a Trainer refuses; all others act as in the command."""

from __future__ import annotations

from ..config.fields import check, flag
from ..config.run_config import all_flags
from .config import Config


def check_flags(config: Config) -> None:
    """Raise ValueError for a flag without effect on a Trainer, unless None or False."""
    for each in all_flags():
        value = config.given.get(each.name)
        asked = value is not None and (value is not False or each.default is True)
        words = " ".join(map(str, value)) if isinstance(value, tuple) else value
        check(
            each.library is None or not asked,
            f"{flag(each.name)} {words} has no effect on Trainer: {each.library}",
        )


def trainer_notes(config: Config, has_data: bool) -> list[str]:
    """Return the notes of a config, without flags whose files a program passes to Trainer itself."""
    passed = ["save", "load"]
    if has_data:
        passed.append("data_path")
    ends = tuple(f" has no effect without {flag(name)}" for name in passed)
    return [note for note in config.notes if not note.endswith(ends)]
