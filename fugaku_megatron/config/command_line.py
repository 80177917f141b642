"""What every command line of the project is made of: a parser whose mistakes are one line, commands with a line of help, and files.

A path that cannot be written is refused before the work, and a failure while writing is one line.
Left out: a run's flags (`arguments`), the commands themselves and the report of mistakes (`cli`).
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import os
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .checks import Refused, check

MAX_MESSAGE = 400  # characters of a mistake that repeats what was given
_FLAG = re.compile("--?[A-Za-z]")  # how a flag begins


@dataclass(frozen=True)
class Command:
    """A command of a command line. when: one line, when to use it; main: takes the parsed flags and returns the exit code."""

    when: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]

    def load(self) -> Command:
        return self


class Parser(argparse.ArgumentParser):
    """Raises ValueError, with one line, for mistakes and for flags that it does not know, instead of printing the usage.

    All mistakes of a command line are raised at once: unknown flags, values that a flag does not take, and what `mistakes_among`
    finds among the parsed values, told whether there are others; without a mistake, `completed` changes the values.
    With set_defaults(passed=[]) the words after "--" are kept there as they are, for another program.
    """

    completed: Callable[[argparse.Namespace], None] | None = None
    mistakes_among: Callable[[Mapping[str, Any], bool], Iterable[str]] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._wrong_values: list[str] | None = None  # a list while parse_args collects them; a family's own parser does not

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """A value that the flag does not take is kept for the message, and parsing goes on with None."""
        try:
            return super()._get_values(action, arg_strings)
        except argparse.ArgumentError as error:
            if self._wrong_values is None or not action.option_strings:
                raise
            self._wrong_values.append(_short(str(error)))
            return None

    def error(self, message: str) -> NoReturn:
        raise ValueError(_short(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        """Argparse's own ignores an error of standard output, so that --help onto a full disk would not be an error."""
        (file or sys.stderr).write(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words and self.get_default("passed") is not None else len(words)
        wrong: list[str] = []
        self._wrong_values = wrong
        try:
            values, unknown = self.parse_known_args(words[:end], namespace)
        finally:
            self._wrong_values = None
        mistakes = [self._too_many(words[:end], unknown) or self._unknown(unknown)] if unknown else []
        mistakes += wrong
        if self.mistakes_among:
            mistakes += self.mistakes_among(vars(values), bool(mistakes))
        if mistakes:
            raise Refused(mistakes)
        if self.completed:
            self.completed(values)
        if words[end:]:
            values.passed = words[end + 1:]
        return values

    def _too_many(self, words: Sequence[str], unknown: Sequence[str]) -> str | None:
        """Which flag takes fewer values than follow it, where `unknown` is not a flag but such a value; None elsewhere."""
        known = {option: action for action in self._actions for option in action.option_strings}
        for start, word in enumerate([] if any(map(_FLAG.match, unknown)) else words):
            name, equals, value = word.partition("=")
            nargs = known[name].nargs if name in known else "unknown"
            if nargs not in (None, 0, *range(1, 10)):
                continue
            given = [value] * bool(equals) + [*itertools.takewhile(lambda w: not _FLAG.match(w), words[start + 1:])]
            count = nargs if isinstance(nargs, int) else 1
            if not set(given[count:]) & set(unknown):
                continue
            takes = {0: "no value", 1: "one value"}.get(count, f"{count} values")
            if not count:
                return f"{name} takes {takes}: leave out {given[0]}"
            quoted = f"put them in quotes, {name} '{' '.join(given)}', or " if count == 1 and known[name].type is str else ""
            more = " ".join(given[count:])
            return f"{name} takes {takes}, and {len(given)} words follow it, {' '.join(given)}: {quoted}leave out {more}"
        return None

    def _unknown(self, words: Sequence[str]) -> str:
        """All unknown flags, or the first word that is not a flag, each with the nearest known flag."""
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = list(dict.fromkeys(filter(_FLAG.match, words))) or [words[0]]
        near = [nearest(word.split("=")[0], flags, "", cutoff=0.7) for word in wrong]
        shown = [word + end.replace(": did", " (did").replace("?", "?)") for word, end in zip(wrong, near)]
        if len(wrong) == 1:
            return f"unknown flag {wrong[0]}" + (near[0] or ": see --help for those there are")
        return f"unknown flags {', '.join(shown)}: see --help for those there are"


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."


def nearest(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown word: the known word nearest to it, or `otherwise` where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f": did you mean {near[0]}?" if near else otherwise


# Files that commands write, and tables ------------------------------------------------------------------------------------------

def check_file(flag: str, file: str | Path | None) -> None:
    """Raises ValueError, one line, when `file`, the value of `flag`, cannot be written. None: the flag was left out."""
    if file is None:
        return
    check(str(file) not in ("", "."), f"{flag} {str(file)!r} is not a name: pass a file")
    try:
        _check_place(flag, file)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ValueError(f"{flag} {file}: {error.strerror}: pass another file") from None


def _check_place(flag: str, file: str | Path) -> None:
    folder = Path(file).absolute().parent
    check("\0" not in str(file), f"{flag} {str(file)!r} holds a zero byte, which no name may: pass another file")
    check(folder.is_dir(), f"{flag} {file}: {folder} is not a directory: make it, or pass another file")
    check(not Path(file).is_dir(), f"{flag} {file} is a directory: pass a file in it")
    check(not Path(file).is_fifo(), f"{flag} {file} is a FIFO, which would wait for a reader: pass a file")
    writable = os.access(file if Path(file).exists() else folder, os.W_OK)
    check(writable, f"{flag} {file}: no permission to write there: pass another file")


def check_picture(file: str | Path | None) -> None:
    """check_file for --png, which also needs matplotlib."""
    check_file("--png", file)
    check(file is None or importlib.util.find_spec("matplotlib") is not None,
          f"--png {file} needs matplotlib: pip install matplotlib, or this package with its extra [log], or leave --png out")


@contextmanager
def writing(flag: str, file: str | Path) -> Iterator[None]:
    """A block that writes `file`, the value of `flag`: an OSError in it becomes a ValueError of one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{flag} {file}: cannot be written ({error.strerror}); pass another file") from None


def pipe_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table between pipes, aligned to the right except for the last column."""
    widths = [max(_width(cell) for cell in column) for column in zip(*rows)]
    rule = "| " + " | ".join("-" * (width - 1) + ":" for width in widths[:-1]) + " | " + "-" * widths[-1] + " |"
    padded = [[" " * (w - _width(cell)) + cell for cell, w in zip(row[:-1], widths)] + [row[-1].ljust(widths[-1])] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    return [lines[0], rule, *lines[1:]]


def _width(cell: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in cell)


# Flags of Megatron-LM and its forks that are not fields of `config`: what each means here, or why it is refused. Scripts written
# for them start unchanged, unless they ask for something that would change the model or be lost. The table is megatron_flags.txt,
# whose first lines say how it is read.

TABLE = Path(__file__).with_name("megatron_flags.txt")


@dataclass(frozen=True)
class OtherFlag:
    """A row of the table. values: how many follow the flag, as argparse has it. accepted: values that a refused flag may have."""

    values: int | str
    refused: bool
    meaning: str
    accepted: tuple[str, ...] = ()

    def refuses(self, given: Sequence[str]) -> bool:
        """Whether these values of the flag are refused."""
        accepted = [any(_same(value, other) for other in self.accepted) for value in given]
        return self.refused and not (accepted and all(accepted))

    @property
    def note(self) -> str:
        """What the log says where the flag is accepted."""
        return "the given value is what this program does" if self.refused else self.meaning


def _same(given: str, accepted: str) -> bool:
    try:
        return float(given) == float(accepted)
    except ValueError:
        return given == accepted


def _rows(text: str) -> Iterator[tuple[str, OtherFlag]]:
    for line in text.splitlines():
        if line.startswith(("noted: ", "refused: ")):
            status, _, meaning = line.partition(": ")
        elif line.startswith("  "):
            for word in line.split():
                name, takes, value = word.partition("=")
                accepted = () if value.startswith("X") or not takes else tuple(value.removesuffix("...").split("|"))
                yield name, OtherFlag((1, "+")[value.endswith("...")] if takes else 0, status == "refused", meaning, accepted)


OTHER_FLAGS: dict[str, OtherFlag] = dict(_rows(TABLE.read_text(encoding="utf-8")))
