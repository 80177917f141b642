"""Seconds by rank and phase: slow ranks, and `fugaku-megatron log --ranks`.

Only computation and waiting for data are a rank's own time; other phases wait for other ranks.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...cli.output_files import picture, shown
from ...config.fields import check
from ...text.named_files import StrPath, about, read_text
from ...text.table import pipe_table
from .loss_plot import title

WARM_UP = 1  # first intervals, excluded from means: memory is allocated in them
COLUMNS = ("phase", "min s", "mean s", "max s", "slowest rank", "its stage")
COMPUTATION = "computation"
DATA = "data"
SLOW = 0.1  # fraction of an iteration by which a rank may exceed its expected time
PEERS = 3  # ranks for a meaningful median
NAMED = 3  # slow ranks named in a line
STAGE_MEDIAN = "the median of its stage"


@dataclass(frozen=True)
class Interval:
    """Mean iteration in a log interval. seconds: phase -> rank"""

    iteration: int
    tp: int
    pp: int
    seconds: Mapping[str, Sequence[float]]
    cp: int = 1

    @property
    def ranks(self) -> int:
        return len(next(iter(self.seconds.values())))

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """(ranks, tp, pp, cp), on which rank numbers depend."""
        return self.ranks, self.tp, self.pp, self.cp

    def stage(self, rank: int) -> int:
        return rank // (self.tp * self.cp) % self.pp

    def line(self) -> str:
        """Return JSON, in tenths of milliseconds."""
        seconds = {name: [round(s, 4) for s in row] for name, row in self.seconds.items()}
        return json.dumps({**asdict(self), "seconds": seconds})


def parse_interval(line: str) -> Interval:
    """Parse a line of a --log-ranks file. Raises ValueError for rows of unequal lengths."""
    try:
        interval = Interval(**json.loads(line))
        lengths = {
            len(row)
            for row in interval.seconds.values()
            if all(isinstance(s, float | int) for s in row)
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        lengths = set()
    check(
        len(lengths) == 1 and min(interval.tp, interval.pp, interval.cp, *lengths) >= 1,
        f"not a record of --log-ranks: {line.strip()[:60]!r}: pass a file that --log-ranks wrote",
    )
    return interval


class Straggler(NamedTuple):
    """Rank that is slow in a phase. usual: expected seconds, 0 if unknown. usual_of: their source"""

    rank: int
    stage: int
    phase: str
    seconds: float
    usual: float
    usual_of: str = STAGE_MEDIAN

    def text(self, host: str) -> str:
        text = f"rank {self.rank} (stage {self.stage}, {host}): {self.phase} {self.seconds:.3f} s per iteration"
        if self.usual:
            percent = 100 * (self.seconds / self.usual - 1)
            text += f", {percent:.0f} % slower than {self.usual_of} ({self.usual:.3f} s)"
        return text


def find(
    interval: Interval, work: Sequence[float], shares: Sequence[float] = ()
) -> list[Straggler]:
    """Return slow ranks, slowest first.

    work: per stage, in any unit, for stages with too few ranks for a median
    shares: each rank's work relative to its stage (documents differ in length); empty: all alike
    """
    usual = _usual(interval, work, shares or [1.0 for _ in range(interval.ranks)])
    found = []
    for rank in range(interval.ranks):
        limit = SLOW * sum(row[rank] for row in interval.seconds.values())
        for phase, expected in ((COMPUTATION, usual[rank]), (DATA, 0.0)):
            seconds = interval.seconds[phase][rank]
            if seconds - expected > limit:
                stage = interval.stage(rank)
                found.append(Straggler(rank, stage, phase, seconds, expected, _usual_of(interval)))
    return sorted(found, key=lambda s: s.usual - s.seconds)


def _usual(interval: Interval, work: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Return expected computation seconds: the stage's lower median, or all ranks' by work."""
    row = interval.seconds[COMPUTATION]
    seconds = [s / share for s, share in zip(row, shares, strict=True)]
    stages = [interval.stage(rank) for rank in range(len(row))]
    if len(row) // interval.pp >= PEERS:
        medians = [
            statistics.median_low(s for s, at in zip(seconds, stages, strict=True) if at == stage)
            for stage in range(interval.pp)
        ]
        return [medians[stage] * share for stage, share in zip(stages, shares, strict=True)]
    rates = (s / work[stage] for s, stage in zip(seconds, stages, strict=True))
    rate = statistics.median_low(rates)
    return [rate * work[stage] * share for stage, share in zip(stages, shares, strict=True)]


def _usual_of(interval: Interval) -> str:
    peers = interval.ranks // interval.pp
    if peers >= PEERS:
        return STAGE_MEDIAN
    pace = "at the speed of the faster rank"
    if interval.ranks >= PEERS:
        pace = f"at the median speed of all {interval.ranks} ranks"
    if interval.pp == 1:
        return f"its work takes {pace}"
    count = "one rank" if peers == 1 else f"{peers} ranks"
    return f"the work of its stage, which has {count}, takes {pace}"


def read(path: StrPath) -> list[Interval]:
    """Return a file's intervals with the last layout, in order; the last if repeated."""
    lines = read_text(path, "", "pass a file that --log-ranks wrote").splitlines()
    found: dict[int, Interval] = {}
    for number, line in enumerate(lines, 1):
        with about(f"{path} line {number}"):
            interval = parse_interval(line)
        if found and interval.layout != next(iter(found.values())).layout:
            found.clear()
        found[interval.iteration] = interval
    check(
        found,
        f"{path} is empty: pass a file that --log-ranks wrote, after the run's first log interval",
    )
    return [found[iteration] for iteration in sorted(found)]


def mean(intervals: Sequence[Interval]) -> Interval:
    counted = intervals[WARM_UP:] or intervals
    seconds = {
        phase: np.mean([interval.seconds[phase] for interval in counted], axis=0).tolist()
        for phase in counted[0].seconds
    }
    return replace(counted[-1], seconds=seconds)


def text(path: StrPath, intervals: Sequence[Interval]) -> str:
    average = mean(intervals)
    rows = [list(COLUMNS)]
    for phase, row in average.seconds.items():
        slowest = row.index(max(row))
        seconds = [min(row), statistics.fmean(row), row[slowest]]
        shown_seconds = [f"{s:.3f}" for s in seconds]
        rows.append([phase, *shown_seconds, str(slowest), str(average.stage(slowest))])
    counted = len(intervals[WARM_UP:] or intervals)
    basis = f"  {path}: {average.ranks} ranks, means over {counted} log intervals up to iteration {average.iteration}"
    return "\n".join([*pipe_table(rows), "", basis])


def draw(path: StrPath, source: StrPath, intervals: Sequence[Interval]) -> None:
    """Write a PNG heat map per phase: ranks down, log intervals across."""
    phases = list(intervals[0].seconds)
    heading = title("Where the time of every rank went, measured", os.path.abspath(source))
    with picture(path, 2.6 * len(phases) + 1.4, 4.4) as figure:
        columns = figure.subplots(1, len(phases), squeeze=False, sharey=True)[0]
        for phase, axes in zip(phases, columns, strict=True):
            image = _panel(axes, phase, intervals)
        columns[0].set_ylabel("rank")
        columns[0].invert_yaxis()
        figure.colorbar(image, ax=columns, label="seconds of an iteration")
        figure.suptitle(shown(heading), fontsize="medium")


def _panel(axes: Any, phase: str, intervals: Sequence[Interval]) -> Any:
    from matplotlib.ticker import MaxNLocator

    largest = max(max(row) for i in intervals for row in i.seconds.values())
    ends = [i.iteration for i in intervals]
    first_length = ends[1] - ends[0] if len(ends) > 1 else ends[0]
    rows = np.array([i.seconds[phase] for i in intervals]).T  # (ranks, intervals)
    axes.set(title=phase, xlabel="iteration")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return axes.pcolormesh(
        [ends[0] - first_length, *ends],
        [rank - 0.5 for rank in range(len(rows) + 1)],
        rows,
        vmin=0,
        vmax=largest,
        cmap="viridis",
    )
