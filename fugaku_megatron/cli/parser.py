"""Argument parser with one-line messages, and commands."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from ..config.fields import Declaration, Refused, as_tuples, declarations
from .names_elsewhere import equivalent

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_MESSAGE = 400  # characters of a message that repeats a value

_FLAG = re.compile("--?[A-Za-z]")  # beginning of a flag


class Command(NamedTuple):
    """A command. when: one line of help; main: parsed flags -> exit code."""

    when: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    main: Callable[[argparse.Namespace], int]

    def load(self) -> Command:
        return self


T = TypeVar("T", bound="DataclassInstance")


def add_field(group: argparse._ActionsContainer, declared: Declaration) -> None:
    """Add a field's flags, and the switches that set the field to a fixed value."""
    help = declared.help
    default = declared.default
    if default not in (MISSING, None, ()) and declared.kind is not bool:
        words = default if isinstance(default, tuple) else (default,)
        help += f" (default: {' '.join(map(str, words))})"
    options: dict[str, Any] = {
        "dest": declared.name,
        "default": argparse.SUPPRESS,
        "help": help.replace("%", "%%"),
    }
    if declared.kind is bool:
        # A switch that is on by default gets a --no- flag.
        options["action"] = argparse.BooleanOptionalAction if default else "store_true"
    elif declared.repeated:
        options |= {"action": "append", "metavar": declared.metavar}
    else:
        options |= {
            "type": declared.kind,
            "nargs": declared.nargs,
            "choices": declared.choices,
            "metavar": declared.metavar,
        }
    group.add_argument(*declared.flags, **options)
    for name, value in declared.switches.items():
        group.add_argument(
            name,
            dest=declared.name,
            action="store_const",
            const=value,
            default=argparse.SUPPRESS,
            help=f"the same as {declared.flags[0]} {value}",
        )


def add_fields(parser: argparse.ArgumentParser, cls: type) -> None:
    for declared in declarations(cls):
        add_field(parser, declared)


def from_options(cls: type[T], options: argparse.Namespace, **others: Any) -> T:
    """Build a dataclass from the flags with its fields' names; a list becomes a tuple.

    others: fields that are not flags
    """
    given = {
        each.name: getattr(options, each.name)
        for each in fields(cls)
        if each.name not in others and hasattr(options, each.name)
    }
    return cls(**others, **as_tuples(given))


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ValueError with one line for each mistake.

    All mistakes are raised at once: unknown flags, wrong values, and those from
    `mistakes_among(values, has_others)`. Without a mistake, `completed` may change the values. With
    set_defaults(passed=[]) words after "--" are stored in `passed`, for another program.
    """

    completed: Callable[[argparse.Namespace], None] | None = None
    mistakes_among: Callable[[Mapping[str, Any], bool], Iterable[str]] | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options
        )
        # Messages collected by parse_args; None while another method parses.
        self._wrong_values: list[str] | None = None

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
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
        """Write `message`, but unlike argparse do not ignore errors, such as a full disk."""
        (file or sys.stderr).write(message)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Parse all arguments; raise Refused with every mistake. Words after -- become `passed`, if declared."""
        words = list(sys.argv[1:] if args is None else args)
        end = len(words)
        if "--" in words and self.get_default("passed") is not None:
            end = words.index("--")
        wrong: list[str] = []
        self._wrong_values = wrong
        try:
            values, unknown = self.parse_known_args(words[:end], namespace)
        finally:
            self._wrong_values = None
        mistakes = []
        if unknown:
            too_many = self._too_many(words[:end], unknown)
            mistakes.append(_short(too_many) if too_many else self._unknown(unknown))
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
        if any(map(_FLAG.match, unknown)):
            return None
        known = {option: action for action in self._actions for option in action.option_strings}
        for start, word in enumerate(words):
            name, equals, value = word.partition("=")
            nargs = known[name].nargs if name in known else "unknown"
            if nargs not in (None, 0, *range(1, 10)):
                continue
            given = [value] if equals else []
            given += itertools.takewhile(lambda w: not _FLAG.match(w), words[start + 1 :])
            count = nargs if isinstance(nargs, int) else 1
            if not set(given[count:]) & set(unknown):
                continue
            if count == 0:
                return f"{name} takes no value: leave out {given[0]}"
            takes = "one value" if count == 1 else f"{count} values"
            quoted = ""
            if count == 1 and known[name].type is str:
                quoted = f"put them in quotes, {name} '{' '.join(given)}', or "
            more = " ".join(given[count:])
            return f"{name} takes {takes}, and {len(given)} words follow it, {' '.join(given)}: {quoted}leave out {more}"
        return None

    def _unknown(self, words: Sequence[str]) -> str:
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
    """Return a message's end about an unknown word, or `otherwise`.

    The end names the known word with the meaning that `word` has in another program, else the nearest.
    """
    words = list(known)
    near = [equivalent(word, words) or "", *difflib.get_close_matches(word, words, 1, cutoff)]
    found = next(filter(None, near), None)
    return f": did you mean {found}?" if found else otherwise
