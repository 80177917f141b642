"""One fault: its job, the starts after it, and the outcome."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import psutil

from benchmarks.two_hosts import NETWORK
from tests.campaigns.faults import jobs
from tests.campaigns.faults.jobs import Job, Layout

STARTS = 4  # after a fault, within which a run must come to its end
EARLY = 0.15  # of the faults come while ranks start
START_SECONDS = 3.0
TRACEBACK = re.compile(r"^(?:rank \d+: )?Traceback \(most recent call last\)", re.MULTILINE)


@dataclass
class Outcome:
    """A fault's outcome. lost: repeated iterations beyond the save interval; detail: the first mistake"""

    number: int
    kind: str
    layout: str
    hit: bool = True
    lost: int = 0
    different: bool = False
    unnamed: bool = False
    traceback: bool = False
    seconds: float = 0.0
    detail: str = ""

    @property
    def right(self) -> bool:
        return not (self.lost or self.different or self.unnamed or self.traceback)

    @staticmethod
    def of(record: dict[str, Any]) -> Outcome:
        """Return the outcome in a record of a campaign, which has more."""
        return Outcome(**{each.name: record[each.name] for each in fields(Outcome)})


class TooLate(Exception):
    """The run ended before its fault came."""


@dataclass
class Trial:
    """A folder, a layout, a random generator, and all starts' log so far."""

    folder: Path
    layout: Layout
    data: Path
    rng: random.Random
    named: str = ""  # what the log must say, where that depends on what was drawn
    log: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder / "save"

    def start(self, *flags: str, supervised: bool = False, **variables: str) -> Job:
        words = jobs.command(self.layout, self.folder, self.data, *flags)
        before = [sys.executable, "-m", "fugaku_megatron", "supervise", "--"] if supervised else []
        return jobs.start([*before, *words], **(NETWORK if self.layout.hosts else {}), **variables)

    def end(self, job: Job) -> int | None:
        """Wait until a job ends; add its log to the trial's."""
        code = job.end()
        self.log.append(job.text())
        self.codes.append(code)
        return code

    def run(self, *flags: str, **variables: str) -> int | None:
        """A whole start."""
        return self.end(self.start(*flags, **variables))

    def moment(self, job: Job) -> None:
        """Wait for a random moment in the job. Raise TooLate if it ends before."""
        if self.rng.random() < EARLY:
            time.sleep(self.rng.random() * START_SECONDS)
        elif not job.wait_for_iteration(self.rng.randint(1, jobs.ITERATIONS - 5)):
            self.end(job)
            raise TooLate
        else:
            time.sleep(self.rng.random() * 0.03)

    def victim(self, job: Job):
        """A random rank. Raises TooLate when there is none any more."""
        ranks = job.ranks()
        while len(ranks) < self.layout.ranks and job.process.poll() is None:
            time.sleep(0.01)
            ranks = job.ranks()
        if not ranks:
            self.end(job)
            raise TooLate
        return self.rng.choice(ranks)

    @contextlib.contextmanager
    def needs(self, job: Job) -> Iterator[None]:
        """Raise TooLate if a process that the block needs has ended."""
        try:
            yield
        except (psutil.Error, ProcessLookupError):
            self.end(job)
            raise TooLate from None

    def text(self) -> str:
        return "".join(self.log)

    def finish(self, repair: Callable[[int], tuple[str, ...]] = lambda turn: ()) -> bool:
        """Start until the run has ended. repair: does the remedy in a refusal, and returns flags"""
        for turn in range(STARTS):
            if self.run(*repair(turn)) == 0 and jobs.ended(self.save):
                return True
        return False


def judge(
    trial: Trial, outcome: Outcome, named: str, finished: bool, reference: dict[str, Any]
) -> Outcome:
    """Compare a trial with the undisturbed run, and its log with the kind's pattern."""
    text = trial.text()
    allowed = jobs.SAVE_INTERVAL * (2 if trial.layout.asynchronous else 1)
    outcome.lost = max(0, jobs.lost_iterations(text) - allowed)
    outcome.different = not finished or jobs.final(trial.folder) != reference
    outcome.unnamed = None in trial.codes or not re.search(trial.named or named, text)
    outcome.traceback = bool(TRACEBACK.search(text))
    if not outcome.right:
        outcome.detail = (
            f"exit codes {trial.codes}, finished {finished}, log without iterations:\n{words(text)}"
        )
    return outcome


def words(text: str) -> str:
    """Return the log lines about a fault."""
    quiet = (
        " iteration ",
        "saved checkpoint",
        "slow: ",
        "no longer slow",
        "peak memory",
        "kernels: ",
        "run: ",
        "FLOPs per",
    )
    return "\n".join(line for line in text.splitlines() if not line.startswith(quiet))[-6000:]
