"""A campaign's findings: counts by kind as JSON and as the table in docs/reliability.md."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fugaku_megatron.config.fields import check
from tests.campaigns import reliability_page
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.trial import Outcome

COLUMNS = ("tried", "lost", "different", "unnamed", "tracebacks")


def counts(outcomes: Sequence[Outcome], seed: int) -> dict[str, dict[str, Any]]:
    """Counts for a kind and the seed that repeats them. missed: faults whose three runs were over too early."""
    rows = {}
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        hit = [outcome for outcome in own if outcome.hit]
        rows[kind] = {
            "tried": len(hit),
            "lost": sum(o.lost > 0 for o in hit),
            "different": sum(o.different for o in hit),
            "unnamed": sum(o.unnamed for o in hit),
            "tracebacks": sum(o.traceback for o in hit),
            "missed": len(own) - len(hit),
            "seed": seed,
        }
    return rows


def revision() -> str:
    """Return this checkout's commit, with a + if files differ; "unknown" outside a checkout."""
    found = subprocess.run(
        "git describe --always --dirty=+ --exclude=*".split(),
        cwd=reliability_page.DOCUMENT.parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() if found.returncode == 0 else "unknown"


@dataclass
class Record:
    """A campaign's outcomes, in a file that is complete after every fault. kinds: the kinds that take turns"""

    path: Path | None
    seed: int
    kinds: Sequence[str]
    outcomes: list[Outcome] = field(default_factory=list)
    revisions: dict[str, str] = field(
        default_factory=dict
    )  # number of a fault -> of the program that met it

    @staticmethod
    def start(path: Path | None, seed: int, kinds: Sequence[str], resume: bool) -> Record:
        """Return a new record, or the record in `path`. Raise ValueError if it belongs to another campaign."""
        record = Record(path, seed, list(kinds))
        if not resume or not path.exists():
            return record
        saved = json.loads(path.read_text())
        for name, value in (("seed", seed), ("turns", list(kinds))):
            check(
                saved[name] == value,
                f"--json {path} has the campaign of {name} {saved[name]}, not {value}: give its own, or "
                "another file",
            )
        record.outcomes = [Outcome(**outcome) for outcome in saved["outcomes"]]
        record.revisions = saved["revisions"]
        return record

    @property
    def numbers(self) -> set[int]:
        """Return the numbers of tried faults."""
        return {outcome.number for outcome in self.outcomes}

    def add(self, outcome: Outcome) -> None:
        """One more, on the disk before the next."""
        self.outcomes.append(outcome)
        self.revisions[str(outcome.number)] = revision()
        if self.path is not None:
            content = {
                "seed": self.seed,
                "turns": self.kinds,
                "kinds": counts(self.outcomes, self.seed),
                "revisions": self.revisions,
                "outcomes": [outcome.record() for outcome in self.outcomes],
            }
            new = self.path.with_name(f"{self.path.name}.new")
            new.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(new, self.path)

    def table(self) -> str:
        """Return all outcomes as Markdown."""
        self.outcomes.sort(key=lambda outcome: (outcome.number % len(self.kinds), outcome.number))
        command = f"python -m tests.campaigns.faults --seed {self.seed} --count {max(self.numbers, default=-1) + 1}"
        return table(counts(self.outcomes, self.seed), command)


def table(rows: dict[str, dict[str, Any]], command: str) -> str:
    """Markdown."""
    lines = [
        "| fault | tried | lost | different | unnamed | tracebacks | repeated by `"
        + command
        + "` and |",
        "|---|---:|---:|---:|---:|---:|---|",
    ]
    for kind, row in rows.items():
        cells = " | ".join(str(row[column]) for column in COLUMNS)
        lines.append(f"| {KINDS[kind].what} | {cells} | `--only {kind}` |")
    sums = " | ".join(str(sum(row[column] for row in rows.values())) for column in COLUMNS)
    return "\n".join([*lines, f"| sum | {sums} | |"])
