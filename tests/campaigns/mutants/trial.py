"""Check of one layout by a changed or unchanged program, with ranks as threads of this process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.layout_check import check
from fugaku_megatron.layout_check.check import NO_FILES, Build, Report
from fugaku_megatron.layout_check.compare import Comparison, Tolerance
from fugaku_megatron.layout_check.points import Point
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
Tensors = Mapping[Point, Tensor]


class Result(NamedTuple):
    """Result of a trial. text: the report's line, or the error"""

    kind: str
    layout: str
    text: str


class Compared(NamedTuple):
    """Tensors of a comparison. alone: the tensors of one rank, {} if its training stopped"""

    tolerance: Tolerance
    ranks: Ranks
    alone: dict[Point, Tensor]

    def first_change(self, before: Compared) -> Point | None:
        """Return the first tensor, of the ranks or of one rank, that differs from the original's by more than the tolerance."""
        originals = assembled(piece for pieces in before.ranks for piece in pieces)
        alone = [Piece(point, (*x.shape,), (...,), x) for point, x in self.alone.items()]
        firsts = (
            self._first_difference(self.ranks, originals),
            self._first_difference([alone], before.alone),
        )
        return min(filter(None, firsts), key=lambda point: point.order, default=None)

    def _first_difference(self, ranks: Ranks, originals: Tensors) -> Point | None:
        comparison = Comparison(self.tolerance)
        comparison.add(ranks, originals)
        comparison.check_complete(originals)
        return comparison.first.point if comparison.first else None

    def is_equal(self, before: Compared) -> bool:
        """Return True if every bit is the original's."""
        if len(self.ranks) != len(before.ranks) or self.alone.keys() != before.alone.keys():
            return False
        equal = (_bits(own) == _bits(other) for own, other in zip(self.ranks, before.ranks))
        return all(equal) and all(x.equal(before.alone[point]) for point, x in self.alone.items())


@dataclass
class Checked:
    """A layout's report, and its tensors by number format. errors: largest shares of the tolerances"""

    report: Report | None = None
    problem: str = ""
    formats: list[Compared] = field(default_factory=list)
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
            small: Plan,
            ranks: Ranks,
            comparison: Comparison,
            build: Build,
            directory: Any,
        ) -> str | None:
            alone: dict[Point, Tensor] = {}
            checked.formats.append(Compared(comparison.tolerance, ranks, alone))
            check_complete = comparison.check_complete

            def completed(reference: Tensors) -> None:
                alone.update(reference)
                check_complete(reference)

            comparison.check_complete = completed  # type: ignore[method-assign]
            problem = compare_alone(small, ranks, comparison, build, directory)
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
    pairs = list(zip(found.formats, original.formats, strict=False))
    changes = [own.first_change(before) for own, before in pairs]
    change = next((str(each) for each in changes if each), None)
    if found.problem:
        right = change is not None and f": {change}," in found.problem
        return Result(NAMED if right else ELSEWHERE, layout, f"{found.problem} [{change}]")
    if change is not None:
        return Result(ALIKE, layout, change)
    equal = len(found.formats) == len(original.formats)
    if equal and all(own.is_equal(before) for own, before in pairs):
        return Result(EQUIVALENT, layout, "")
    return Result(ROUNDING, layout, "")


def _bits(pieces: Iterable[Piece]) -> dict[Any, bytes]:
    bits = {}
    for number, piece in enumerate(pieces):
        if piece.values.numel() and not math.isnan(float(piece.values.sum())):
            bits[number, piece.point] = piece.values.numpy().tobytes()
    return bits
