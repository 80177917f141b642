"""Time of every rank by phase: ranks that delay the others, and `fugaku-megatron log --ranks`, a table and a heat map.

A rank is slow in what it does itself: it computes, or it waits for its data. All else is waiting for other ranks. Computation is
compared with that of ranks that compute the same; data should not be waited for at all.
The table has min, mean and max of each phase. It reads the files of --log-ranks. Left out: where the seconds come from
(`observe.memory`).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..cli.output_files import shown, writing
from ..config.fields import check
from ..text.named_files import read_text
from ..text.table import pipe_table
from .loss_plot import title

WARM_UP = 1  # intervals that are not counted: the first one holds the first touch of memory


COLUMNS = ("phase", "min s", "mean s", "max s", "slowest rank", "its stage")


COMPUTATION, DATA = "computation", "data"  # phases of a rank's own


SLOW = 0.1  # of an iteration that a rank may take longer than it should before it is named


PEERS = 3  # ranks that make a median worth something


NAMED = 3  # slow ranks that a line names


STAGE_MEDIAN = "the median of its stage"


@dataclass(frozen=True)
class Interval:
    """The mean iteration of a log interval. tp, pp, cp: sizes. seconds: phase -> seconds of every rank."""

    iteration: int
    tp: int
    pp: int
    seconds: Mapping[str, Sequence[float]]
    cp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(next(iter(self.seconds.values())))

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Sizes that rank numbers follow: ranks, tp, pp, cp."""
        return self.ranks, self.tp, self.pp, self.cp

    def stage(self, rank: int) -> int:
        """The rank's pipeline stage; see `comm.grid.Grid`."""
        return rank // (self.tp * self.cp) % self.pp

    def line(self) -> str:
        """The record as JSON, in tenths of milliseconds."""
        return json.dumps(
            {
                **asdict(self),
                "seconds": {name: [round(s, 4) for s in row] for name, row in self.seconds.items()},
            }
        )


def parse_interval(line: str) -> Interval:
    """The inverse of `Interval.line`. ValueError if it is another line."""
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
        f"not a record of --log-ranks: {line.strip()[:60]!r}",
    )
    return interval


@dataclass(frozen=True)
class Straggler:
    """A slow rank. phase: in which it is slow. seconds, usual: of an iteration, real and expected.

    usual_of: what `usual` is, for the log.
    """

    rank: int
    stage: int
    phase: str
    seconds: float
    usual: float
    usual_of: str = STAGE_MEDIAN

    def text(self, host: str) -> str:
        """Return the straggler's text in the log. host: name of its node."""
        excess = (
            f", {100 * (self.seconds / self.usual - 1):.0f} % slower than {self.usual_of}"
            if self.usual
            else ""
        )
        more = f"{excess} ({self.usual:.3f} s)" if excess else ""
        return f"rank {self.rank} (stage {self.stage}, {host}): {self.phase} {self.seconds:.3f} s per iteration{more}"


def find(
    interval: Interval, work: Sequence[float], shares: Sequence[float] = ()
) -> list[Straggler]:
    """The slow ranks, the slowest first. work: of each stage, in any unit, for stages with too few ranks for a median.

    shares: of every rank, its work relative to the other ranks of its stage, whose documents may be shorter; none: all alike.
    """
    computation, data = interval.seconds[COMPUTATION], interval.seconds[DATA]
    usual = _usual(interval, work, shares or [1.0] * interval.ranks)
    found = []
    for rank, (computes, waits) in enumerate(zip(computation, data, strict=True)):
        limit = SLOW * sum(row[rank] for row in interval.seconds.values())
        found += [
            Straggler(rank, interval.stage(rank), phase, seconds, expected, _usual_of(interval))
            for phase, seconds, expected in (
                (COMPUTATION, computes, usual[rank]),
                (DATA, waits, 0.0),
            )
            if seconds - expected > limit
        ]
    return sorted(found, key=lambda s: s.usual - s.seconds)


def _usual(interval: Interval, work: Sequence[float], shares: Sequence[float]) -> list[float]:
    """For every rank, the lower median of computation: over its stage, or over all ranks by their work where that is too few."""
    computation = [
        seconds / share
        for seconds, share in zip(interval.seconds[COMPUTATION], shares, strict=True)
    ]
    stages = [interval.stage(rank) for rank in range(len(computation))]
    if len(computation) // interval.pp >= PEERS:
        medians = [
            statistics.median_low(
                s for s, at in zip(computation, stages, strict=True) if at == stage
            )
            for stage in range(interval.pp)
        ]
        return [medians[stage] * share for stage, share in zip(stages, shares, strict=True)]
    rate = statistics.median_low(
        s / work[stage] for s, stage in zip(computation, stages, strict=True)
    )
    return [rate * work[stage] * share for stage, share in zip(stages, shares, strict=True)]


def _usual_of(interval: Interval) -> str:
    """Name what `_usual` compares with: a stage of one or two ranks has no median."""
    peers = interval.ranks // interval.pp
    if peers >= PEERS:
        return STAGE_MEDIAN
    pace = (
        f"at the median speed of all {interval.ranks} ranks"
        if interval.ranks >= PEERS
        else "at the speed of the faster rank"
    )
    if interval.pp == 1:
        return f"its work takes {pace}"
    count = "one rank" if peers == 1 else f"{peers} ranks"
    return f"the work of its stage, which has {count}, takes {pace}"


def read(path: str | os.PathLike) -> list[Interval]:
    """The intervals of a file, in order; of those that a resumed run repeats the last, and none of a run of another layout before.

    Raises ValueError, with file and line, for a file that holds something else.
    """
    lines = read_text(path, "", "pass a file that --log-ranks wrote").splitlines()
    found: dict[int, Interval] = {}
    for number, line in enumerate(lines, 1):
        try:
            interval = parse_interval(line)
        except ValueError as error:
            raise ValueError(
                f"{path} line {number}: {error}: pass a file that --log-ranks wrote"
            ) from None
        if found and interval.layout != next(iter(found.values())).layout:
            found.clear()
        found[interval.iteration] = interval
    check(
        bool(found),
        f"{path} is empty: pass a file that --log-ranks wrote, after the run's first log interval",
    )
    return [found[iteration] for iteration in sorted(found)]


def mean(intervals: Sequence[Interval]) -> Interval:
    """One interval with the mean seconds of all but the first WARM_UP, or of all if there are at most that many."""
    counted = intervals[WARM_UP:] or intervals
    seconds = {
        phase: [
            statistics.fmean(column)
            for column in zip(*(i.seconds[phase] for i in counted), strict=True)
        ]
        for phase in counted[0].seconds
    }
    last = counted[-1]
    return replace(last, seconds=seconds)


def text(path: str | os.PathLike, intervals: Sequence[Interval]) -> str:
    """The table of one file: seconds of an iteration."""
    average, rows = mean(intervals), []
    for phase, row in average.seconds.items():
        slowest = row.index(max(row))
        rows.append(
            [
                phase,
                *(f"{s:.3f}" for s in (min(row), statistics.fmean(row), row[slowest])),
                str(slowest),
                str(average.stage(slowest)),
            ]
        )
    counted = len(intervals[WARM_UP:] or intervals)
    return "\n".join(
        [
            *pipe_table([list(COLUMNS), *rows]),
            "",
            f"  {path}: {average.ranks} ranks, means over {counted} log intervals up to iteration {average.iteration}",
        ]
    )


def draw(path: str | os.PathLike, source: str | os.PathLike, intervals: Sequence[Interval]) -> None:
    """A heat map for each phase into a PNG file: ranks down, log intervals across. ValueError when it cannot be written."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    phases = list(intervals[0].seconds)
    figure = Figure(figsize=(2.6 * len(phases) + 1.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(1, len(phases), squeeze=False, sharey=True)[0]
    for phase, axes in zip(phases, columns, strict=True):
        image = _panel(axes, phase, intervals)
    columns[0].set_ylabel("rank")
    columns[0].invert_yaxis()
    figure.colorbar(image, ax=columns, label="seconds of an iteration")
    figure.suptitle(
        shown(title("Where the time of every rank went, measured", os.path.abspath(source))),
        fontsize="medium",
    )
    with writing("--png", os.fspath(path)):
        figure.savefig(path, dpi=120, format="png")


def _panel(axes: Any, phase: str, intervals: Sequence[Interval]) -> Any:
    """One heat map, with the colours that all of them have."""
    from matplotlib.ticker import MaxNLocator

    largest = max(max(row) for i in intervals for row in i.seconds.values())
    ends = [i.iteration for i in intervals]
    begin = ends[0] - (ends[1] - ends[0] if len(ends) > 1 else ends[0])
    picture = list(zip(*(i.seconds[phase] for i in intervals), strict=True))  # (ranks, intervals)
    axes.set(title=phase, xlabel="iteration")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return axes.pcolormesh(
        [begin, *ends],
        [rank - 0.5 for rank in range(len(picture) + 1)],
        picture,
        vmin=0,
        vmax=largest,
        cmap="viridis",
    )
