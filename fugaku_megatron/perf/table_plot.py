"""Benchmark tables as a picture: a panel per document with modelled against printed seconds per iteration.

Both axes are logarithmic and alike, so that points on the diagonal are rows that the model meets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..published.rows import DOCUMENTS
from ..run.outputs import writing
from .comparison import Comparison

BAND = 0.1  # part of the printed time: the grey band around the diagonal
MARKERS = "os^Dv"
# The one trait of a document's rows that its colours stand for -> the text in the legend.
_TRAITS: dict[str, Callable[[Any], str]] = {
    "000": lambda row: f"sequence {row.seq}, {row.ghz} GHz",
    "001": lambda row: f"TP {row.tp}",
    "002": lambda row: "tcmalloc" if "tcmalloc" in row.software else "glibc",
    "004": lambda row: f"micro-batch {row.mbs}",
    "005": lambda row: f"TP {row.tp}, {row.ranks // row.nodes} ranks per node",
}


def draw(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Draw a panel per document into the PNG file `path`. Raises ValueError when it cannot be written. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    documents = [d for d in DOCUMENTS if any(c.row.document == d for c in comparisons)]
    columns = min(2, len(documents))
    rows = -(-len(documents) // columns)
    figure = Figure(figsize=(4.6 * columns, 4.6 * rows + 0.4), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(rows, columns)
    for number, document in enumerate(documents):
        panel = figure.add_subplot(grid[divmod(number, columns)])
        _draw_document(document, panel, [c for c in comparisons if c.row.document == document])
    figure.suptitle(f"Published runs: seconds per iteration, modelled against printed; grey: within {BAND:.0%}", fontsize="medium")
    with writing("--png", path):
        figure.savefig(path, dpi=110, format="png")


def _draw_document(document: str, panel: Any, comparisons: Sequence[Comparison]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    pairs = [c for c in comparisons if c.time_error_percent is not None and c.row.fit_time]  # as in the text's summary
    trait = _TRAITS.get(document, lambda row: row.software)
    for number, name in enumerate(sorted({trait(c.row) for c in pairs})):
        points = [(c.row.seconds, c.prediction.seconds) for c in pairs if trait(c.row) == name]
        panel.plot(*zip(*points), linestyle="none", marker=MARKERS[number % len(MARKERS)], markersize=6, alpha=0.75,
                   color=f"C{number % 10}", markeredgecolor="white", markeredgewidth=0.5, label=name)
    panel.set(xscale="log", yscale="log", xlabel="printed, s", ylabel="modelled, s")
    panel.set_title(_title(document, comparisons, pairs), fontsize="medium")
    panel.grid(alpha=0.3)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())  # they would overlap
    if pairs:
        _diagonal(panel, [time for c in pairs for time in (c.row.seconds, c.prediction.seconds)])
        panel.legend(fontsize="small", loc="upper left")


def _title(document: str, comparisons: Sequence[Comparison], pairs: Sequence[Comparison]) -> str:
    """The document's name, how many rows have both times, and the mean error of the model."""
    name = f"{document}: {DOCUMENTS[document][1]}"
    if not pairs:
        return f"{name}\n{sum(c.row.seconds is not None for c in comparisons)} printed times, no model"
    error = sum(abs(c.time_error_percent) for c in pairs) / len(pairs)
    return f"{name}\n{len(pairs)} rows, mean error {error:.1f} %"


def _diagonal(panel: Any, times: Sequence[float]) -> None:
    """The line on which modelled and printed times agree, the band around it, and equal limits."""
    ends = [min(times) / 1.3, max(times) * 1.3]
    panel.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)
    panel.fill_between(ends, [(1 - BAND) * t for t in ends], [(1 + BAND) * t for t in ends], color="grey", alpha=0.2, zorder=0)
    panel.set(xlim=ends, ylim=ends, aspect="equal")
