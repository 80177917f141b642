"""History file of a run: a JSON record for each iteration."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ...text.named_files import JsonObject, StrPath
from ...text.written_files import reopened
from .writer import Writer

HISTORY = "history.jsonl"  # in the directory of --save


def read_history(path: StrPath) -> list[JsonObject]:
    """Return a history file's records, without an incomplete last line.

    "kind" is "train", "validation", "event" or "experts".
    """
    lines = Path(path).read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line.decode()))
        except RecursionError as error:
            raise ValueError(
                f"{path} line {number}: brackets are nested too deeply: move the file away"
            ) from error
        except ValueError as error:
            if number < len(lines):
                raise ValueError(
                    f"{path} line {number} is not JSON: {error}: move the file away"
                ) from error
    return records


def read_run_history(path: Path) -> list[JsonObject]:
    """Return the history that a run continues, [] without a file. ValueError for another file."""
    if not path.exists():
        return []
    if not path.is_file():
        raise ValueError(
            f"--save: {path} is not a regular file, and the history is written there: move it away"
        )
    records = read_history(path)
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict) or not isinstance(record.get("iteration"), int):
            raise ValueError(
                f"{path} line {number} has no iteration, so it is not the history of a run: move the file away"
            )
    return records


class History(Writer):
    """History file, continued after `start_iteration`."""

    def __init__(self, path: Path, start_iteration: int = 0) -> None:
        records = read_run_history(path)
        kept = [record for record in records if record["iteration"] <= start_iteration]
        self.path = path
        self._file = reopened(path, "".join(json.dumps(record) + "\n" for record in kept))

    def record(self, kind: str, values: dict[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"kind": kind, **values}) + "\n")
            self._file.flush()
        except OSError as error:  # the buffer is written with the next record
            raise OSError(f"{self.path}: not written yet: {error.strerror}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):  # `record` has reported it
            self._file.close()
