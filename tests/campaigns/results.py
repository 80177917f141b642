"""Flags that campaigns share, and their outcomes as JSON lines: the same command continues an interrupted campaign."""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.campaigns import reliability_page

Record = dict[str, Any]  # an outcome


def positive(text: str) -> int:
    """Read a flag's number, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def share(text: str) -> float:
    """Read a flag's number from 0 to 1."""
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return number


def bare_parser(campaign: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser without flags, which ends the program with one line for a mistake."""
    return argparse.ArgumentParser(
        prog=f"python -m tests.campaigns.{campaign}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def parser(campaign: str, description: str | None, count: int) -> argparse.ArgumentParser:
    """Return a parser of the flags that campaigns share."""
    made = bare_parser(campaign, description)
    made.add_argument("--count", type=positive, default=count, help="faults (default: %(default)s)")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--first", type=int, default=0, help="number of the first fault")
    made.add_argument("--results", type=Path, metavar="FILE", help="outcomes, one a line")
    made.add_argument("--write", action="store_true", help="write the table of docs/reliability.md")
    return made


class Results:
    """Records of a seed by number, from a file if it exists, where each is kept at once."""

    def __init__(self, path: Path | None, seed: int) -> None:
        self._path = path
        self._seed = seed
        self._revision = revision()
        self._records: dict[int, Record] = {}
        if path is not None and path.exists():
            lines = map(json.loads, path.read_text().splitlines())
            self._records = {line["number"]: line for line in lines if line["seed"] == seed}

    def missing(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if number not in self._records]

    def add(self, number: int, record: Record) -> None:
        record = {**record, "number": number, "seed": self._seed, "revision": self._revision}
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")
        self._records[number] = record

    def of(self, numbers: Iterable[int]) -> list[Record]:
        """Return the records in this order, without those that are missing."""
        return [self._records[number] for number in numbers if number in self._records]


def revision() -> str:
    """Return this checkout's commit, with a + if files differ; "unknown" outside a checkout."""
    found = subprocess.run(
        "git describe --always --dirty=+ --exclude=*".split(),
        cwd=reliability_page.DOCUMENT.parent,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip() if found.returncode == 0 else "unknown"
