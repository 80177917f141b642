"""Argument parser that reports a mistake in one line, and commands with a line of help."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ..config.fields import Refused

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
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        self._wrong_values: list[str] | None = (
            None  # a list while parse_args collects them; a family's own parser does not
        )

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
        end = (
            words.index("--")
            if "--" in words and self.get_default("passed") is not None
            else len(words)
        )
        wrong: list[str] = []
        self._wrong_values = wrong
        try:
            values, unknown = self.parse_known_args(words[:end], namespace)
        finally:
            self._wrong_values = None
        mistakes = (
            [self._too_many(words[:end], unknown) or self._unknown(unknown)] if unknown else []
        )
        mistakes += wrong
        if self.mistakes_among:
            mistakes += self.mistakes_among(vars(values), bool(mistakes))
        if mistakes:
            raise Refused(mistakes)
        if self.completed:
            self.completed(values)
        if words[end:]:
            values.passed = words[end + 1 :]
        return values

    def _too_many(self, words: Sequence[str], unknown: Sequence[str]) -> str | None:
        """Which flag takes fewer values than follow it, where `unknown` is not a flag but such a value; None elsewhere."""
        known = {option: action for action in self._actions for option in action.option_strings}
        for start, word in enumerate([] if any(map(_FLAG.match, unknown)) else words):
            name, equals, value = word.partition("=")
            nargs = known[name].nargs if name in known else "unknown"
            if nargs not in (None, 0, *range(1, 10)):
                continue
            given = [value] * bool(equals) + [
                *itertools.takewhile(lambda w: not _FLAG.match(w), words[start + 1 :])
            ]
            count = nargs if isinstance(nargs, int) else 1
            if not set(given[count:]) & set(unknown):
                continue
            takes = {0: "no value", 1: "one value"}.get(count, f"{count} values")
            if not count:
                return f"{name} takes {takes}: leave out {given[0]}"
            quoted = (
                f"put them in quotes, {name} '{' '.join(given)}', or "
                if count == 1 and known[name].type is str
                else ""
            )
            more = " ".join(given[count:])
            return f"{name} takes {takes}, and {len(given)} words follow it, {' '.join(given)}: {quoted}leave out {more}"
        return None

    def _unknown(self, words: Sequence[str]) -> str:
        """All unknown flags, or the first word that is not a flag, each with the nearest known flag."""
        flags = [option for action in self._actions for option in action.option_strings]
        wrong = list(dict.fromkeys(filter(_FLAG.match, words))) or [words[0]]
        near = [nearest(word.split("=")[0], flags, "", cutoff=0.7) for word in wrong]
        shown = [
            word + end.replace(": did", " (did").replace("?", "?)")
            for word, end in zip(wrong, near)
        ]
        if len(wrong) == 1:
            return f"unknown flag {wrong[0]}" + (near[0] or ": see --help for those there are")
        return f"unknown flags {', '.join(shown)}: see --help for those there are"


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."


def nearest(word: str, known: Iterable[str], otherwise: str, cutoff: float = 0.6) -> str:
    """The end of a message about an unknown word: the known word nearest to it, or `otherwise` where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f": did you mean {near[0]}?" if near else otherwise
