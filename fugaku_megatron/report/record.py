"""A growing report: progress lines, and files that are complete after every section.

Files are replaced by a rename, so a killed run leaves its finished sections, marked "complete":
false.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .. import __version__
from ..config.fields import check
from ..text.named_files import JsonObject, read_text
from ..text.numbers import rounded
from ..text.written_files import new_file
from .budget import Budget
from .private_words import private_words, without_names

LABEL = "model (extrapolated)"  # of what was not measured
FORMAT = "fugaku-megatron report"
VERSION = 1
DIGITS = 5  # of numbers in the file
WRITES = itertools.count()  # the numbers of this process's writes, for names of partial files


def write_atomically(path: Path, text: str) -> None:
    """Replace a file; readers see the old or the new one. A signal handler may interrupt and write
    the same file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(WRITES)}")
    try:
        with open(partial, "w", encoding="utf-8", opener=new_file) as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Record:
    """pages: suffix -> function. names: keep them"""

    def __init__(
        self,
        path: Path,
        budget: Budget,
        pages: Mapping[str, Callable[[JsonObject], str]],
        names: bool,
    ) -> None:
        self.path = path
        self.budget = budget
        self._pages = pages
        self._private = {} if names else private_words()
        self._names = names
        self.data: JsonObject = {
            "format": FORMAT,
            "version": VERSION,
            "program": __version__,
            "complete": False,
            "ended": "running",
            "date": time.strftime("%Y-%m-%d"),
            "minutes": budget.minutes,
            "sections": {},
        }
        if names:
            self.data["names"] = {mark.lower(): word for word, mark in private_words().items()}

    def write(self) -> None:
        self.data["seconds"] = self.budget.used
        data = rounded(self.data, DIGITS)
        if not self._names:
            data = without_names(data, self._private)
        write_atomically(self.path, json.dumps(data, indent=1) + "\n")
        for suffix, page in self._pages.items():
            write_atomically(self.path.with_suffix(suffix), page(data))

    def end(self, how: str, complete: bool) -> None:
        self.data |= {"ended": how, "complete": complete}
        self.write()


def rows_of(sections: JsonObject, name: str, rows: str = "rows") -> list[JsonObject]:
    found: list[JsonObject] = sections.get(name, {}).get(rows, [])
    return found


def progress(text: str) -> None:
    print(f"report: {text}", file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def read(flag: str, path: Path) -> JsonObject:
    """Read a report file. ValueError, which names `flag`, for other files and versions."""
    remedy = "pass a file that fugaku-megatron report wrote"
    text = read_text(path, flag, remedy)
    try:
        data: JsonObject = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{flag} {path}: not JSON: {remedy}") from None
    check(
        isinstance(data, dict) and data.get("format") == FORMAT,
        f"{flag} {path} is not a report: pass a file that fugaku-megatron report wrote",
    )
    check(
        data.get("version") == VERSION and isinstance(data.get("sections"), dict),
        f"{flag} {path} has version "
        f"{data.get('version')!r:.20}, this program reads {VERSION}: write it again with this version",
    )
    return data
