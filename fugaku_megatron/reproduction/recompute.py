"""TFLOPs of a benchmark row recomputed from its time, and whether they agree with the printed ones.

Formulas: `accounting`. The tables round times to the digits they show, and TFLOPs to two digits; x.xx5 is the mean of two logged
values of two digits each, so every printed TFLOPs has an error of up to 0.005. PetaFLOPs are TFLOPs x nodes / 1024 (erratum R6),
rounded to the digits they show; document 002 truncates instead.
"""

from __future__ import annotations

from ..costs import accounting
from .rows import Row

TFLOPS_ROUNDING = 0.005
_SLACK = 1e-9  # for rounding errors of binary fractions


def flops(row: Row) -> float:
    """FLOPs of one iteration over all ranks, by the formula that the row's table used."""
    if row.formula == "parameter":
        return accounting.parameter_flops(row.run(), row.gbs, replicas=True)
    return accounting.hardware_flops(row.run(), row.gbs)


def tflops(row: Row, seconds: float) -> float:
    """TFLOPs per node (A64FX) or GPU (A100) of an iteration that takes `seconds`."""
    return flops(row) / seconds / row.devices / 1e12


def unit(cell: str) -> float:
    """The value of one step in the last printed digit."""
    return 10.0 ** -len(cell.partition(".")[2])


def interval(row: Row) -> tuple[float, float]:
    """The smallest and largest TFLOPs that agree with the corrected time, which is known to its last digit only."""
    assert row.seconds is not None
    half = unit(row.corrected("seconds")) / 2
    return tflops(row, row.seconds + half), tflops(row, row.seconds - half)


def agrees(row: Row, printed: float) -> bool:
    """Whether the `printed` TFLOPs agree with the corrected time within the tables' rounding."""
    low, high = interval(row)
    return low - TFLOPS_ROUNDING - _SLACK <= printed <= high + TFLOPS_ROUNDING + _SLACK


def petaflops(row: Row) -> float | None:
    """PetaFLOPs (1000 TFLOPs each) of all ranks from the corrected TFLOPs; None where none were printed."""
    return None if row.petaflops is None or row.tflops is None else row.tflops * row.devices / 1000


def finding(row: Row) -> str:
    """How recomputed and printed TFLOPs compare: "equal", "erratum" (equal when corrected), "unexplained", or "" (no values)."""
    if row.seconds is None or row.tflops is None:
        return ""
    if not agrees(row, row.tflops):
        return "unexplained"
    seconds, printed = row.corrected("seconds") == row.cell("seconds"), row.corrected("tflops") == row.cell("tflops")
    return "equal" if printed and (seconds or not row.cell("seconds")) else "erratum"
