"""A growing report: time budget, progress lines, and files that are complete after every section;
comparison of two reports.

Files are replaced by a rename, so a killed run leaves its finished sections, marked "complete":
false. Names of users, hosts and paths are replaced. Ratios are second to first: above 1 if the
second machine is faster.
"""

from __future__ import annotations

import getpass
import itertools
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..config.fields import check
from ..text.named_files import JsonObject, read_text
from ..text.numbers import rounded
from ..text.table import pipe_table

LABEL = "model (extrapolated)"  # of what was not measured
FORMAT = "fugaku-megatron report"
VERSION = 1
DIGITS = 5  # of numbers in the file
PATH = re.compile(r"(?<![\w.:/])/(?:[\w.+~-]+/)+[\w.+~-]*")
SHARES = {
    "host": 2,
    "kernels": 20,
    "communication": 22,
    "training": 26,
    "layers": 24,
    "storage": 6,
}  # of the time
ENDING = 0.03  # share of the time that stays for what no section counts
WRITES = itertools.count()  # the numbers of this process's writes, for names of partial files


class Budget:
    """Time for the sections. minutes: for the whole run"""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.minutes = minutes
        self.begin = clock()

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
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


class Record:
    """The report's contents and files. pages: suffix -> function. names: keep them"""

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


# Two reports next to each other --------------------------------------------------------------------------------------------------

LESS_IS_MORE = ("us", "s", "hours")  # units of which less is faster


def figures(data: JsonObject) -> dict[tuple[str, str], float]:
    """Return (name, unit) -> value for everything that two reports may share."""
    sections = data["sections"]
    found: dict[tuple[str, str], float] = {}
    kernels = sections.get("kernels")
    communication = sections.get("communication", {})
    if kernels:
        rank = kernels["ranks"][0]
        found |= {
            ("clock under load", "GHz"): rank["clock_ghz"],
            ("FMA peak of a rank", "GFLOP/s"): rank["fma_gflops"],
            ("triad of a rank", "GB/s"): rank["triad_gbs"],
        }
        found |= {(f"matmul {n}", "GFLOP/s"): rate for n, rate, _ in kernels["gemm"]}
        found |= {(f"matmul {n}, BF16", "GFLOP/s"): rate for n, rate, _ in kernels["gemm_bf16"]}
        int8 = kernels.get("gemm_int8", [])  # earlier reports have none
        found |= {(f"matmul {n}, INT8", "GFLOP/s"): rate for n, rate, _ in int8}
        for s, forward, backward, *_ in kernels["attention"]:
            found |= {
                (f"attention forward {s}", "GFLOP/s"): forward,
                (f"attention backward {s}", "GFLOP/s"): backward,
            }
        found |= {(row["kernel"], "GB/s"): row["gbs"] for row in kernels["elementwise"]}
    for where in ("inside", "between"):
        if messages := communication.get(where):
            found |= {
                (f"message {where} nodes", "us"): messages["alpha_us"],
                (f"link {where} nodes", "GB/s"): messages["gbs"],
            }
    found |= {
        (f"{row['verb']} {row['where']}, {row['bytes']} bytes, {row['ranks']} ranks", "s"): row[
            "seconds"
        ]
        for row in rows_of(sections, "communication", "collectives")
    }
    found |= {
        (f"124M, {row['ranks']} ranks", "tokens/s"): row["tokens_per_s"]
        for row in rows_of(sections, "training")
        if "tokens_per_s" in row
    }
    if storage := sections.get("storage"):
        found |= {
            ("checkpoint written", "GB/s"): storage["write_gbs"],
            ("checkpoint read", "GB/s"): storage["read_gbs"],
        }
    return found | {
        (f"10 M tokens of {row['model']} (extrapolated)", "hours"): row["hours"]
        for row in data.get("hours", [])
    }


def compared(first: Path, second: Path) -> str:
    one = read("--compare", first)
    two = read("--compare", second)
    a = figures(one)
    b = figures(two)
    rows = [["", "unit", "A", "B", "B is x as fast"]]
    for name, unit in a | b:
        values = [data.get((name, unit)) for data in (a, b)]
        shown = ["-" if value is None else f"{value:.4g}" for value in values]
        rows.append([name, unit, *shown, ratio(unit, *values)])
    lines = [f"A: {title(one)}", f"B: {title(two)}", "", *pipe_table(rows), ""]
    return "\n".join([*lines, same_bits(one, two)])


def ratio(unit: str, first: float | None, second: float | None) -> str:
    if not first or not second:
        return "-"
    return f"{first / second if unit in LESS_IS_MORE else second / first:.2f}"


def title(data: JsonObject) -> str:
    what = "an unknown machine"
    if nodes := rows_of(data["sections"], "host", "nodes"):
        what = f"{len(nodes)} x {nodes[0]['cpu']}, {nodes[0]['cores']} cores"
    state = "" if data["complete"] else f", PARTIAL: {data['ended']}"
    return f"{what}, {data['date']}{state}"


def same_bits(first: JsonObject, second: JsonObject) -> str:
    one, two = (
        {
            (row["kernel"], row["dtype"]): row["checksum"]
            for row in rows_of(data["sections"], "kernels", "checks")
        }
        for data in (first, second)
    )
    both = one.keys() & two.keys()
    return f"{len(one.items() & two.items())} of {len(both)} kernels compute the same bits"
