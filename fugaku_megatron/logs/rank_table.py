"""`fugaku-megatron log --ranks`: where the time of every rank went, as min, mean and max of each phase and as a heat map.

The files are those of --log-ranks. Left out: finding slow ranks while a run goes on (stragglers.py).
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.checks import check
from ..config.outputs import pipe_table, writing
from .plot import shown, title
from .stragglers import Interval, parse_interval

WARM_UP = 1  # intervals that are not counted: the first one holds the first touch of memory
COLUMNS = ("phase", "min s", "mean s", "max s", "slowest rank", "its stage")


def read(path: str | os.PathLike) -> list[Interval]:
    """The intervals of a file, in order; of those that a resumed run repeats the last, and none of a run of another layout before.

    Raises ValueError, with file and line, for a file that holds something else.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}): pass a file that --log-ranks wrote") from None
    found: dict[int, Interval] = {}
    for number, line in enumerate(lines, 1):
        try:
            interval = parse_interval(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}: pass a file that --log-ranks wrote") from None
        if found and interval.layout != next(iter(found.values())).layout:
            found.clear()
        found[interval.iteration] = interval
    check(bool(found), f"{path} is empty: pass a file that --log-ranks wrote, after the run's first log interval")
    return [found[iteration] for iteration in sorted(found)]


def mean(intervals: Sequence[Interval]) -> Interval:
    """One interval with the mean seconds of all but the first WARM_UP, or of all if there are at most that many."""
    counted = intervals[WARM_UP:] or intervals
    seconds = {phase: [statistics.fmean(column) for column in zip(*(i.seconds[phase] for i in counted), strict=True)]
               for phase in counted[0].seconds}
    last = counted[-1]
    return Interval(last.iteration, last.tp, last.pp, seconds)


def text(path: str | os.PathLike, intervals: Sequence[Interval]) -> str:
    """The table of one file: seconds of an iteration."""
    average, rows = mean(intervals), []
    for phase, row in average.seconds.items():
        slowest = row.index(max(row))
        rows.append([phase, *(f"{s:.3f}" for s in (min(row), statistics.fmean(row), row[slowest])), str(slowest),
                     str(average.stage(slowest))])
    counted = len(intervals[WARM_UP:] or intervals)
    return "\n".join([*pipe_table([list(COLUMNS), *rows]), "",
                      f"  {path}: {average.ranks} ranks, means over {counted} log intervals up to iteration {average.iteration}"])


def draw(path: str | os.PathLike, source: str | os.PathLike, intervals: Sequence[Interval]) -> None:
    """A heat map for each phase into a PNG file: ranks down, log intervals across. ValueError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
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
    figure.suptitle(shown(title("Where the time of every rank went, measured", os.path.abspath(source))), fontsize="medium")
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
    return axes.pcolormesh([begin, *ends], [rank - 0.5 for rank in range(len(picture) + 1)], picture, vmin=0, vmax=largest,
                           cmap="viridis")
