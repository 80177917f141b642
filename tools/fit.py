"""Fit the model's parameters to the published tables, and print its errors on them and on parts that were left out of the fit.

Times and memory are fitted separately, one set of parameters for each group of software; fitted.json holds values and intervals.

    python -m tools.fit --output fitted.json

It needs scipy (requirements-test.txt).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from fugaku_megatron.cli.output_files import check_file, writing
from fugaku_megatron.config.layout import Layout
from fugaku_megatron.config.run_config import RunConfig
from fugaku_megatron.planner import model, peak_memory
from fugaku_megatron.planner.software import FITTED, MemoryParameters, Parameters
from fugaku_megatron.planner.system import System
from fugaku_megatron.reproduction.rows import Row, known, load, row_system
from fugaku_megatron.text.named_files import JsonObject
from fugaku_megatron.text.numbers import rounded
from fugaku_megatron.text.written_files import named_file

PRIORS_FILE = Path(__file__).parent / "priors.json"


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Knowledge before the fit. spread: the logarithm's standard deviation."""

    name: str
    unit: str
    meaning: str
    prior: float
    spread: float
    bounds: tuple[float, float]
    source: str


def priors_of(kind: str) -> dict[str, tuple[Prior, ...]]:
    groups = json.loads(PRIORS_FILE.read_text())[kind]
    return {
        group: tuple(Prior(**{**row, "bounds": tuple(row["bounds"])}) for row in rows)
        for group, rows in groups.items()
    }


PRIORS = priors_of("time")
MEMORY_PRIORS = priors_of("memory")
HUBER = 1.5  # residuals beyond this many standard deviations count linearly
FLOOR = 1e-6  # lower bound of parameters whose own bound is 0, which has no logarithm
ENOUGH = 1e-5  # the iteration ends when the sum of squares falls by less than this share

Values = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Optimal values; covariance of logarithms in the priors' order."""

    values: Values
    covariance: np.ndarray
    residuals: np.ndarray  # logarithms of predicted / observed


def solve(
    predict: Callable[[Values], Sequence[float]],
    observed: Sequence[float],
    priors: Sequence[Prior],
    noise: float,
    start: Values | None = None,
) -> Solution:
    """Return the most probable values for independent log-normal errors with deviation `noise`.

    start: by default the priors'
    """
    target = np.log(np.asarray(observed, float))
    low = np.log([max(p.bounds[0], FLOOR) for p in priors])
    high = np.log([p.bounds[1] for p in priors])
    centre = np.log([p.prior for p in priors])
    spread = np.array([p.spread for p in priors])

    def values(x: np.ndarray) -> Values:
        return {p.name: float(np.exp(v)) for p, v in zip(priors, x)}

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = np.log(np.asarray(predict(values(x)), float)) - target
        return np.concatenate([errors / noise, (x - centre) / spread])

    def loss(squares: np.ndarray) -> np.ndarray:
        """Return Huber's loss of the rows and the squares of the priors, with derivatives.

        The second derivative is left out: the Jacobian's square is then the Hessian with Huber's weights.
        """
        size = np.sqrt(squares)
        is_far = size > HUBER
        is_far[len(target) :] = False
        size = np.maximum(size, HUBER)
        value = np.where(is_far, 2 * HUBER * size - HUBER**2, squares)
        slope = np.where(is_far, HUBER / size, 1.0)
        return np.stack([value, slope, np.zeros_like(slope)])

    x = np.log([start[p.name] for p in priors]) if start else centre
    found = least_squares(
        residuals,
        np.clip(x, low, high),
        bounds=(low, high),
        method="dogbox",
        loss=loss,
        ftol=ENOUGH,
    )
    return Solution(
        values=values(found.x),
        covariance=np.linalg.inv(found.jac.T @ found.jac),
        residuals=found.fun[: len(target)] * noise,
    )


# standard deviations of the logarithm of a row: campaigns differ by 5 to 13 %
TIME_NOISE = 0.06
MEMORY_NOISE = 0.06
HEADS_TABLES = (
    "004.21",
    "004.22",
    "004.23",
    "004.24",
)  # tables that vary the number of heads, not the layout
OVERFULL = ("001.1", 24)  # "OOM after first epoch": this run has a time, but ran out of memory


@dataclass(frozen=True, kw_only=True)
class Error:
    """Relative errors. inside: share within the predicted band, None if not counted."""

    name: str
    rows: int
    mean: float
    worst: float
    bias: float
    inside: float | None = None

    @staticmethod
    def from_predictions(
        name: str,
        predicted: Sequence[float],
        observed: Sequence[float],
        inside: float | None = None,
    ) -> Error:
        """Return the errors of predictions relative to observed values."""
        relative = np.asarray(predicted, float) / np.asarray(observed, float) - 1
        return Error(
            name=name,
            rows=len(relative),
            mean=float(np.abs(relative).mean()),
            worst=float(np.abs(relative).max()),
            bias=float(relative.mean()),
            inside=inside,
        )


def _many_ranks(row: Row) -> bool:
    return row.machine == "a64fx" and row.ranks > row.nodes


def _recomputed_further(row: Row) -> bool:
    return row.document == "005" and row.recompute


def _tp_between_nodes(row: Row) -> bool:
    return row.machine == "a64fx" and row.tp > 1 and row.ranks == row.nodes


Case = tuple[RunConfig, Layout, System]
# group -> (name, rows) of the errors in sample
SHOWN: dict[str, tuple[tuple[str, Callable[[Row], bool]], ...]] = {
    "a64fx": (
        ("30B (document 001)", lambda r: r.document == "001"),
        ("124M (documents 000, 002)", lambda r: r.document in ("000", "002")),
        ("124M, PyTorch 1.7 (000)", lambda r: r.document == "000"),
        ("124M, tcmalloc (002)", lambda r: r.document == "002"),
        ("1.3B, TP 4 (005.1)", lambda r: r.table.id == "005.1"),
        ("124M, 4 ranks a node (005.2, 005.3)", _many_ranks),
        ("1.3B and 13B, full recompute (005.4, 005.5)", _recomputed_further),
        ("TP between nodes", _tp_between_nodes),
        ("all", lambda r: True),
    ),
    "a100": (
        (
            "topology, micro-batch, TP (02-20 to 02-25)",
            lambda r: r.table.id not in HEADS_TABLES and r.notes >= "02-20",
        ),
        ("number of heads (02-23, 02-24)", lambda r: r.table.id in HEADS_TABLES),
        ("all", lambda r: True),
    ),
}
# group -> (name, rows) of the parts that are left out of the fit and then predicted
PARTS: dict[str, tuple[tuple[str, Callable[[Row], bool]], ...]] = {
    "a64fx": (
        ("TP 6 from TP 4 (001.2)", lambda r: r.tp == 6),
        ("TP 8 from TP 4 and 6", lambda r: r.tp == 8),
        ("TP from rows without it", lambda r: r.tp > 1),
        ("64-512 nodes from 1 (000)", lambda r: r.document == "000" and r.nodes > 1),
        ("MBS 2 and 4 from MBS 1 (000)", lambda r: r.mbs > 1),
        ("document 000", lambda r: r.document == "000"),
        ("document 001", lambda r: r.document == "001"),
        ("document 002", lambda r: r.document == "002"),
        ("1.3B, TP 4 (005.1)", lambda r: r.table.id == "005.1"),
        ("124M, 4 ranks a node (005.2, 005.3)", _many_ranks),
        ("1.3B and 13B, full recompute (005.4, 005.5)", _recomputed_further),
        ("1.3B, TP 2 (005.4)", lambda r: r.tp == 2),
        ("13B, TP 20 (005.5)", lambda r: r.tp == 20),
        ("document 005", lambda r: r.document == "005"),
    ),
    "a100": (
        ("TP 2 and 4 from TP 8", lambda r: r.tp < 8),
        ("h 14400 from the others", lambda r: r.hidden == 14400),
        ("02-25 from the days before", lambda r: r.notes >= "02-25"),
    ),
}


def cases(rows: Sequence[Row]) -> list[Case]:
    result = []
    for row in rows:
        system = row_system(row)
        run = system.software.cut(row.run())
        result.append((run, Layout.from_run(run, system.world_size), system))
    return result


def seconds(row_cases: Sequence[Case], values: Values) -> list[float]:
    return [model.step(*case, Parameters(**values)).seconds for case in row_cases]


def fit_time(group: str, rows: Sequence[Row], start: Values | None = None) -> Solution:
    row_cases = cases(rows)
    return solve(
        lambda values: seconds(row_cases, values),
        [known(r.seconds) for r in rows],
        PRIORS[group],
        TIME_NOISE,
        start,
    )


def mib(row_cases: Sequence[Case], values: Values) -> list[float]:
    parameters = MemoryParameters(**{"peer_mib": 0.0, **values})
    return [
        peak_memory.peak_mib(run, layout, system, parameters) for run, layout, system in row_cases
    ]


def fit_memory(group: str, rows: Sequence[Row]) -> Solution:
    row_cases = cases(rows)
    observed = [known(r.memory_mib) for r in rows]
    return solve(
        lambda values: mib(row_cases, values), observed, MEMORY_PRIORS[group], MEMORY_NOISE
    )


def time_rows(group: str) -> list[Row]:
    return [r for r in load() if r.machine == group and r.fit_time]


def leave_out(
    group: str, name: str, part: Callable[[Row], bool], start: Values | None = None
) -> Error:
    """Fit without some rows and return the error of their prediction."""
    rows = time_rows(group)
    left = [r for r in rows if part(r)]
    kept = [r for r in rows if not part(r)]
    solution = fit_time(group, kept, start)
    predicted = seconds(left_cases := cases(left), solution.values)
    parameters = Parameters(**solution.values)
    names = tuple(solution.values)
    seen = tensor_parallel(kept)
    noise = max(rms(solution.residuals), model.NOISE_FLOOR)
    covariance = solution.covariance.tolist()
    widths = [
        model.BAND * model.deviation(case, parameters, names, covariance, noise, seen)
        for case in left_cases
    ]
    inside = sum(
        abs(np.log(known(r.seconds) / value)) <= width
        for r, value, width in zip(left, predicted, widths, strict=True)
    )
    return Error.from_predictions(
        name, predicted, [known(r.seconds) for r in left], inside / len(left)
    )


def rms(residuals: np.ndarray) -> float:
    return float(np.sqrt((residuals**2).mean()))


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    return float(spearmanr(a, b).statistic)


def wrong_ooms(group: str, values: Values) -> tuple[list[str], int]:
    """Return (wrong predictions, compared rows)."""
    rows = [
        r for r in load() if r.machine == group and r.status in ("ran", "oom") and not r.problem()
    ]
    row_cases = cases(rows)
    wrong = []
    for row, (_, _, system), mib_used in zip(rows, row_cases, mib(row_cases, values)):
        fails = row.status == "oom" or (row.table.id, row.line) == OVERFULL
        if fails != (mib_used > system.limit_mib):
            wrong.append(f"{row.table.id} line {row.line} ({mib_used:.0f} MiB)")
    return wrong, len(rows)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Fitted parameters of a group with their errors."""

    group: str
    time: Solution
    memory: Solution
    in_sample: tuple[Error, ...]
    left_out: tuple[Error, ...]
    memory_error: Error
    wrong_ooms: tuple[str, ...]
    oom_rows: int
    spearman: float
    ranges: dict[str, tuple[float, float]]


def make_report(group: str) -> Report:
    """Fit a group's time and memory, and again without each part."""
    rows = time_rows(group)
    time = fit_time(group, rows)
    predicted = seconds(cases(rows), time.values)
    pairs = list(zip(rows, predicted))
    in_sample = tuple(
        Error.from_predictions(
            name, [p for r, p in pairs if part(r)], [known(r.seconds) for r in rows if part(r)]
        )
        for name, part in SHOWN[group]
    )
    first = SHOWN[group][0][1]
    used_rows = [r for r in load() if r.machine == group and r.fit_memory]
    used = fit_memory(group, used_rows)
    wrong, judged = wrong_ooms(group, used.values)
    return Report(
        group=group,
        time=time,
        memory=used,
        in_sample=in_sample,
        left_out=tuple(leave_out(group, name, part, time.values) for name, part in PARTS[group]),
        memory_error=Error.from_predictions(
            "memory", mib(cases(used_rows), used.values), [known(r.memory_mib) for r in used_rows]
        ),
        wrong_ooms=tuple(wrong),
        oom_rows=judged,
        spearman=rank_correlation(
            [p for r, p in pairs if first(r)], [known(r.seconds) for r in rows if first(r)]
        ),
        ranges=_ranges(rows),
    )


def tensor_parallel(rows: Sequence[Row]) -> list[model.TensorParallel]:
    return sorted({place for case in cases(rows) if (place := model.tensor_parallel(*case))})


def _ranges(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    facts = [model.facts(*case) for case in cases(rows)]
    return {
        name: (min(fact[name] for fact in facts), max(fact[name] for fact in facts))
        for name in facts[0]
    }


def as_json(report: Report) -> JsonObject:
    """Return the report as fitted.json has it."""

    def table(solution: Solution, priors: Sequence[Prior]) -> JsonObject:
        spread = np.sqrt(np.diag(solution.covariance))
        return {
            p.name: {
                "value": value,
                "low": float(value * np.exp(-1.645 * s)),
                "high": float(value * np.exp(1.645 * s)),
                "unit": p.unit,
                "meaning": p.meaning,
            }
            for p, value, s in zip(priors, solution.values.values(), spread)
        }

    fitted = {
        "parameters": table(report.time, PRIORS[report.group]),
        "memory": table(report.memory, MEMORY_PRIORS[report.group]),
        "covariance": report.time.covariance.tolist(),
        "noise": rms(report.time.residuals),
    }
    return {
        **rounded(fitted, 5),
        "ranges": report.ranges,
        "tensor_parallel": tensor_parallel(time_rows(report.group)),
        "errors": {e.name: round(100 * e.mean, 2) for e in report.in_sample},
        "left_out_errors": {e.name: round(100 * e.mean, 2) for e in report.left_out},
        "memory_error": round(100 * report.memory_error.mean, 2),
        "spearman": round(report.spearman, 4),
    }


def text(report: Report) -> str:
    """Return the report's parameters and errors as lines."""
    lines = [
        f"\n{report.group}: parameters (interval that should hold nine of ten: low to high; prior)"
    ]
    described = as_json(report)
    for kind, priors in (("parameters", PRIORS), ("memory", MEMORY_PRIORS)):
        for p in priors[report.group]:
            v = described[kind][p.name]
            lines.append(
                f"  {p.name:<21}{v['value']:>9.4g} {p.unit:<19}{v['low']:>9.4g} to {v['high']:<9.4g}"
                f"({p.prior:g})  {p.meaning}"
            )
    lines.append(
        f"{report.group}: error of seconds per iteration, per cent        rows   mean  worst   bias  inside band"
    )
    for title, errors in (("in sample", report.in_sample), ("left out ", report.left_out)):
        for e in errors:
            inside = "" if e.inside is None else f"{100 * e.inside:>8.0f} %"
            lines.append(f"  {title}  {_columns(e)}{inside}")
    left = sum(e.rows for e in report.left_out)
    worst = max(e.mean for e in report.left_out)
    held = round(sum(e.rows * (e.inside or 0.0) for e in report.left_out))
    lines.append(
        f"  left out   all parts: mean errors up to {100 * worst:.1f} per cent, {held} of {left} rows "
        f"({100 * held / left:.0f} per cent) inside the band"
    )
    m = report.memory_error
    lines.append(f"  in sample  {_columns(m)}")
    lines.append(
        f"  out of memory or not: {report.oom_rows - len(report.wrong_ooms)} of {report.oom_rows} rows right"
        + (f"; wrong: {', '.join(report.wrong_ooms)}" if report.wrong_ooms else "")
    )
    lines.append(
        f"  rank correlation (Spearman) of {report.in_sample[0].name}: {report.spearman:.3f}"
    )
    return "\n".join(lines)


def _columns(e: Error) -> str:
    return f"{e.name:<44}{e.rows:>6}{100 * e.mean:>7.1f}{100 * e.worst:>7.1f}{100 * e.bias:>+7.1f}"


def main(words: Sequence[str] | None = None) -> int:
    """Fit all groups, print the reports and write --output."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=FITTED,
        metavar="FILE",
        help="where values go (default: the package's own)",
    )
    output = parser.parse_args(words).output
    check_file("--output", output)
    data = {}
    for group in PRIORS:
        print(
            f"fitting {group}, and again without each of {len(PARTS[group])} parts", file=sys.stderr
        )
        report = make_report(group)
        print(text(report), flush=True)
        data[group] = as_json(report)
    with writing("--output", output), open(output, "w", opener=named_file) as file:
        file.write(json.dumps(data, indent=1) + "\n")
    print(f"\nwrote {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
