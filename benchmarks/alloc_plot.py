"""`benchmarks alloc` as a picture: seconds per iteration of each allocator, a panel for each combination of kernels and recompute.

All panels have the same axis and one legend, below them. Test: pytest tests/test_alloc_plot.py
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fugaku_megatron.run.outputs import writing


def draw(path: Path, result: dict[str, Any]) -> None:
    """Draw bars into the PNG file `path`. Raises ValueError when it cannot be written. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    panels = {key: list(rows) for key, rows in groupby(result["rows"], lambda r: (r["kernels"], r["recompute"]))}
    names = list(dict.fromkeys(r["allocator"] for r in result["rows"]))
    figure = Figure(figsize=(max(7, 4.5 * len(panels)), 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (key, rows), axes in zip(panels.items(), columns, strict=True):
        _panel(axes, rows, {name: f"C{number % 10}" for number, name in enumerate(names)})
        axes.set(title=f"{key[0]} kernels, recompute {key[1]}", xlabel="ranks")
    columns[0].set_ylabel("seconds per iteration")
    figure.legend(*_handles(columns), loc="outside lower center", ncols=len(names), fontsize="small", frameon=False)
    figure.suptitle(f"{result['recipe']} {result['dtype']}, micro-batch {result['micro_batch_size']}, global batch "
                    f"{result['global_batch_size']}\nmeasured, {result['cpu']}, {result['clock_ghz']:.2f} GHz")
    with writing("--png", path):
        figure.savefig(path, dpi=110, format="png")


def _handles(columns: Sequence[Any]) -> tuple[list[Any], list[str]]:
    """The bars and names of every allocator of any panel, each once: what a legend of the whole figure takes."""
    named = {name: bars for axes in columns for bars, name in zip(*axes.get_legend_handles_labels())}
    return list(named.values()), list(named)


def _panel(axes: Any, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Bars side by side for each number of ranks; above each bar the speed-up over the stock allocator."""
    ranks = list(dict.fromkeys(r["ranks"] for r in rows))
    names = [name for name in colors if any(r["allocator"] == name for r in rows)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [r for r in rows if r["allocator"] == name]
        places = [ranks.index(r["ranks"]) + (number - (len(names) - 1) / 2) * width for r in mine]
        bars = axes.bar(places, [r["seconds"] for r in mine], width, label=name, color=colors[name])
        axes.bar_label(bars, [f"{r['ratio']:.2f}x" if r["ratio"] else "" for r in mine], fontsize="x-small", rotation=90, padding=3)
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks])
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
