"""A printed benchmark row beside what is computed for it: TFLOPs recomputed from its time, and the modelled time and memory.

Left out: the model (model.py), formulas (run/accounting.py).
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..published import recompute
from ..published.rows import Row

NO_MODEL = "no model"
_STATUS_REMARKS = {"ran": "", "planned": "planned: model only", "oom": "out of memory", "failed": "failed",
                   "impossible": "impossible"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A row and what is computed for it. prediction: what model.predict_row returned; if None, `problem` says why."""

    row: Row
    prediction: Any
    problem: str

    @property
    def recomputed(self) -> float | None:
        """TFLOPs per rank of the corrected time; None without a time."""
        return None if self.row.seconds is None else recompute.tflops(self.row, self.row.seconds)

    @property
    def model_tflops(self) -> float | None:
        """TFLOPs per rank that the modelled time gives by the formula the row's table used."""
        return None if self.prediction is None else recompute.tflops(self.row, self.prediction.seconds)

    @property
    def time_error_percent(self) -> float | None:
        """Difference of the modelled from the corrected time, in per cent of the latter; None where one of them is missing."""
        known = self.prediction is not None and self.row.seconds is not None
        return 100 * (self.prediction.seconds / self.row.seconds - 1) if known else None

    @property
    def memory_error_percent(self) -> float | None:
        """Difference of the modelled from the printed memory of the rank that uses most, in per cent; None for runs that failed."""
        known = self.prediction is not None and self.row.memory_mib is not None and self.row.status == "ran"
        return 100 * (self.prediction.memory_mib_max / self.row.memory_mib - 1) if known else None

    def corrections(self) -> dict[str, str]:
        """Column -> the cell as it should have been printed; only errata that name this row, not those of a whole table."""
        return {e.column: e.corrected for e in self.row.errata if e.line is not None and e.corrected}

    def remarks(self) -> list[str]:
        """What happened to the run, and the ids of the errata that name this row."""
        remarks = [_STATUS_REMARKS[self.row.status]]
        if self.prediction is not None and self.prediction.oom:
            remarks.append("model: out of memory")
        if self.row.duplicate_of is not None:
            remarks.append(f"as line {self.row.duplicate_of}")
        return [part for part in remarks if part] + list(dict.fromkeys(e.id for e in self.row.errata if e.line is not None))


def predictor() -> Callable[[Row], Any] | None:
    """model.predict_row, or None while there is no model."""
    if importlib.util.find_spec(f"{__package__}.model") is None:
        return None
    from .model import predict_row

    return predict_row


def compare(rows: Sequence[Row], predict: Callable[[Row], Any] | None) -> list[Comparison]:
    """Compute everything for `rows`; a row that cannot be modelled says why."""
    return [_compare(row, predict) for row in _with_progress(rows)]


def _with_progress(rows: Sequence[Row]) -> Iterable[Row]:
    """The rows, with a bar if stderr is a terminal and tqdm is installed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return rows
    from tqdm import tqdm

    return tqdm(rows, unit="row", leave=False)


def _compare(row: Row, predict: Callable[[Row], Any] | None) -> Comparison:
    problem = row.problem() or ("" if predict else NO_MODEL)
    if problem:
        return Comparison(row=row, prediction=None, problem=problem)
    try:
        return Comparison(row=row, prediction=predict(row), problem="")
    except ValueError as error:
        return Comparison(row=row, prediction=None, problem=str(error))
