"""Numbers in files and texts, and lines on stderr."""

from __future__ import annotations

import sys
from typing import Any

# Seconds of a unit, its name, and the smaller unit printed with it.
_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def rounded(value: Any, digits: int) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(part, digits) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part, digits) for part in value]
    return value


def duration_text(seconds: float) -> str:
    """Return at most two units: 8 s, 3 min 20 s, 5 h 12 min, 2 d 4 h."""
    whole = max(0, round(seconds))
    for unit, name, smaller, small_name in _UNITS:
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // smaller} {small_name}"
    return f"{whole} s"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say(line: str) -> None:
    """Print a line on stderr, next to a command's results on stdout."""
    print(line, file=sys.stderr, flush=True)
