"""Dataclass fields with help texts, and value checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import Field, field, fields
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_HALF = 450  # characters at the beginning and at the end of a message that repeats a value
MAX_NUMBER = 2**31 - 1  # largest integer, unless a field has its own `maximum`
TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}

FieldValues = dict[str, Any]  # by field name


def as_tuples(values: Mapping[str, Any]) -> FieldValues:
    """Return values of JSON or a command line with tuples in place of lists."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }


class RowNames:
    """Names of a table's rows, also of rows added later, and other values: the choices of a flag.

    flag: name only the rows that list this field in `flags`
    """

    def __init__(self, table: Mapping[str, Any], *others: str, flag: str | None = None) -> None:
        self._table = table
        self._others = others
        self._flag = flag

    def __iter__(self) -> Iterator[str]:
        for name, row in self._table.items():
            if self._flag is None or self._flag in row.flags:
                yield name
        yield from self._others


class Range(NamedTuple):
    """A range of numbers. remedy: end of the message about a number outside it"""

    contains: Callable[[float], bool]
    remedy: str


POSITIVE = Range(lambda number: number > 0, "a number above 0")
NOT_NEGATIVE = Range(lambda number: number >= 0, "0 or more")
FRACTION = Range(lambda number: 0 <= number < 1, "a number from 0 to below 1")


class Declaration(NamedTuple):
    """A field as the command line and the checks see it.

    type: annotation
    kind: class of a value, or of a tuple's elements
    default: MISSING for a required field
    flags: the field's flag and its aliases
    nargs, metavar: as in argparse; a field of type tuple takes one value or more
    repeated: True for a field of type tuple whose flag takes one value, and may be repeated
    switches: flag without a value -> the value that it sets
    maximum: of an integer
    range: of a number; None: the class checks it
    """

    name: str
    type: str
    kind: Callable[[str], Any]
    default: Any
    flags: tuple[str, ...]
    help: str
    nargs: int | str | None = None
    metavar: str | None = None
    repeated: bool = False
    choices: Iterable[Any] | None = None
    switches: Mapping[str, Any] = MappingProxyType({})
    maximum: int = MAX_NUMBER
    range: Range | None = POSITIVE


def option(default: Any, help: str, **meta: Any) -> Any:
    """Return a dataclass field with its help text.

    meta: aliases (other flag names), and fields of `Declaration`
    """
    return field(default=default, metadata={"help": help, **meta})


def optional(help: str, **meta: Any) -> Any:
    """Return a field that is None unless it is set or computed from others."""
    return option(None, help, **meta)


def switch(help: str, **meta: Any) -> Any:
    """Return a field that is off by default."""
    return option(False, help, **meta)


def required(help: str, **meta: Any) -> Any:
    return field(metadata={"help": help, **meta})


def _element_type(annotation: str) -> str:
    return annotation.removeprefix("tuple[").split(",")[0]


@cache
def declarations(config: type) -> tuple[Declaration, ...]:
    """Return the flag declarations of a config class, in the order of its fields."""
    found = []
    for each in fields(config):
        if not each.metadata:
            continue
        meta = dict(each.metadata)
        annotation = str(each.type)
        kind = annotation.removesuffix(" | None")
        if kind.startswith("tuple"):
            kind = _element_type(kind)
            meta.setdefault("nargs", "+")
        found.append(
            Declaration(
                name=each.name,
                type=annotation,
                kind=TYPES[kind],
                default=each.default,
                flags=(flag(each.name), *meta.pop("aliases", ())),
                **meta,
            )
        )
    return tuple(found)


def cached_hash(cls: type) -> type:
    """Make a frozen dataclass compute its hash once, for use as a cache key.

    Only fields are pickled, because other processes hash strings differently.
    """
    fresh: Callable[[Any], int] = vars(cls)["__hash__"]

    def __hash__(self: Any) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", fresh(self))
        return int(self._hash)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    own = {
        "__hash__": __hash__,
        "__getstate__": __getstate__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, (cls,), own)


def flag(name: str) -> str:
    """Return a field's command-line name: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def flag_words(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else flag("no_" + name)]
    if isinstance(value, str) and value.startswith("-"):
        return [f"{flag(name)}={value}"]  # which argparse takes for a flag otherwise
    values = value if isinstance(value, tuple) else (value,)
    return [flag(name), *map(str, values)]


class Refused(ValueError):
    """Refused flags. lines: one reason each."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(map(shortened, lines))
        super().__init__("; ".join(self.lines))


def shortened(message: str) -> str:
    if len(message) <= 2 * MAX_HALF:
        return message
    return f"{message[:MAX_HALF]} ... {message[-MAX_HALF:]}"


def check(condition: object, message: str) -> None:
    """Raise ValueError with a shortened `message` unless `condition` is true."""
    if not condition:
        raise ValueError(shortened(message))


def check_positive(config: Any, *names: str) -> None:
    for name in names:
        _check_range(name, getattr(config, name), POSITIVE)


def _check_range(name: str, value: float | None, range: Range) -> None:
    check(value is None or range.contains(value), f"{flag(name)} is {value}: pass {range.remedy}")


def check_fields(config: Any) -> None:
    """Raise ValueError for a number out of range, or for a value that is no choice of its field."""
    for declared in declarations(config.__class__):
        value = getattr(config, declared.name)
        for number in value if isinstance(value, tuple) else (value,):
            _check_size(declared, number)
        if declared.kind in (int, float) and declared.range and not isinstance(value, tuple):
            _check_range(declared.name, value, declared.range)
        choices = declared.choices
        check(
            choices is None or value in choices or value is declared.default,
            f"{flag(declared.name)} is {value}: pass {' or '.join(map(str, choices or ()))}",
        )


def _check_size(declared: Declaration, number: Any) -> None:
    """Raise ValueError unless floats are finite, and integers at most their field's `maximum`."""
    name = flag(declared.name)
    if isinstance(number, float):
        check(math.isfinite(number), f"{name} is {number}: pass a finite number")
    elif isinstance(number, int) and number > declared.maximum:
        digits = len(str(number))
        shown = str(number) if digits <= 18 else f"a number of {digits} digits"
        raise ValueError(f"{name} is {shown}: pass at most {declared.maximum}")


def check_type(f: Field[Any] | Declaration, value: Any) -> None:
    """Raise ValueError unless a value has its field's type; a list is accepted as a tuple."""
    if value is None and ("None" in f.type or f.default is None):
        return
    name = f.type.removesuffix(" | None")
    values = [value]
    if name.startswith("tuple"):
        values = value
        name = _element_type(name)
    accepted = (int, float) if name == "float" else TYPES[name]
    right = isinstance(values, (list, tuple)) and all(
        isinstance(item, accepted) and (name == "bool" or not isinstance(item, bool))
        for item in values
    )
    check(right, f"{f.name} is {value!r:.60}, not {f.type}")


def is_off(value: Any) -> bool:
    """Return True if a foreign file's value switches a feature off: null, false, or empty, but not
    0.
    """
    return value is None or value is False or (isinstance(value, Sized) and len(value) == 0)


def is_unicode(text: str) -> bool:
    """Return False for a path with bytes invalid in the locale's encoding (surrogates in Python)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
