"""Check of one layout by a changed or unchanged program, with ranks as threads of this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fugaku_megatron.comm.base import Comm
from fugaku_megatron.costs.plan import Plan
from fugaku_megatron.layout_check import check
from fugaku_megatron.layout_check.check import NO_FILES, Build
from fugaku_megatron.layout_check.compare import Comparison, Tolerance
from fugaku_megatron.layout_check.points import Point
from fugaku_megatron.layout_check.recorder import Piece, assembled
from fugaku_megatron.run.check_layout import LayoutDiffers, check_run_layout
from tests.helpers import DROPOUT, run_layout

Ranks = list[list[Piece]]
Tensors = Mapping[Point, Tensor]


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


@dataclass
class Checked:
    """A layout's problem, "" for none, and its tensors by number format."""

    problem: str = ""
    formats: list[Compared] = field(default_factory=list)

    def first_change(self, before: Checked) -> Point | None:
        """Return the first tensor that differs from that of the original program, in the first number format with one."""
        pairs = zip(self.formats, before.formats, strict=False)
        changes = (own.first_change(original) for own, original in pairs)
        return next(filter(None, changes), None)


def check_once(layout: str, flags: dict[str, Any]) -> Checked:
    """Check a layout. Errors of the program are raised."""
    torch.set_num_threads(1)
    checked = Checked()

    def work(world: Comm, run: Any) -> str:
        try:
            check_run_layout(run, world, NO_FILES)
        except LayoutDiffers as error:
            return str(error)
        return ""

    with pytest.MonkeyPatch.context() as patch:
        _keep_tensors(checked, patch)
        checked.problem = run_layout(layout, work, {**DROPOUT, **flags})[0]
    return checked


def _keep_tensors(checked: Checked, patch: pytest.MonkeyPatch) -> None:
    """Copy the tensors of every comparison to `checked`."""
    compare_alone = check._compare_alone

    def compared(
        small: Plan, ranks: Ranks, comparison: Comparison, build: Build, directory: Any
    ) -> str | None:
        alone: dict[Point, Tensor] = {}
        checked.formats.append(Compared(comparison.tolerance, ranks, alone))
        check_complete = comparison.check_complete

        def completed(reference: Tensors) -> None:
            alone.update(reference)
            check_complete(reference)

        comparison.check_complete = completed  # type: ignore[method-assign]
        return compare_alone(small, ranks, comparison, build, directory)

    patch.setattr(check, "_compare_alone", compared)
