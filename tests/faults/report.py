"""What a campaign found: counts by kind as JSON and as the table of docs/reliability.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .kinds import KINDS
from .trial import Outcome

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by python -m tests.faults --write -->", "<!-- end of faults -->"
COLUMNS = ("tried", "lost", "different", "unnamed", "tracebacks")


def counts(outcomes: Sequence[Outcome], seed: int) -> dict[str, dict[str, Any]]:
    """Kind -> its counts and the seed that repeats them. missed: faults for which three runs were over too early."""
    rows = {}
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        hit = [outcome for outcome in own if outcome.hit]
        rows[kind] = {"tried": len(hit), "lost": sum(o.lost > 0 for o in hit), "different": sum(o.different for o in hit),
                      "unnamed": sum(o.unnamed for o in hit), "tracebacks": sum(o.traceback for o in hit),
                      "missed": len(own) - len(hit), "seed": seed}
    return rows


def table(rows: dict[str, dict[str, Any]], command: str) -> str:
    """Markdown."""
    lines = ["| fault | tried | lost | different | unnamed | tracebacks | repeated by `" + command + "` and |",
             "|---|---:|---:|---:|---:|---:|---|"]
    for kind, row in rows.items():
        cells = " | ".join(str(row[column]) for column in COLUMNS)
        lines.append(f"| {KINDS[kind].what} | {cells} | `--only {kind}` |")
    sums = " | ".join(str(sum(row[column] for row in rows.values())) for column in COLUMNS)
    return "\n".join([*lines, f"| sum | {sums} | |"])


def write(text: str, document: Path = DOCUMENT) -> None:
    """Put the table between the marks of the document."""
    before = document.read_text()
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    assert pattern.search(before), f"{document} has no marks for the table"
    document.write_text(pattern.sub(lambda _: f"{BEGIN}\n\n{text}\n\n{END}", before))
