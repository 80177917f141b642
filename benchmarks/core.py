"""Parts that all families of benchmarks share: rounds without disturbance, medians, tables of rows, and the result as text and JSON.

A family is a module with a docstring, `add_arguments(parser)`, `measure(options)`, which returns the result as JSON holds it, and
`text(options, result)`. A family that can draw its result has `draw(path, result)` as well, and then the option --png.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fugaku_megatron.config.fields import check, flag
from fugaku_megatron.host.machine import cpu_model
from fugaku_megatron.text.table import Column, heading, line

BUSY = "  BUSY MACHINE"
POSITIVE = (
    "rounds",
    "threads",
    "iterations",
    "tokens",
    "micro_batch_size",
    "micro_batches",
    "microbatches",
    "bucket_size",
    "prompt_length",
)
T = TypeVar("T")


def run(family: Any, options: argparse.Namespace) -> None:
    """Measure, print, write --json and --png. ValueError for options that do not fit, RuntimeError for what fails."""
    for name in POSITIVE:
        value = getattr(options, name, None)
        check(value is None or value > 0, f"{flag(name)} {value}: pass 1 or more")
    result = {"cpu": cpu_model(), **family.measure(options), "repeat": command_line()}
    print(f"{family.text(options, result)}\n{result['repeat']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    if getattr(options, "png", None):
        family.draw(options.png, result)


def command_line() -> str:
    """Return the command of this process, to be run again."""
    return shlex.join(["python", "-m", __package__, *sys.argv[1:]])


def apply_quick(options: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Use `values` for the options that are at their defaults, under --quick."""
    if options.quick:
        vars(options).update(
            {
                name: value
                for name, value in values.items()
                if getattr(options, name) == options.defaults[name]
            }
        )


def quiet_rounds(
    one_round: Callable[[int], tuple[T, bool]], rounds: int, patience: int
) -> tuple[list[T], int]:
    """Return (`rounds` that nobody disturbed, 0 or the number of discarded ones); if there are too few of them after `patience`
    times as many rounds, (all rounds, -1).

    one_round: takes the round's number; returns its figures and whether other processes left us the cores.
    """
    everything: list[T] = []
    quiet: list[T] = []
    while len(quiet) < rounds and len(everything) < patience * rounds:
        figures, alone = one_round(len(everything))
        everything.append(figures)
        if alone:
            quiet.append(figures)
    return (quiet, len(everything) - len(quiet)) if len(quiet) == rounds else (everything, -1)


def medians(
    records: Sequence[Mapping[str, Any]], names: Iterable[str] | None = None
) -> dict[str, float]:
    """Return the medians of the fields `names`, or of all fields."""
    return {
        name: statistics.median(record[name] for record in records) for name in names or records[0]
    }


def mark(busy: bool) -> str:
    """Return the mark of figures that other processes disturbed, and nothing for other figures."""
    return BUSY if busy else ""


def table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the titles and the rows, with a mark if other processes disturbed them."""
    lines = (line(columns, row) + mark(row.get("busy", False)) for row in rows)
    return "\n".join([heading(columns), *lines])
