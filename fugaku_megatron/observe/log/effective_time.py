"""Effective training time of a run over all its starts: seconds by cause, from hours.jsonl.

Iterations that a later start repeats are lost, and so is all that is neither training nor evaluation. Seconds are those of rank 0.
The end of a start that was killed without `supervise` is unknown: its last seconds count as waiting.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ...cli.output_files import drawing
from ...start.exit_codes import ExitCode
from ...text.named_files import JsonObject, StrPath
from ...text.numbers import duration_text, plural
from ...text.table import pipe_table
from ..export import spans
from ..export.hours import HOURS, read_hours

TRAINING = "training"
EVALUATION = "evaluation"
EFFECTIVE = (TRAINING, EVALUATION)
SCHEDULER = "scheduler"
UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))  # of a column in the picture
CAUSES = {
    TRAINING: "iterations whose result was kept",
    EVALUATION: "validation",
    "start": "from the process to the loop, without loading",
    "load": "loading the checkpoint",
    "first iteration": "beyond a later one: memory and kernels' times",
    "saving": "saves, and waits for background saves",
    "audit": "iterations of other ranks, comparisons of results and state",
    "copying": "copies of the state in other nodes' memory",
    "repeated": "iterations that a later start computed again",
    "fault": "from the last log line to the end of a start that failed",
    "hang": "the same of a start that hung",
    "waiting": "between two starts: launcher, people",
    SCHEDULER: "between two jobs of the scheduler",
    "other": "log lines, checks, comparisons of replicas, the last picture",
}


class Period(NamedTuple):
    """Seconds of one cause. begin: since 1970"""

    begin: float
    cause: str
    seconds: float


class Trained(NamedTuple):
    """Iterations of one line.

    last: number of the last one
    iterations: how many"""

    begin: float
    last: int
    iterations: int
    seconds: float

    def split(self, iteration: int) -> tuple[float, float]:
        """Return the seconds up to `iteration` and after it."""
        after = min(max(0, self.last - iteration), self.iterations) / self.iterations
        return self.seconds * (1 - after), self.seconds * after


class EffectiveTime:
    """A run's periods by cause.

    starts: how many
    from_memory: starts from copies in other nodes' memory
    """

    def __init__(self, lines: Sequence[JsonObject]) -> None:
        self.starts = 0
        self.from_memory = 0
        self._periods: list[Period] = []
        self._trained: list[Trained] = []
        self._iteration_seconds = _typical(lines)
        self._until: float | None = None  # all before has a cause
        self._job: str | None = None  # of the scheduler
        accounts = {"start": self._start, "iterations": self._iterations, "end": self._end}
        for line in lines:
            if account := accounts.get(line["event"]):
                account(line)

    @property
    def periods(self) -> list[Period]:
        trained = [Period(each.begin, TRAINING, each.seconds) for each in self._trained]
        return sorted([*self._periods, *trained])

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by cause, of causes that took any."""
        found: defaultdict[str, float] = defaultdict(float)
        for period in self.periods:
            found[period.cause] += period.seconds
        return dict(found)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share(self) -> float:
        """Share of effective time."""
        effective = sum(self.seconds.get(cause, 0.0) for cause in EFFECTIVE)
        return effective / self.total if self.total else 0.0

    def text(self) -> list[str]:
        """Return a heading and a table of causes, largest first."""
        total = self.total
        rows = [("time", "share", "cause")]
        for cause, value in sorted(self.seconds.items(), key=lambda row: -row[1]):
            if round(value):
                share = f"{100 * value / total:.1f} %"
                rows.append((duration_text(value), share, f"{cause}: {CAUSES[cause]}"))
        from_memory = f", {self.from_memory} from copies in memory" if self.from_memory else ""
        heading = (
            f"effective training time: {100 * self.share:.1f} % of {duration_text(total)} in "
            f"{plural(self.starts, 'start')}{from_memory} (measured)"
        )
        return [heading, "", *pipe_table(rows)]

    def _start(self, line: JsonObject) -> None:
        """Begin a start; what was trained after its iteration is repeated."""
        begun = line["begun"]
        if self._until is not None:
            begun = max(begun, self._until)  # a process may run twice
            cause = "waiting" if line.get("job") == self._job else SCHEDULER
            self._add(cause, self._until, begun - self._until)
        self.starts += 1
        if line.get("source") == "--save-memory":
            self.from_memory += 1
        self._job = line.get("job")
        self._until = begun
        kept = []
        for each in self._trained:
            before, after = each.split(line["iteration"])
            if before:
                last = min(each.last, line["iteration"])
                kept.append(Trained(each.begin, last, each.iterations - (each.last - last), before))
            self._add("repeated", each.begin + before, after)
        self._trained = kept

    def _iterations(self, line: JsonObject) -> None:
        if self._until is None:
            return
        seconds: defaultdict[str, float] = defaultdict(float, line["seconds"])
        begin = self._until
        self._until = line["time"]
        trained = seconds[spans.ITERATION] - seconds[spans.AUDIT]
        causes = {
            "audit": seconds[spans.AUDIT],
            "load": seconds[spans.LOAD],
            "saving": seconds[spans.SAVE] + seconds[spans.FINALIZE],
            "copying": seconds[spans.COPY] + seconds[spans.COPY_FINALIZE],
            EVALUATION: seconds[spans.EVALUATE],
        }
        if first := seconds[spans.FIRST_ITERATION]:
            longer = first - self._iteration_seconds
            if causes["audit"]:  # perhaps in the first iteration
                longer = min(longer, trained - line["count"] * self._iteration_seconds)
            causes["first iteration"] = max(0.0, longer)
            trained -= causes["first iteration"]
        rest = self._until - begin - trained - sum(causes.values())
        causes["start" if seconds[spans.STARTUP] else "other"] = rest
        for cause, value in causes.items():
            self._add(cause, begin, value)
            begin += value
        if line["count"]:
            self._trained.append(Trained(begin, line["iteration"], line["count"], trained))
        else:
            self._add("other", begin, trained)

    def _end(self, line: JsonObject) -> None:
        if self._until is None:
            return
        cause = {ExitCode.FINISHED: "other", ExitCode.HANG: "hang"}.get(line["code"], "fault")
        self._add(cause, self._until, line["time"] - self._until)
        self._until = line["time"]

    def _add(self, cause: str, begin: float, seconds: float) -> None:
        if seconds > 0:
            self._periods.append(Period(begin, cause, seconds))


def _typical(lines: Sequence[JsonObject]) -> float:
    """Return the median seconds of an iteration that is not the first one of a start."""
    means = []
    for line in lines:
        if line["event"] != "iterations":
            continue
        seconds = line["seconds"]
        first = seconds.get(spans.FIRST_ITERATION, 0.0)
        count = line["count"] - bool(first)
        audits = seconds.get(spans.AUDIT, 0.0)
        if count > 0 and not (first and audits):
            means.append((seconds.get(spans.ITERATION, 0.0) - first - audits) / count)
    return median(means) if means else 0.0


def effective_time(save: StrPath) -> EffectiveTime | None:
    """Return the effective time of the run in a directory of --save, or None without a record."""
    path = Path(save) / HOURS
    lines = read_hours(path) if path.is_file() else []
    found = EffectiveTime(lines)
    return found if found.starts else None


def draw(path_png: StrPath, found: EffectiveTime) -> None:
    """Draw each cause's share of every day, or of every hour or minute of a short run. OSError for a file error."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    periods = found.periods
    begin = periods[0].begin
    length = max(each.begin + each.seconds for each in periods) - begin
    unit, name = next((each for each in UNITS if length >= 2 * each[0]), UNITS[-1])
    columns = int(length // unit) + 1
    heights = {cause: [0.0 for _ in range(columns)] for cause in CAUSES}
    for period in periods:
        for column, seconds in _divided(period, begin, unit):
            heights[period.cause][min(column, columns - 1)] += 100 * seconds / unit
    with drawing(path_png, 8, 4) as figure:
        axes = figure.subplots()
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        colors = colormaps["tab20"]
        bottoms = [0.0 for _ in range(columns)]
        for number, (cause, shares) in enumerate(heights.items()):
            if any(shares):
                places = range(1, columns + 1)
                axes.bar(places, shares, 0.9, bottoms, label=cause, color=colors(number))
                bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
        axes.set(xlabel=f"{name} since the first start", ylabel=f"share of each {name} (%)")
        axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
        figure.suptitle(found.text()[0], fontsize="medium")


def _divided(period: Period, begin: float, unit: float) -> Iterator[tuple[int, float]]:
    """Yield the columns that a period crosses, and its seconds in each."""
    at = period.begin - begin
    left = period.seconds
    while left > 0:
        column = int(at // unit)
        part = min(left, (column + 1) * unit - at)
        yield column, part
        at += part
        left -= part
