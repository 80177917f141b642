"""Faults at random moments in small runs on real MPI ranks: lost work, and the bits compared with an undisturbed run.

    make faults                                           as many as FAULTS says, the table of docs/reliability.md
    python -m tests.campaigns.faults --count 100 --seed 3 --results faults.jsonl
    python -m tests.campaigns.faults --count 1 --seed 3 --first 57  that fault again

Fault number N in a seed has its own random generator; kinds take turns. A fault takes two to four job starts, and half its time
are waits: --workers tries several at a time. For each kind:

    tried         faults that hit a run before its end
    lost          faults after which more iterations were repeated than the save interval allows (with --async-save: twice that)
    different     faults after which the last loss or checkpoint differs by a bit, or the run did not end
    unnamed       faults that hung, or that the log did not name
    tracebacks    faults with a traceback in the log

Left out: faults of several nodes at a time.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.campaigns import reliability_page, results
from tests.campaigns.faults import jobs, report
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.trial import Outcome, TooLate, Trial, judge
from tests.campaigns.results import Results

ATTEMPTS = 3  # for a fault that comes too late


class Campaign:
    """Faults in a folder that is removed afterwards, with one undisturbed run for layouts that end with the same bits."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.data = jobs.write_data(folder)
        self._references: dict[str, dict[str, Any]] = {}
        self._reference_lock = threading.Lock()

    def fault(self, number: int) -> Outcome:
        """One fault. A run that is over too early is tried again."""
        name = kind_of(number)
        rng = random.Random(f"{self.seed} {name} {number}")
        begin = time.monotonic()
        layout = KINDS[name].layout(number) if KINDS[name].layout else rng.choice(jobs.LAYOUTS)
        outcome = Outcome(number, name, layout.name)
        for attempt in range(ATTEMPTS):
            trial = Trial(self.folder / f"fault{number}.{attempt}", layout, self.data, rng)
            trial.folder.mkdir()
            try:
                with jobs.network(layout):
                    finished = KINDS[name].disturb(trial)
            except TooLate:
                outcome.hit = False
                continue
            finally:
                outcome.seconds = time.monotonic() - begin
            outcome.hit = True
            judge(trial, outcome, KINDS[name].named, finished, self.reference(layout))
            break
        if outcome.right:
            for folder in self.folder.glob(f"fault{number}.*"):
                shutil.rmtree(folder, ignore_errors=True)
        return outcome

    def reference(self, layout: jobs.Layout) -> dict[str, Any]:
        """Return the end result of an undisturbed run, which layouts with the same `plain` share."""
        plain = next((each for each in jobs.LAYOUTS if each.name == layout.plain), layout)
        with self._reference_lock:
            if plain.name not in self._references:
                self._references[plain.name] = self._undisturbed(
                    plain, self.folder / f"whole{len(self._references)}"
                )
            return self._references[plain.name]

    def _undisturbed(self, layout: jobs.Layout, folder: Path) -> dict[str, Any]:
        """Run a layout with a single save, at the end."""
        trial = Trial(folder, layout, self.data, random.Random(0))
        folder.mkdir()
        code = trial.run("--save-interval", str(jobs.ITERATIONS))
        assert code == 0, f"the undisturbed run of {layout.name} failed: {trial.text()[-2000:]}"
        return jobs.final(folder)


def kind_of(number: int) -> str:
    return list(KINDS)[number % len(KINDS)]


def usable(kinds: Sequence[str]) -> list[str]:
    """Return the kinds that can be tried here, and print the others."""
    for kind in kinds:
        if reason := KINDS[kind].missing():
            print(f"{kind} is left out: {reason}", flush=True)
    return [kind for kind in kinds if not KINDS[kind].missing()]


def try_all(seed: int, workers: int, numbers: Sequence[int], found: Results) -> float:
    """Try the faults with these numbers, print each and add it to the results; return the seconds."""
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults.") as folder,
        ThreadPoolExecutor(workers) as pool,
    ):
        campaign = Campaign(Path(folder), seed)
        for tried in as_completed([pool.submit(campaign.fault, number) for number in numbers]):
            outcome = tried.result()
            found.add(outcome.number, asdict(outcome))
            verdict = "right" if outcome.right else f"WRONG {outcome.detail}"
            print(
                f"{outcome.number} {outcome.kind}, {outcome.layout}, {outcome.seconds:.1f} s: "
                f"{verdict if outcome.hit else 'the run was over'}",
                flush=True,
            )
    return time.monotonic() - begin


def main() -> int:
    """Return 1 if anything was lost, different, unnamed or a traceback."""
    made = results.parser("faults", __doc__, count=100)
    made.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    made.add_argument("--workers", type=results.positive, default=1, help="faults tried at a time")
    options = made.parse_args()
    chosen = usable(options.only)
    end = options.first + options.count
    numbers = [number for number in range(options.first, end) if kind_of(number) in chosen]
    found = Results(options.results, options.seed)
    missing = found.missing(numbers)
    seconds = try_all(options.seed, options.workers, missing, found)
    outcomes = [Outcome.of(record) for record in found.of(numbers)]
    command = f"python -m tests.campaigns.faults --seed {options.seed} --count {end}"
    table = report.table(outcomes, command)
    print(table, f"{60 * len(missing) / seconds:.1f} faults per minute", sep="\n")
    if options.write:
        reliability_page.write("faults", table)
    return int(not all(outcome.right for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
