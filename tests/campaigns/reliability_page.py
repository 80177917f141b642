"""Tables of campaigns in docs/reliability.md."""

from __future__ import annotations

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def marks(campaign: str) -> tuple[str, str]:
    """Return the lines around the table of a campaign, which is named as its package."""
    begin = f"<!-- {campaign}: written by python -m tests.campaigns.{campaign} --write -->"
    return begin, f"<!-- end of {campaign} -->"


def write(campaign: str, text: str, document: Path = DOCUMENT) -> None:
    """Put the table between the document's marks."""
    begin, end = marks(campaign)
    before = document.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    assert pattern.search(before), f"{document} has no marks for the table"
    table = text.rstrip("\n")
    document.write_text(pattern.sub(lambda _: f"{begin}\n\n{table}\n\n{end}", before))
