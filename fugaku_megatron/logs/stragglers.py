"""Ranks that delay the others, found from the seconds that every rank spent in each phase of an iteration.

A rank is slow in what it does itself: it computes, or it waits for its data. All else is waiting for other ranks. Computation is
compared with that of ranks that compute the same; data should not be waited for at all.
Left out: where the seconds come from (`training.rank_times`), tables and pictures of them (rank_table.py).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..config.checks import check

COMPUTATION, DATA = "computation", "data"  # phases of a rank's own
SLOW = 0.1  # of an iteration that a rank may take longer than it should before it is named
PEERS = 3  # ranks that make a median worth something
NAMED = 3  # slow ranks that a line names


@dataclass(frozen=True)
class Interval:
    """The mean iteration of a log interval. tp, pp: sizes. seconds: phase -> seconds of every rank."""

    iteration: int
    tp: int
    pp: int
    seconds: Mapping[str, Sequence[float]]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(next(iter(self.seconds.values())))

    @property
    def layout(self) -> tuple[int, int, int]:
        """What rank numbers mean: ranks, tp, pp."""
        return self.ranks, self.tp, self.pp

    def stage(self, rank: int) -> int:
        """The rank's pipeline stage; see `comm.grid.Grid`."""
        return rank // self.tp % self.pp

    def line(self) -> str:
        """The record as JSON, in tenths of milliseconds."""
        return json.dumps({**asdict(self), "seconds": {name: [round(s, 4) for s in row] for name, row in self.seconds.items()}})


def parse_interval(line: str) -> Interval:
    """The inverse of `Interval.line`. ValueError if it is another line."""
    try:
        interval = Interval(**json.loads(line))
        lengths = {len(row) for row in interval.seconds.values() if all(isinstance(s, float | int) for s in row)}
    except (ValueError, TypeError, AttributeError, RecursionError):
        lengths = set()
    check(len(lengths) == 1 and min(interval.tp, interval.pp, *lengths) >= 1, f"not a record of --log-ranks: {line.strip()[:60]!r}")
    return interval


@dataclass(frozen=True)
class Straggler:
    """A slow rank. phase: in which it is slow. seconds, usual: what it takes in an iteration, and what it should."""

    rank: int
    stage: int
    phase: str
    seconds: float
    usual: float

    def text(self, host: str) -> str:
        """What a log says of it. host: the name of its node."""
        excess = f", {100 * (self.seconds / self.usual - 1):.0f} % slower than the median of its stage" if self.usual else ""
        more = f"{excess} ({self.usual:.3f} s)" if excess else ""
        return f"rank {self.rank} (stage {self.stage}, {host}): {self.phase} {self.seconds:.3f} s per iteration{more}"


def find(interval: Interval, work: Sequence[float]) -> list[Straggler]:
    """The slow ranks, the slowest first. work: of each stage, in any unit, for stages with too few ranks for a median."""
    computation, data = interval.seconds[COMPUTATION], interval.seconds[DATA]
    usual = _usual(interval, work)
    found = []
    for rank, (computes, waits) in enumerate(zip(computation, data, strict=True)):
        limit = SLOW * sum(row[rank] for row in interval.seconds.values())
        found += [Straggler(rank, interval.stage(rank), phase, seconds, expected)
                  for phase, seconds, expected in ((COMPUTATION, computes, usual[rank]), (DATA, waits, 0.0))
                  if seconds - expected > limit]
    return sorted(found, key=lambda s: s.usual - s.seconds)


def _usual(interval: Interval, work: Sequence[float]) -> list[float]:
    """For every rank, the lower median of computation: over its stage, or over all ranks by their work where that is too few."""
    computation = interval.seconds[COMPUTATION]
    stages = [interval.stage(rank) for rank in range(len(computation))]
    if len(computation) // interval.pp >= PEERS:
        medians = [statistics.median_low(s for s, at in zip(computation, stages, strict=True) if at == stage)
                   for stage in range(interval.pp)]
        return [medians[stage] for stage in stages]
    rate = statistics.median_low(s / work[stage] for s, stage in zip(computation, stages, strict=True))
    return [rate * work[stage] for stage in stages]
