"""Record of a run's seconds over all its starts, which a resumed run continues: hours.jsonl in the directory of --save.

Each line is a JSON object with the `time` of its writing, in seconds since 1970, and an `event`:
    start       `begun`, when the process began; `iteration`, from which the run continues
    iterations  `iteration`, the last one; `count`, how many; `seconds`, by span of spans.py, since the line before
    end         `code` of the job's exit, written by `supervise`
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil

from ...text.named_files import JsonObject
from ...text.written_files import make_folder, no_link, write_text
from . import spans
from .writer import Writer

HOURS = "hours.jsonl"  # in the directory of --save
TIMED = (
    spans.STARTUP,
    spans.LOAD,
    spans.FIRST_ITERATION,
    spans.ITERATION,
    spans.SAVE,
    spans.FINALIZE,
    spans.EVALUATE,
)


class Hours(Writer):
    """Writer of a start's lines, into a copy of the file: a job that has lost --save to this one writes into the old file.

    seconds: of each span of TIMED, added by the telemetry and cleared by each line
    """

    def __init__(self, path: Path, start_iteration: int, seconds: dict[str, float]) -> None:
        make_folder(path.parent)
        aside = path.with_name(path.name + ".tmp")
        write_text(aside, path.read_text(errors="replace") if path.exists() else "")
        aside.replace(path)
        self._file = open(path, "a", encoding="utf-8", opener=no_link)
        self._seconds = seconds
        self._iteration = start_iteration
        begun = psutil.Process().create_time()
        self._append(event="start", begun=begun, iteration=start_iteration)

    def record(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "train":
            self._write(values["iteration"])

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `record` has reported it
            self._write(self._iteration)
            self._file.close()

    def _write(self, iteration: int) -> None:
        seconds = {name: round(value, 3) for name, value in self._seconds.items()}
        count = iteration - self._iteration
        self._append(event="iterations", iteration=iteration, count=count, seconds=seconds)
        self._seconds.clear()
        self._iteration = iteration

    def _append(self, **values: Any) -> None:
        self._file.write(_line(values))
        self._file.flush()


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
