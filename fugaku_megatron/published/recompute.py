"""TFLOPs of a benchmark row computed again from its time, and whether they are what was printed.

Formulas: `accounting`. How the tables round: times to the digits they show; TFLOPs to two digits, x.xx5 being the mean of two
logged values of two digits each, so every printed TFLOPs stands for +-0.005; PetaFLOPs are TFLOPs x nodes / 1024 (erratum R6)
to the digits they show, in document 002 cut off instead of rounded. Test: pytest tests/test_perf_recompute.py
"""

from __future__ import annotations

from ..run import accounting
from .rows import Row

TFLOPS_ROUNDING = 0.005
_SLACK = 1e-9  # of binary fractions


def flops(row: Row) -> float:
    """FLOPs of one iteration, all ranks, by the formula that the row's table used."""
    if row.formula == "parameter":
        return accounting.parameter_flops(row.run(), row.gbs, replicas=True)
    return accounting.hardware_flops(row.run(), row.gbs)


def tflops(row: Row, seconds: float) -> float:
    """TFLOPs per rank of an iteration that takes `seconds`."""
    return flops(row) / seconds / row.ranks / 1e12


def unit(cell: str) -> float:
    """What one step of a printed number's last digit is worth."""
    return 10.0 ** -len(cell.partition(".")[2])


def interval(row: Row) -> tuple[float, float]:
    """The TFLOPs that the corrected time, known to its last digit only, allows."""
    assert row.seconds is not None
    half = unit(row.corrected("seconds")) / 2
    return tflops(row, row.seconds + half), tflops(row, row.seconds - half)


def agrees(row: Row, printed: float) -> bool:
    """Whether `printed` TFLOPs are what the corrected time gives, both rounded as the tables round."""
    low, high = interval(row)
    return low - TFLOPS_ROUNDING - _SLACK <= printed <= high + TFLOPS_ROUNDING + _SLACK


def petaflops(row: Row) -> float | None:
    """PetaFLOPs of the whole world (1000 tera each) from the corrected TFLOPs; None where none were printed."""
    return None if row.petaflops is None or row.tflops is None else row.tflops * row.ranks / 1000


def petaflops_agree(row: Row) -> bool:
    """Whether the printed PetaFLOPs follow from the printed TFLOPs by the tables' own rule."""
    value, step = float(row.cell("tflops")) * row.nodes / 1024, unit(row.cell("petaflops"))
    low, high = (0, step) if row.document == "002" else (-step / 2, step / 2)
    return row.petaflops + low - _SLACK <= value <= row.petaflops + high + _SLACK


def finding(row: Row) -> str:
    """"equal": TFLOPs as printed; "erratum": as corrected; "": there is nothing to compare; "unexplained" otherwise."""
    if row.seconds is None or row.tflops is None:
        return ""
    if not agrees(row, row.tflops):
        return "unexplained"
    seconds, printed = row.corrected("seconds") == row.cell("seconds"), row.corrected("tflops") == row.cell("tflops")
    return "equal" if printed and (seconds or not row.cell("seconds")) else "erratum"
