"""Check of one layout by a changed or unchanged program, with ranks as threads of this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.layout_check import check
from fugaku_megatron.layout_check.check import NO_FILES, Report, Small, Tools
from fugaku_megatron.layout_check.compare import Comparison, Tolerance
from fugaku_megatron.layout_check.recorder import Piece, assembled
from fugaku_megatron.run.check_layout import LayoutDiffers, check_run_layout
from tests.campaigns.mutants.layouts import run_of
from tests.threads import ThreadWorld

WAIT = 3600.0  # s; the campaign itself finds ranks that hang
# Kinds of results.
NAMED = "named"
ELSEWHERE = "elsewhere"
STOPPED = "stopped"
ALIKE = "alike"
ROUNDING = "rounding"
EQUIVALENT = "equivalent"
NOT_EXECUTED = "not executed"
FOUND = (NAMED, ELSEWHERE, STOPPED)

Ranks = list[list[Piece]]


class Result(NamedTuple):
    """Result of a trial. text: the report's line, or the error"""

    kind: str
    layout: str
    text: str


@dataclass
class Checked:
    """A layout's report, and its ranks' tensors by number format. errors: largest shares of the tolerances"""

    report: Report | None = None
    problem: str = ""
    formats: list[tuple[Tolerance, Ranks]] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)


def check_once(layout: str, flags: dict[str, Any]) -> Checked:
    """Check a layout. Errors of the program are raised."""
    torch.set_num_threads(1)
    run, ranks = run_of(layout, flags)
    checked = Checked()
    reports: dict[int, Report] = {}
    with _watched(checked):

        def work(world: Comm) -> str:
            try:
                reports[world.rank] = check_run_layout(run, world, NO_FILES)
            except LayoutDiffers as error:
                return str(error)
            return ""

        checked.problem = ThreadWorld(ranks, timeout=WAIT).run(work)[0]
    return checked


class _watched:
    """Copies of the tensors and comparisons of every check during the block."""

    def __init__(self, checked: Checked) -> None:
        self.checked = checked
        self._record = check._record
        self._compare_alone = check._compare_alone

    def __enter__(self) -> None:
        checked = self.checked
        compare_alone = self._compare_alone

        def compared(
            small: Small,
            ranks: Ranks,
            comparison: Comparison,
            tools: Tools,
            directory: Any,
        ) -> str | None:
            checked.formats.append((comparison.tolerance, ranks))
            problem = compare_alone(small, ranks, comparison, tools, directory)
            for kind, largest in comparison.kinds.items():
                share = largest.error / largest.allowed
                checked.errors[kind] = max(share, checked.errors.get(kind, 0.0))
            return problem

        check._compare_alone = compared

    def __exit__(self, *error: object) -> None:
        check._compare_alone = self._compare_alone


def result_of(layout: str, flags: dict[str, Any], original: Checked) -> Result:
    """Check a layout by the changed program, and compare its tensors with those of the original program."""
    try:
        found = check_once(layout, flags)
    except BaseException as error:
        text = next(iter(str(error).splitlines()), "")
        return Result(STOPPED, layout, f"{type(error).__name__}: {text:.200}")
    changes = [
        _first_change(tolerance, ranks, before)
        for (tolerance, ranks), (_, before) in zip(found.formats, original.formats, strict=False)
    ]
    change = next((each for each in changes if each), None)
    if found.problem:
        right = change is not None and f": {change}," in found.problem
        return Result(NAMED if right else ELSEWHERE, layout, f"{found.problem} [{change}]")
    if change is not None:
        return Result(ALIKE, layout, change)
    pairs = zip(found.formats, original.formats, strict=True)
    if all(_equal(ranks, before) for (_, ranks), (_, before) in pairs):
        return Result(EQUIVALENT, layout, "")
    return Result(ROUNDING, layout, "")


def _first_change(tolerance: Tolerance, ranks: Ranks, before: Ranks) -> str | None:
    """Return the first tensor that differs from the original's by more than the tolerance."""
    reference = assembled(piece for pieces in before for piece in pieces)
    comparison = Comparison(tolerance)
    comparison.add(ranks, reference)
    comparison.check_complete(reference)
    return str(comparison.first.point) if comparison.first else None


def _equal(ranks: Sequence[Iterable[Piece]], before: Sequence[Iterable[Piece]]) -> bool:
    if len(ranks) != len(before):
        return False
    return all(_bits(each) == _bits(other) for each, other in zip(ranks, before, strict=True))


def _bits(pieces: Iterable[Piece]) -> dict[Any, bytes]:
    bits = {}
    for number, piece in enumerate(pieces):
        if piece.values.numel() and not math.isnan(float(piece.values.sum())):
            bits[number, piece.point] = piece.values.numpy().tobytes()
    return bits
