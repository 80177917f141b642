"""Table of a campaign's outcomes in docs/reliability.md."""

from __future__ import annotations

from collections.abc import Sequence

from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.trial import Outcome


def counts(found: Sequence[Outcome]) -> str:
    """Return the cells of a row: faults that were tried, and those with each kind of mistake."""
    hit = [outcome for outcome in found if outcome.hit]
    lost = sum(outcome.lost > 0 for outcome in hit)
    different = sum(outcome.different for outcome in hit)
    unnamed = sum(outcome.unnamed for outcome in hit)
    tracebacks = sum(outcome.traceback for outcome in hit)
    return f"{len(hit)} | {lost} | {different} | {unnamed} | {tracebacks}"


def table(outcomes: Sequence[Outcome], command: str) -> str:
    lines = [
        f"| fault | tried | lost | different | unnamed | tracebacks | repeated by `{command}` and |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for kind in KINDS:
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        if own:
            lines.append(f"| {KINDS[kind].what} | {counts(own)} | `--only {kind}` |")
    return "\n".join([*lines, f"| sum | {counts(outcomes)} | |"])
