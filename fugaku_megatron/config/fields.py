"""Dataclass fields with help texts, and value checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import MISSING, Field, field, fields
from functools import cache, partial
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
SHARE = Range(lambda number: 0 <= number <= 1, "a number from 0 to 1")
FRACTION = Range(lambda number: 0 <= number < 1, "a number from 0 to below 1")


class Meaning(NamedTuple):
    """Meaning of a flag for a run that continues from a checkpoint.

    weights: the value is part of the weights' meaning, and must be the saved one
    angles: as `weights`, but a run that starts from weights may change it
    course: the value decides the course of training; a difference is noted
    length: the value decides the number of samples
    """

    weights: bool = False
    angles: bool = False
    course: bool = False
    length: bool = False


WEIGHTS = Meaning(weights=True)
ANGLES = Meaning(weights=True, angles=True)
COURSE = Meaning(course=True)
LENGTH = Meaning(length=True)
BATCHES = Meaning(course=True, length=True)
FREE = Meaning()

# Values of `Declaration.differs`: how widely the ranks of a run agree on a flag.
BY_STAGE = "stage"
BY_RANK = "rank"

# Values of `Declaration.megatron`.
SAME = "same"  # the argument has the field's name and meaning
OWN_FORM = "own form"  # convert/ writes and reads other arguments
BY_LAYER = "by layer"  # the argument is a number or a list, and the field is text
CONSTANT = "constant"  # there is no argument, and --use-rope-scaling means the default
OTHER_WEIGHTS = (
    "other weights"  # the argument has the same meaning, and its weights are not converted
)


class Requirement(NamedTuple):
    """Condition without which a flag has no effect. text: for a message. is_met: takes a `RunConfig`"""

    text: str
    is_met: Callable[[Any], bool]


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
    path: kind of the file that a text names; the text is then not empty
    meaning: for a run that continues from a checkpoint
    needs: flags and conditions without which the flag has no effect
    differs: BY_STAGE or BY_RANK if the ranks of a run may have different values
    part_of: property of a model that says what this field and others mean together
    neutral: value that means the same as None
    drops: fields of a recipe that the flag drops
    excludes: fields whose values the flag sets itself
    topic: set of flags that the code treats alike
    library: replacement in a program with a Trainer, which refuses the flag
    follows: field whose value Megatron-LM saves for the flag that is not passed
    script: variable of a job script that sets the flag
    megatron: how an argument of Megatron-LM's checkpoints describes the value; None: only the default can be converted
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
    path: str | None = None
    meaning: Meaning = FREE
    needs: tuple[Requirement, ...] = ()
    differs: str | None = None
    part_of: str | None = None
    neutral: Any = None
    drops: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    topic: str | None = None
    follows: str | None = None
    library: str | None = None
    script: str | None = None
    megatron: str | None = None

    @property
    def is_derived(self) -> bool:
        """True for a field that other fields set if it is None."""
        return self.default is None and self.type == "int"


def option(default: Any, help: str, **traits: Any) -> Any:
    """Return a dataclass field with its help text.

    traits: aliases (other flag names); needs, a field, "field=value", `Requirement` or tuple; other fields of `Declaration`
    """
    unknown = traits.keys() - {"aliases", *Declaration._fields}
    if unknown:
        raise TypeError(f"{help!r:.60}: a field has no {' and no '.join(sorted(unknown))}")
    return field(default=default, metadata={"help": help, **traits})


required = partial(option, MISSING)
optional = partial(option, None)  # unless it is set or computed from others
switch = partial(option, False)

# Fields that a run may change when it resumes.
free_option = partial(option, meaning=FREE)
free_optional = partial(optional, meaning=FREE)
free_switch = partial(switch, meaning=FREE)
# Fields that weights are trained for, and numbers of rotary angles.
weight_option = partial(option, meaning=WEIGHTS)
weight_optional = partial(optional, meaning=WEIGHTS)
weight_switch = partial(switch, meaning=WEIGHTS)
angle_option = partial(option, meaning=ANGLES)
angle_optional = partial(optional, meaning=ANGLES)
angle_switch = partial(switch, meaning=ANGLES)
# Fields that decide the course of training.
course_option = partial(option, meaning=COURSE)
course_optional = partial(optional, meaning=COURSE)
course_switch = partial(switch, meaning=COURSE)


def _requirement(need: str | Requirement) -> Requirement:
    if isinstance(need, Requirement):
        return need
    name, equals, value = need.partition("=")
    if equals:
        return Requirement(f"{flag(name)} {value}", lambda run: bool(run.values[name] == value))
    return Requirement(flag(name), lambda run: bool(run.values[name]))


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
        needs = meta.pop("needs", ())
        if isinstance(needs, (str, Requirement)):
            needs = (needs,)
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
                needs=tuple(map(_requirement, needs)),
                **meta,
            )
        )
    return tuple(found)


def named(config: type, has: Callable[[Declaration], object]) -> tuple[str, ...]:
    """Return the names of a config's fields with a trait."""
    return tuple(each.name for each in declarations(config) if has(each))


def of_topic(config: type, topic: str) -> tuple[str, ...]:
    return named(config, lambda each: each.topic == topic)


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
        check(
            value != "" or not declared.path,
            f"{flag(declared.name)} is empty: pass a {declared.path}, or leave it out (is a variable unset?)",
        )
        choices = declared.choices
        for each in value if isinstance(value, tuple) else (value,):
            check(
                choices is None or each in choices or value is declared.default,
                f"{flag(declared.name)} is {each}: pass {' or '.join(map(str, choices or ()))}",
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
