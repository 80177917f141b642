"""Record of a run's seconds over all its starts, which a resumed run continues: hours.jsonl in the directory of --save.

Each line is a JSON object with the `time` of its writing, in seconds since 1970, and an `event`:
    start       `begun`, when the process began; `iteration`, from which the run continues; `job`, the scheduler's number;
                `saving`, the flag of config/output.py by which checkpoints are saved; `source`, the flag of the checkpoint's place
    iterations  `iteration`, the last one; `count`, how many; `seconds`, by span of spans.py, since the line before; `saves` and
                `copies` in other nodes' memory that have begun
    end         `code` of the job's exit, written by `supervise`
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import psutil

from ...text.named_files import JsonObject
from ...text.written_files import no_link, reopened
from . import spans
from .writer import Writer

HOURS = "hours.jsonl"  # in the directory of --save
JOB_VARIABLES = ("SLURM_JOB_ID", "PJM_JOBID")  # set by the schedulers
TIMED = (
    spans.STARTUP,
    spans.LOAD,
    spans.FIRST_ITERATION,
    spans.ITERATION,
    spans.AUDIT,
    spans.SAVE,
    spans.FINALIZE,
    spans.COPY,
    spans.COPY_FINALIZE,
    spans.EVALUATE,
)


class SpanTimes:
    """Seconds and number of the spans of TIMED since the last `clear`."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: Counter[str] = Counter()

    def add(self, name: str, seconds: float) -> None:
        if name in TIMED:
            self.seconds[name] += seconds
            self.counts[name] += 1

    def clear(self) -> None:
        self.seconds.clear()
        self.counts.clear()


class Hours(Writer):
    """Writer of a start's lines, into a copy of the file: a job that has lost --save to this one writes into the old file.

    times: filled by the telemetry and cleared by each line
    saving, source: see `start` above
    """

    def __init__(
        self, path: Path, start_iteration: int, times: SpanTimes, saving: str, source: str
    ) -> None:
        self._file = reopened(path, path.read_text(errors="replace") if path.exists() else "")
        self._times = times
        self._iteration = start_iteration
        begun = psutil.Process().create_time()
        self._append(
            event="start",
            begun=begun,
            iteration=start_iteration,
            job=scheduler_job(),
            saving=saving,
            source=source,
        )

    def record(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "train":
            self._write(values["iteration"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `record` has reported it
            self._write(self._iteration)
            self._file.close()

    def _write(self, iteration: int) -> None:
        self._append(
            event="iterations",
            iteration=iteration,
            count=iteration - self._iteration,
            seconds={name: round(value, 3) for name, value in self._times.seconds.items()},
            saves=self._times.counts[spans.SAVE],
            copies=self._times.counts[spans.COPY],
        )
        self._times.clear()
        self._iteration = iteration

    def _append(self, **values: Any) -> None:
        self._file.write(_line(values))
        self._file.flush()


def scheduler_job() -> str | None:
    """Return the number of this process's job, or None outside a scheduler's job."""
    return next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), None)


def append(path: Path, **values: Any) -> None:
    """Append a line. OSError if it is not written."""
    with open(path, "a", encoding="utf-8", opener=no_link) as file:
        file.write(_line(values))


def _line(values: JsonObject) -> str:
    return json.dumps({"time": round(time.time(), 3), **values}) + "\n"


def read_hours(path: Path) -> list[JsonObject]:
    """Return the lines of a file, without those that a full disk or a lost node cut."""
    lines = []
    for text in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"time", "event"} <= line.keys():
                lines.append(line)
    return lines
