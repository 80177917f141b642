"""`benchmarks tables` as a picture: measured and modelled seconds per iteration, a pair of bars for every row.

Test: pytest tests/test_benchmark_tables.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fugaku_megatron.run.outputs import writing

from . import tables_text


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw bars into the PNG file `path`. Raises ValueError when it cannot be written. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(9, 1.5 + 0.36 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes, places = figure.subplots(), range(len(rows))
    axes.barh([p - 0.2 for p in places], [r["seconds"] for r in rows], 0.4, label="measured")
    modelled = axes.barh([p + 0.2 for p in places], [r["model_seconds"] for r in rows], 0.4, label="model")
    axes.bar_label(modelled, [f"{r['time_error_percent']:+.1f} %" for r in rows], fontsize="x-small", padding=3)
    axes.set_yticks(places, [r["name"] for r in rows], fontsize="small")
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.01)
    axes.set(xlabel="seconds per iteration", title=f"{rows[0]['recipe']} fp32, native kernels\n{tables_text.machine(rows)}; model: "
             f"mean error {result['mean_time_error_percent']:.1f} %")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    with writing("--png", path):
        figure.savefig(path, dpi=90, format="png")
