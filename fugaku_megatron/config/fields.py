"""Dataclass fields with help texts, and value checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from dataclasses import Field, field, fields
from typing import Any

MAX_HALF = 450  # characters at the beginning and at the end of a message that repeats a value
MAX_NUMBER = 2**31 - 1  # largest integer, unless a field has its own `maximum`
TYPES = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


class RowNames(Collection[str]):
    """Names of a table's rows, also of rows added later, and other values: the choices of a flag.

    where: row -> False if the flag does not accept the row
    """

    def __init__(
        self,
        table: Mapping[str, Any],
        *others: str,
        where: Callable[[Any], bool] = lambda row: True,
    ) -> None:
        self._table = table
        self._others = others
        self._where = where

    def __iter__(self) -> Iterator[str]:
        yield from (name for name, row in self._table.items() if self._where(row))
        yield from self._others

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def option(default: Any, help: str, **meta: Any) -> Any:
    """Return a dataclass field with its help text.

    meta: choices, nargs, type, maximum, aliases (other flag names), switches (flag -> value)
    """
    return field(default=default, metadata={"help": help, **meta})


def required(help: str, **meta: Any) -> Any:
    return field(metadata={"help": help, **meta})


def cached_hash(cls: type) -> type:
    """Make a frozen dataclass compute its hash once, for use as a cache key.

    The hash is not pickled, because other processes hash strings differently.
    """
    fresh: Callable[[Any], int] = vars(cls)["__hash__"]

    def __hash__(self: Any) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", fresh(self))
        return int(self._hash)

    def __getstate__(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

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
    """Return the command-line words that set a field."""
    if isinstance(value, bool):
        return [flag(name) if value else flag("no_" + name)]
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
        value = getattr(config, name)
        check(value is None or value > 0, f"{flag(name)} is {value}: pass a number above 0")


def check_not_negative(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        check(value is None or value >= 0, f"{flag(name)} is {value}: pass 0 or more")


def check_fraction(config: Any, *names: str) -> None:
    """Raise ValueError unless every named field is None or in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        check(0.0 <= value < 1.0, f"{flag(name)} is {value}: pass a number from 0 to below 1")


def check_choices(config: Any) -> None:
    for f in fields(config):
        choices = f.metadata.get("choices")
        value = getattr(config, f.name)
        check(
            choices is None or value in choices or value is f.default,
            f"{flag(f.name)} is {value}: pass {' or '.join(map(str, choices or ()))}",
        )


def check_numbers(config: Any) -> None:
    """Raise ValueError unless floats are finite, and integers at most their field's `maximum`."""
    for f in fields(config):
        value = getattr(config, f.name)
        maximum = f.metadata.get("maximum", MAX_NUMBER)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                check(math.isfinite(number), f"{flag(f.name)} is {number}: pass a finite number")
            elif isinstance(number, int) and number > maximum:
                digits = len(str(number))
                shown = str(number) if digits <= 18 else f"a number of {digits} digits"
                raise ValueError(f"{flag(f.name)} is {shown}: pass at most {maximum}")


def check_type(f: Field[Any], value: Any) -> None:
    """Raise ValueError unless a value has its field's type; a list is accepted as a tuple."""
    if value is None and ("None" in f.type or f.default is None):
        return
    kind = f.type.removesuffix(" | None")
    values = [value]
    if kind.startswith("tuple"):
        values = value
        kind = kind[len("tuple[") :].split(",")[0]
    right = isinstance(values, (list, tuple)) and all(
        isinstance(item, TYPES[kind]) and (kind == "bool" or not isinstance(item, bool))
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
