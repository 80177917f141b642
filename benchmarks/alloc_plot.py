"""`benchmarks alloc` as a picture: seconds per iteration of each allocator, a panel for each combination of kernels and recompute.

Test: pytest tests/test_benchmarks.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from fugaku_megatron.run.outputs import writing


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw bars into the PNG file `path`. Raises ValueError when it cannot be written. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    panels = {key: list(rows) for key, rows in groupby(result["rows"], lambda r: (r["kernels"], r["recompute"]))}
    figure = Figure(figsize=(max(7, 4.5 * len(panels)), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for (key, rows), axes in zip(panels.items(), figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        _panel(axes, rows)
        axes.set(title=f"{key[0]} kernels, recompute {key[1]}", xlabel="ranks", ylabel="seconds per iteration")
    figure.axes[0].legend(fontsize="small")
    figure.suptitle(f"{result['recipe']} {result['dtype']}, micro-batch {result['micro_batch_size']}, global batch "
                    f"{result['global_batch_size']}\nmeasured, {result['cpu']}, {result['clock_ghz']:.2f} GHz")
    with writing("--png", path):
        figure.savefig(path, dpi=110, format="png")


def _panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Bars side by side for each number of ranks; above each bar the speed-up over the stock allocator."""
    names, ranks = list(dict.fromkeys(r["allocator"] for r in rows)), list(dict.fromkeys(r["ranks"] for r in rows))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [r for r in rows if r["allocator"] == name]
        places = [ranks.index(r["ranks"]) + (number - (len(names) - 1) / 2) * width for r in mine]
        bars = axes.bar(places, [r["seconds"] for r in mine], width, label=name)
        axes.bar_label(bars, [f"{r['ratio']:.2f}x" if r["ratio"] else "" for r in mine], fontsize="x-small", rotation=90, padding=3)
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks])
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
