"""Tables of refusals in tests/refusals: the words that are passed, and the line that refuses them."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "refusals"
NAME = re.compile(r"<([\w-]+)>")
DEFINITION = re.compile(r"<([\w-]+)> = (.*)")


def refusals(table: str) -> list:
    """Return (start, words, line) of each row of a table. The head of its file describes the format."""
    texts = {"digits": "9" * 5000, "huge": str(10**400)}
    start = ""
    cases = []
    for row in (FOLDER / f"{table}.txt").read_text().splitlines():
        if definition := DEFINITION.fullmatch(row):
            texts[definition[1]] = fill(definition[2], texts)
        elif row.startswith("[") and row.endswith("]"):
            start = fill(row[1:-1], texts)
        elif row and not row.startswith("#"):
            words, line = row.split(" => ")
            cases.append(pytest.param(start, fill(words, texts), line, id=words[:60]))
    assert cases
    return cases


def fill(text: str, texts: dict[str, str]) -> str:
    """Replace the names in a text."""
    return NAME.sub(lambda name: texts[name[1]], text)


def assert_refusal(said: str, line: str) -> None:
    """Check one line of a program. " ... " in the expected line is any text."""
    assert "\n" not in said
    for part in line.split(" ... "):
        assert part in said
