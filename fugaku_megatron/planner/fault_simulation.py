"""Simulation of a job with faults, event by event: the same copies, faults and seconds as fault_model.py, without its formulas.

It also has what the formulas leave out: faults during restarts that change the copy to start from, copies that were not complete, and
which node's copy another node's memory has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import mean, stdev
from typing import NamedTuple

from .fault_model import (
    BESIDES,
    NODE,
    REPEATED,
    RESTART,
    SAVING,
    TRAINING,
    WIDE,
    Copies,
    Faults,
    Pace,
    Strategy,
)

RUNS = 30
STUDENT = 2.045  # 97.5 % quantile of Student's distribution for RUNS - 1 degrees of freedom


class Simulated(NamedTuple):
    """Means over RUNS runs.

    share: of effective training time, within `error` in 19 of 20 cases
    causes: share of each cause
    faults: in a run
    """

    share: float
    error: float
    causes: dict[str, float]
    faults: float


class Run:
    """One simulated run."""

    def __init__(self, strategy: Strategy, faults: Faults, pace: Pace, draw: random.Random) -> None:
        self.copies: Sequence[Copies] = [each for group in strategy for each in group]
        self.faults = faults
        self.pace = pace
        self.draw = draw
        self.time = 0.0
        self.iteration = 0
        self.count = 0  # faults
        self.seconds = {SAVING: 0.0, RESTART: 0.0}
        self.running = 0.0  # seconds of iterations, kept or not
        self._complete = [0 for _ in self.copies]  # iteration of the newest complete copy
        self._pending: list[tuple[float, int, int]] = []  # time of completion, copies, iteration
        self._exposed: set[int] = set()  # nodes with the last copy of a lost node's state
        self._kinds = list(faults.shares)
        self._weights = list(faults.shares.values())
        self._fault_time = self._next_fault()

    def until(self, end: float) -> dict[str, float]:
        """Return the seconds of each cause until `end`."""
        while self.time < end:
            due = min((self.iteration // each.interval + 1) * each.interval for each in self.copies)
            begin = self.time
            seconds = self.pace.seconds(due - self.iteration)
            survived = self._pass(seconds)
            self.running += self.time - begin
            if survived:
                self.iteration = due
                survived = self._copy()
            if not survived:
                self._restart()
        kept = self.iteration * self.pace.iteration
        besides = kept * self.pace.besides
        repeated = self.running - kept - besides
        return {TRAINING: kept, BESIDES: besides, REPEATED: repeated, **self.seconds}

    def _next_fault(self) -> float:
        return self.time + self.draw.expovariate(self.faults.rate)

    def _pass(self, seconds: float) -> bool:
        """Let the seconds pass, or those until the next fault; return True without a fault."""
        end = self.time + seconds
        self.time = min(end, self._fault_time)
        return end < self._fault_time

    def _copy(self) -> bool:
        """Make the copies that are due; return False after a fault."""
        for index, each in enumerate(self.copies):
            if self.iteration % each.interval:
                continue
            begin = self.time
            survived = self._pass(each.wait)
            self.seconds[SAVING] += self.time - begin
            if not survived:
                return False
            self._pending.append((self.time + each.delay, index, self.iteration))
        return True

    def _restart(self) -> None:
        """Continue from the newest copy after a fault, and after those during the restart."""
        for time, index, iteration in self._pending:
            if time <= self.time:  # copies that were not complete are lost with the processes
                self._complete[index] = iteration
        self._pending.clear()
        survived = False
        while not survived:
            self.count += 1
            seconds = self._lose()
            self._fault_time = self._next_fault()
            begin = self.time
            survived = self._pass(seconds)
            self.seconds[RESTART] += self.time - begin
        self._exposed.clear()  # a start makes the lost copies again

    def _lose(self) -> float:
        """Draw the fault's kind and node, go back to the newest copy that is left, and return the restart's seconds."""
        (kind,) = self.draw.choices(self._kinds, self._weights)
        worst = kind
        if kind == NODE:
            node = self.draw.randrange(self.faults.nodes)
            if node in self._exposed:
                worst = WIDE
            self._exposed.add(node ^ 1)  # nodes are paired
        left = [i for i, each in enumerate(self.copies) if worst in each.survives]
        found = max(left, key=lambda index: self._complete[index])
        self.iteration = self._complete[found]
        for index in range(len(self.copies)):
            self._complete[index] = min(self._complete[index], self.iteration)
        return self.copies[found].restart[kind]


def simulate(
    strategy: Strategy, faults: Faults, pace: Pace, seconds: float, seed: int
) -> Simulated:
    """Simulate RUNS runs of so many seconds."""
    shares = []
    causes: dict[str, float] = {}
    count = 0
    for number in range(RUNS):
        run = Run(strategy, faults, pace, random.Random(f"{seed} {number}"))
        found = run.until(seconds)
        total = sum(found.values())
        shares.append(found[TRAINING] / total)
        count += run.count
        for cause, value in found.items():
            causes[cause] = causes.get(cause, 0.0) + value / total / RUNS
    error = STUDENT * stdev(shares) / math.sqrt(RUNS)
    return Simulated(mean(shares), error, causes, count / RUNS)
