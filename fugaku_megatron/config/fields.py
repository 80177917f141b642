"""Fields of a run's config and what is asked of their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import Field, field, fields
from typing import Any


def opt(default: Any, help: str, **meta: Any) -> Any:
    """A dataclass field with its help text; `meta`: choices, nargs, type, aliases (other flag names), switches (flag -> value)."""
    return field(default=default, metadata={"help": help, **meta})


def hashed_once(cls: type) -> type:
    """A frozen dataclass that is a key again and again: its hash is computed once, and not pickled with it.

    Other processes hash strings differently.
    """
    fresh: Callable[[Any], int] = vars(cls)["__hash__"]

    def __hash__(self: Any) -> int:
        if "_hash" not in self.__dict__:
            object.__setattr__(self, "_hash", fresh(self))
        return self._hash

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


def required(help: str, **meta: Any) -> Any:
    """A field that a recipe or a flag must set."""
    return field(metadata={"help": help, **meta})


def flag(name: str) -> str:
    """The command-line name of a field: seq_length -> --seq-length."""
    return "--" + name.replace("_", "-")


def flag_words(name: str, value: Any) -> list[str]:
    """The words of a command line that set a field to a value, which is not None."""
    if isinstance(value, bool):
        return [flag(name) if value else flag("no_" + name)]
    return [flag(name), *map(str, value if isinstance(value, tuple) else (value,))]


MAX_HALF = (
    450  # characters of the beginning and of the end of a message that repeats what was given
)


def check(condition: object, message: str) -> None:
    """Raise ValueError(message) unless `condition` is true: for values of a user, of which a long one is cut in the middle."""
    if not condition:
        raise ValueError(shortened(message))


def shortened(message: str) -> str:
    """A message that repeats what was given, without its middle where that is long."""
    return (
        message
        if len(message) <= 2 * MAX_HALF
        else f"{message[:MAX_HALF]} ... {message[-MAX_HALF:]}"
    )


class Refused(ValueError):
    """Flags that are refused. lines: why, one for each; a command line prints them below each other."""

    def __init__(self, lines: Sequence[str]) -> None:
        self.lines = tuple(map(shortened, lines))
        super().__init__("; ".join(self.lines))


def is_unicode(text: str) -> bool:
    """False for a path with bytes that are not valid in the locale's encoding, which Python keeps as surrogates."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def check_positive(config: Any, *names: str) -> None:
    """Every named field that is set must be > 0."""
    for name in names:
        value = getattr(config, name)
        check(value is None or value > 0, f"{flag(name)} is {value}: pass a number above 0")


MAX_NUMBER = 2**31 - 1  # of a whole number whose field names no other limit


def check_numbers(config: Any) -> None:
    """Every number must be finite, and a whole number at most its field's `maximum`, so that no size is beyond any machine."""
    for f in fields(config):
        value, maximum = getattr(config, f.name), f.metadata.get("maximum", MAX_NUMBER)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float):
                check(math.isfinite(number), f"{flag(f.name)} is {number}: pass a finite number")
            elif isinstance(number, int):
                shown = (
                    number
                    if abs(number) < 10**18
                    else f"a number of {len(str(abs(number)))} digits"
                )
                check(number <= maximum, f"{flag(f.name)} is {shown}: pass at most {maximum}")


KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def check_kind(f: Field, value: Any) -> None:
    """A value that did not come from the command line, but from a file, must be of its field's type; a list stands for a tuple."""
    if value is None and ("None" in f.type or f.default is None):
        return
    kind = f.type.removesuffix(" | None")
    parts, item = (
        ([value], kind)
        if not kind.startswith("tuple")
        else (value, kind[len("tuple[") :].split(",")[0])
    )
    right = isinstance(parts, (list, tuple)) and all(
        isinstance(part, KINDS[item]) and (item == "bool" or not isinstance(part, bool))
        for part in parts
    )
    check(right, f"{f.name} is {value!r:.60}, not {f.type}")


def is_off(value: Any) -> bool:
    """Return True for a value of a foreign file with which no feature is on: null, false, or empty. 0 is a value."""
    return value is None or value is False or (isinstance(value, Sized) and len(value) == 0)


def check_fraction(config: Any, *names: str) -> None:
    """Every named field must lie in [0, 1)."""
    for name in names:
        value = getattr(config, name)
        check(0.0 <= value < 1.0, f"{flag(name)} is {value}: pass a number from 0 to below 1")


def check_choices(config: Any) -> None:
    """Every field with choices must hold one of them, or None where that is its default."""
    for f in fields(config):
        choices, value = f.metadata.get("choices"), getattr(config, f.name)
        check(
            choices is None or value in choices or value is f.default,
            f"{flag(f.name)} is {value}: pass {' or '.join(map(str, choices or ()))}",
        )
