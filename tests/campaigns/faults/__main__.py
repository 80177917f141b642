"""Faults at random moments in small runs on real MPI ranks: lost work, and the bits compared with an undisturbed run.

    make faults                                           as many as FAULTS says, the table of docs/reliability.md
    python -m tests.campaigns.faults --count 100 --seed 3 --json faults.json
    python -m tests.campaigns.faults --count 100 --seed 3 --json faults.json --resume  those that the file has not yet
    python -m tests.campaigns.faults --count 1 --seed 3 --first 57  that fault again

Fault number N in a seed has its own random generator; kinds take turns. A fault takes two to four job starts, and half its time
are waits: --workers tries several at a time. --json is written after every fault, so that a long campaign may be stopped and
resumed; it keeps the program's revision for each fault. For each kind:

    tried         faults that hit a run before its end
    lost          faults after which more iterations were repeated than the save interval allows (with --async-save: twice that)
    different     faults after which the last loss or checkpoint differs by a bit, or the run did not end
    unnamed       faults that hung, or that the log did not name
    tracebacks    faults with a traceback in the log

Left out: faults of several nodes at a time.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fugaku_megatron.cli.parser import Parser
from fugaku_megatron.cli.program import guarded
from fugaku_megatron.config.fields import check
from tests.campaigns import reliability_page
from tests.campaigns.faults import jobs, report
from tests.campaigns.faults.kinds import KINDS
from tests.campaigns.faults.trial import Outcome, TooLate, Trial, judge
from tests.mpi import launch

ATTEMPTS = 3  # for a fault that comes too late


def parser() -> argparse.ArgumentParser:
    made = Parser(prog="python -m tests.campaigns.faults", description=__doc__)
    made.add_argument("--count", type=int, default=100)
    made.add_argument("--seed", type=int, default=1)
    made.add_argument(
        "--first", type=int, default=0, help="number of the first fault (default: %(default)s)"
    )
    made.add_argument("--kinds", nargs="+", default=list(KINDS), help=f"of {', '.join(KINDS)}")
    made.add_argument("--only", nargs="+", help="of the faults of that seed, those of these kinds")
    made.add_argument(
        "--json", type=Path, metavar="FILE", help="write counts and every outcome to FILE"
    )
    made.add_argument(
        "--resume",
        action="store_true",
        help="keep the outcomes that --json has and try the other faults",
    )
    made.add_argument(
        "--workers", type=int, default=1, help="faults tried at a time (default: %(default)s)"
    )
    made.add_argument("--write", action="store_true", help="write the table of docs/reliability.md")
    return made


class Campaign:
    """Faults in a folder that is removed afterwards, with one undisturbed run for layouts that end with the same bits."""

    def __init__(self, folder: Path, seed: int, kinds: Sequence[str]) -> None:
        self.folder = folder
        self.seed = seed
        self.kinds = kinds
        self.data = jobs.write_data(folder)
        self._references: dict[str, dict[str, Any]] = {}
        self._reference_lock = threading.Lock()

    def fault(self, number: int) -> Outcome:
        """One fault. A run that is over too early is tried again."""
        name = self.kinds[number % len(self.kinds)]
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


def usable(kinds: Sequence[str]) -> list[str]:
    """Return the kinds that can be tried here, and print the others. Raise ValueError if there is none."""
    check(launch.mpich() is not None, launch.MISSING["mpich"])
    for kind in kinds:
        if reason := KINDS[kind].missing():
            print(f"{kind} is left out: {reason}", flush=True)
    return [kind for kind in kinds if not KINDS[kind].missing()]


def try_all(options: argparse.Namespace, numbers: Sequence[int], record: report.Record) -> float:
    """Try the faults with these numbers, print each and add it to the record; return the seconds."""
    begin = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="faults.") as folder,
        ThreadPoolExecutor(options.workers) as pool,
    ):
        campaign = Campaign(Path(folder), options.seed, options.kinds)
        for tried in as_completed([pool.submit(campaign.fault, number) for number in numbers]):
            outcome = tried.result()
            record.add(outcome)
            verdict = "right" if outcome.right else f"WRONG {outcome.detail}"
            print(
                f"{outcome.number} {outcome.kind}, {outcome.layout}, {outcome.seconds:.1f} s: "
                f"{verdict if outcome.hit else 'the run was over'}",
                flush=True,
            )
    return time.monotonic() - begin


def check_options(options: argparse.Namespace) -> None:
    """Raise a ValueError with one line for options that make no campaign."""
    check(
        options.count > 0 and options.first >= 0,
        f"--count {options.count} --first {options.first}: give at least 1 and 0",
    )
    check(options.workers > 0, f"--workers {options.workers}: give at least 1")
    check(
        options.json is not None or not options.resume,
        "--resume needs --json, the file with the outcomes so far: give both",
    )
    for flag, kinds in (("--kinds", options.kinds), ("--only", options.only or [])):
        unknown = [kind for kind in kinds if kind not in KINDS]
        check(not unknown, f"{flag} {' '.join(unknown)}: give some of {', '.join(KINDS)}")


def run(options: argparse.Namespace) -> int:
    """The campaign; returns 1 when anything was lost, different, unnamed or a traceback."""
    check_options(options)
    record = report.Record.start(options.json, options.seed, options.kinds, options.resume)
    chosen = usable(options.only or options.kinds)
    numbers = [
        number
        for number in range(options.first, options.first + options.count)
        if options.kinds[number % len(options.kinds)] in chosen and number not in record.numbers
    ]
    seconds = try_all(options, numbers, record)
    table = record.table()
    print(table, f"{60 * len(numbers) / seconds:.1f} faults per minute", sep="\n")
    if options.write:
        reliability_page.write("faults", table)
    return int(not all(outcome.right for outcome in record.outcomes))


def main(words: Sequence[str]) -> int:
    return guarded("python -m tests.campaigns.faults", lambda: run(parser().parse_args(words)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
