"""Tables of flags in text files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.helpers import parse_layout

Presets = dict[str, dict[str, Any]]  # flags by the name that stands for them
DEFINITION = re.compile("<(.*?)> = (.*)")


def parse_row(words: str, presets: Presets) -> tuple[int, dict[str, Any]]:
    """Return the ranks and flags of a row: words of `parse_layout`, and names of presets in angle brackets."""
    ranks = 1
    flags: dict[str, Any] = {}
    for word in words.split():
        preset = presets.get(word[1:-1]) if word.startswith("<") else None
        if preset is None:
            of_word, more = parse_layout(word)
            ranks *= of_word
            flags |= more
        else:
            flags |= preset
    return ranks, flags


def read_rows(path: Path, presets: Presets) -> dict[str, tuple[int, dict[str, Any]]]:
    """Return ranks and flags by name, of lines NAME: WORDS. A line <NAME> = WORDS defines a preset."""
    presets = dict(presets)
    rows = {}
    for line in path.read_text().splitlines():
        if definition := DEFINITION.fullmatch(line):
            presets[definition[1]] = parse_row(definition[2], presets)[1]
        elif line and not line.startswith("#"):
            name, _, words = line.partition(":")
            rows[name] = parse_row(words, presets)
    return rows
