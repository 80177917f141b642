"""FLOPs and bytes of a kernel's call, from its arguments' shapes."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import kernels

# (plus, times, symbol) of plus + times * symbol, as in "heads+2groups"
Factor = tuple[str, int, str]


@dataclass(frozen=True)
class _Operand:
    """A kernel's leading argument.

    dims: factors of each tensor dimension
    folds: the first factor covers several dimensions
    """

    name: str
    dims: tuple[tuple[Factor, ...], ...] | None
    folds: bool


@dataclass(frozen=True)
class _Row:
    name: str
    sizes: tuple[str, ...]
    text: str
    operands: tuple[_Operand, ...]

    def fail(self, what: str) -> None:
        raise ValueError(f"{self.name}: expected shapes {self.text}, got {what}")


def _factor(word: str) -> Factor:
    found = re.fullmatch(r"(?:(\w+)\+(\d+))?(\w+)", word)
    assert found, word
    plus, times, symbol = found.groups()
    return plus or "0", int(times or 1), symbol


@functools.cache
def _table() -> dict[str, _Row]:
    table = {}
    for row in kernels.table.rows():
        operands = []
        for name, dims in re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", row["operands"]):
            factors = None
            if dims:
                words = [dim.split() for dim in dims.replace("..", "").split(",")]
                factors = tuple(tuple(map(_factor, each)) for each in words)
            operands.append(_Operand(name, factors, ".." in dims))
        table[row["name"]] = _Row(
            row["name"], tuple(row["sizes"]), row["operands"], tuple(operands)
        )
    return table


def _dimensions(
    row: _Row, operand: _Operand, shape: list[int]
) -> Iterator[tuple[tuple[Factor, ...], int]]:
    assert operand.dims is not None
    more = len(shape) - len(operand.dims)
    if operand.folds and more > 0:
        shape = [math.prod(shape[: more + 1]), *shape[more + 1 :]]
    elif operand.folds and more == -1:
        shape = [1, *shape]
    if len(shape) != len(operand.dims):
        row.fail(f"{operand.name} with {len(shape)} dimensions")
    for factors, size in zip(operand.dims, shape):
        if factors[0][2] != "_":
            yield factors, size


def _solve(row: _Row, factors: Sequence[Factor], size: int, known: dict[str, int]) -> None:
    def value(word: str) -> int | None:
        return int(word) if word.isdigit() else known.get(word)

    product = 1
    unknown = None
    for factor in factors:
        plus = value(factor[0])
        symbol = value(factor[2])
        if plus is None or symbol is None and unknown:
            return
        if symbol is None:
            unknown = factor
        else:
            product *= plus + factor[1] * symbol
    if unknown is None:
        if product != size:
            row.fail(f"a dimension of {size} instead of {product}")
    elif product:
        if size % product:
            row.fail(f"a dimension of {size}, which is not a multiple of {product}")
        known[unknown[2]] = (size // product - (value(unknown[0]) or 0)) // unknown[1]


def sizes(name: str, *args: Any, **kwargs: Any) -> dict[str, int]:
    """Return a call's sizes by symbol, with e, e_out, e_avg, e_sq and dx from kernels.inc. ValueError for other shapes."""
    row = _table().get(name)
    if row is None:
        raise ValueError(f"no kernel of the table is called {name}")
    given = kwargs | dict(zip((operand.name for operand in row.operands), args))
    tensors = [(o, given[o.name]) for o in row.operands if hasattr(given.get(o.name), "shape")]
    bytes_of = {operand.name: tensor.element_size() for operand, tensor in tensors}
    last = next((o.name for o in reversed(row.operands) if o.dims is not None), "")
    known = {
        "e": next((bytes_of[o.name] for o, t in tensors if t.is_floating_point()), 0),
        "e_out": bytes_of.get(last, 0),
        "e_avg": bytes_of.get("exp_avg", 0),
        "e_sq": bytes_of.get("exp_avg_sq", 0),
        "dx": int("dx" in bytes_of),
    }
    for operand in row.operands:
        value = given.get(operand.name)
        if operand.dims is None and operand.name in row.sizes and isinstance(value, int):
            known[operand.name] = value
    dimensions = [
        dimension
        for operand, tensor in tensors
        if operand.dims is not None
        for dimension in _dimensions(row, operand, list(tensor.shape))
    ]
    for _ in range(len(row.sizes) + 1):
        for factors, size in dimensions:
            _solve(row, factors, size, known)
    if "value_size" in known:
        known.setdefault("key_size", known["value_size"])
    open_sizes = [symbol for symbol in row.sizes if symbol not in known and symbol != "window"]
    if open_sizes and "(" in row.text:
        row.fail(f"none that tells {open_sizes[0]}")
    return known | dict.fromkeys(open_sizes, 0)


def _cost(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, float]:
    if name not in _table():
        return 0.0, 0.0
    cost: tuple[float, float] = kernels.table.cost(name, **sizes(name, *args, **kwargs))
    return cost


def flops(name: str, *args: Any, **kwargs: Any) -> float:
    """Return multiplies plus adds; 0 for memory-bound kernels and outside the table."""
    return _cost(name, args, kwargs)[0]


def moved_bytes(name: str, *args: Any, **kwargs: Any) -> float:
    """Return the bytes that a call must move; 0 outside the table."""
    return _cost(name, args, kwargs)[1]
