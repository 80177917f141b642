"""Benchmark tables as a picture: time and TFLOPs against nodes, and modelled against printed time.

Test: pytest tests/test_perf_tables.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..published.rows import DOCUMENTS
from ..run.outputs import writing
from .comparison import Comparison

# Fields in which rows of one document differ -> their text in the legend.
_TRAITS: dict[str, Callable[[Any], str]] = {
    "software": str, "recompute": lambda on: "AC" if on else "no AC", "seq": "s {}".format, "tp": "TP {}".format,
    "mbs": "MBS {}".format, "gbs": "GBS {}".format, "ghz": "{} GHz".format,
}
_GPU_TRAITS = ("tp", "mbs")  # the GPU tables vary in too many fields for a colour each


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw one row of panels per document into the PNG file `path`. Raises ValueError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    documents = [d for d in DOCUMENTS if any(c.row.document == d for c in comparisons)]
    figure = Figure(figsize=(17, 4.8 * len(documents)), layout="constrained")
    FigureCanvasAgg(figure)
    for document, panels in zip(documents, figure.subplots(len(documents), 3, squeeze=False)):
        _draw_document(document, panels, [c for c in comparisons if c.row.document == document and c.row.duplicate_of is None])
    with writing("--png", path):
        figure.savefig(path, dpi=110, format="png")


def _draw_document(document: str, panels: Sequence[Any], comparisons: Sequence[Comparison]) -> None:
    from matplotlib.ticker import NullFormatter

    time, speed, parity = panels
    for number, (name, members) in enumerate(sorted(_series(comparisons).items())):
        style = {"color": f"C{number % 10}", "markerfacecolor": "none" if number > 9 else None}
        _line(time, members, lambda c: c.row.seconds, lambda c: c.prediction and c.prediction.seconds, **style)
        _line(speed, members, lambda c: c.row.tflops, lambda c: c.model_tflops, **style)
        points = [(c.row.seconds, c.prediction.seconds) for c in members if c.time_error_percent is not None]
        parity.plot(*(zip(*points) if points else ([], [])), marker="o", linestyle="none", label=name, **style)
    unit = "GPU" if comparisons[0].row.machine == "a100" else "node"
    title = f"{document}: {DOCUMENTS[document][1]}"
    time.set(xscale="log", yscale="log", xlabel="nodes", ylabel="seconds per iteration", title=title)
    speed.set(xscale="log", xlabel="nodes", ylabel=f"TFLOPs per {unit}", title="o printed    x model")
    _diagonal(parity, comparisons)
    parity.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="x-small")
    for axes in panels:
        axes.grid(alpha=0.3)
    parity.xaxis.set_minor_formatter(NullFormatter())  # they would overlap


def _series(comparisons: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """Name in the legend -> the comparisons that share these traits, by number of nodes."""
    fields = [f for f in _TRAITS if len({getattr(c.row, f) for c in comparisons}) > 1]
    if comparisons[0].row.machine == "a100":
        fields = [f for f in fields if f in _GPU_TRAITS]
    series: dict[str, list[Comparison]] = {}
    for comparison in sorted(comparisons, key=lambda c: c.row.nodes):
        if comparison.row.seconds is not None or comparison.prediction is not None:
            table = () if comparison.row.machine == "a100" else (comparison.row.table.id,)
            name = ", ".join([*table, *(_TRAITS[f](getattr(comparison.row, f)) for f in fields)])
            series.setdefault(name, []).append(comparison)
    return series


def _line(axes: Any, members: Sequence[Comparison], printed: Any, modelled: Any, **style: Any) -> None:
    joined = "none" if members[0].row.machine == "a100" else "--"  # rows of one colour there differ in more than their nodes
    for value, look in ((printed, {"marker": "o", "linestyle": "none"}), (modelled, {"marker": "x", "linestyle": joined})):
        points = [(c.row.nodes, value(c)) for c in members if value(c) is not None]
        if points:
            axes.plot(*zip(*points), **style, **look)


def _diagonal(axes: Any, comparisons: Sequence[Comparison]) -> None:
    """The line on which modelled and printed times agree, and a band of 10 % around it."""
    times = [c.row.seconds for c in comparisons if c.row.seconds is not None]
    if times:
        ends = [min(times), max(times)]
        axes.plot(ends, ends, color="grey", linewidth=0.8)
        axes.fill_between(ends, [0.9 * t for t in ends], [1.1 * t for t in ends], color="grey", alpha=0.2)
    axes.set(xscale="log", yscale="log", xlabel="printed seconds", ylabel="modelled seconds",
             title="band: 10 %" if any(c.prediction for c in comparisons) else "no model")
