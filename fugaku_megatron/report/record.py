"""A growing report: its time, progress lines, and files that are complete after every section.

Files are replaced by a rename, so a killed run leaves its finished sections, marked "complete": false. Names of users,
hosts and paths are replaced.
"""

from __future__ import annotations

import getpass
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.fields import check
from ..text.named_files import JsonObject, read_text
from ..text.numbers import rounded, say
from ..text.written_files import write_text

# of the time
SHARES = {
    "host": 2,
    "kernels": 20,
    "communication": 22,
    "training": 26,
    "layers": 24,
    "storage": 6,
}
NAMES = tuple(SHARES)
ALWAYS = ("host", "kernels")  # measured without time left, because the others depend on them
ENDING = 0.03  # share of the time that stays for what no section counts
STARTED = time.monotonic()  # when this process began, but for Python's own start
LABEL = "model (extrapolated)"  # of what was not measured
FORMAT = "fugaku-megatron report"
VERSION = 1
DIGITS = 5  # of numbers in the file
PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+~-]+/)+[\w.+~-]*")
WRITES = itertools.count()  # the numbers of this process's writes, for names of partial files


class Budget:
    """minutes: for all sections; spent: seconds before now that count"""

    def __init__(
        self, minutes: float, clock: Callable[[], float] = time.monotonic, spent: float = 0.0
    ) -> None:
        self._clock = clock
        self.minutes = minutes
        self.begin = clock() - spent

    @property
    def used(self) -> float:
        return self._clock() - self.begin

    @property
    def left(self) -> float:
        return max(0.0, 60 * self.minutes * (1 - ENDING) - self.used)

    def of(self, name: str, following: tuple[str, ...]) -> float:
        """Return a section's seconds; time left by quick sections goes to the following."""
        return self.left * SHARES[name] / (SHARES[name] + sum(SHARES[other] for other in following))


def private_words() -> dict[str, str]:
    """Return user, host, home and working directory -> the marks that replace the names."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = ""
    try:
        home = str(Path.home())
    except RuntimeError:  # a user number without an entry in passwd, and no HOME
        home = ""
    host = platform.node()
    found = {
        os.getcwd(): "FOLDER",
        home: "HOME",
        host: "HOST",
        host.split(".")[0]: "HOST",
        user: "USER",
    }
    return {word: mark for word, mark in found.items() if len(word) > 1}


def without_names(value: Any, words: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: without_names(part, words) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_names(part, words) for part in value]
    if not isinstance(value, str):
        return value
    text = PATH.sub("PATH", value)
    for word, mark in words.items():
        text = re.sub(rf"(?<![\w-]){re.escape(word)}(?![\w-])", mark, text)
    return text


def write_atomically(path: Path, text: str) -> None:
    """Replace a file; readers see the old or the new one. A signal handler may interrupt and write
    the same file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.{next(WRITES)}")
    try:
        write_text(partial, text)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Record:
    """A report file and its pages for readers. pages: suffix -> function of the report. names: keep them"""

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
    say(f"report: {text}")


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
