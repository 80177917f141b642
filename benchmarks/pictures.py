"""The results of alloc.py and tables.py as pictures. Both need matplotlib.

A ValueError names --png where a file cannot be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from fugaku_megatron.cli.output_files import picture


@contextmanager
def _figure(
    path: Path, width: float, height: float, title: str, columns: int = 1
) -> Iterator[list[Any]]:
    """Yield the axes of panels next to each other; write them with one legend below into `path` at the end."""
    with picture(path, width, height, dpi=110) as figure:
        panels = list(figure.subplots(1, columns, squeeze=False, sharey=True)[0])
        yield panels
        named = {
            name: handle
            for axes in panels
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(
            list(named.values()),
            list(named),
            loc="outside lower center",
            ncols=min(len(named), 5),
            fontsize="small",
            frameon=False,
        )
        figure.suptitle(title)


def draw_allocators(path: Path, result: dict[str, Any]) -> None:
    """Draw bars of seconds, a panel for each combination of kernels and recompute. ValueError when `path` cannot be written."""
    panels = {
        key: list(rows)
        for key, rows in groupby(result["rows"], lambda r: (r["kernels"], r["recompute"]))
    }
    colors = {
        name: f"C{number % 10}"
        for number, name in enumerate(dict.fromkeys(r["allocator"] for r in result["rows"]))
    }
    title = (
        f"{result['recipe']} {result['dtype']}, micro-batch {result['micro_batch_size']}, global batch "
        f"{result['global_batch_size']}\nmeasured, {result['cpu']}, {result['clock_ghz']:.2f} GHz"
    )
    with _figure(path, max(7, 4.5 * len(panels)), 5.4, title, len(panels)) as columns:
        for (key, rows), axes in zip(panels.items(), columns, strict=True):
            _bars(axes, rows, colors)
            axes.set(title=f"{key[0]} kernels, recompute {key[1]}", xlabel="ranks")
        columns[0].set_ylabel("seconds per iteration")


def _bars(axes: Any, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    """Draw bars side by side for each number of ranks; above each bar the speed-up over the stock allocator."""
    ranks = list(dict.fromkeys(r["ranks"] for r in rows))
    names = [name for name in colors if any(r["allocator"] == name for r in rows)]
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [r for r in rows if r["allocator"] == name]
        places = [ranks.index(r["ranks"]) + (number - (len(names) - 1) / 2) * width for r in mine]
        bars = axes.bar(places, [r["seconds"] for r in mine], width, label=name, color=colors[name])
        axes.bar_label(
            bars,
            [f"{r['ratio']:.2f}x" if r["ratio"] else "" for r in mine],
            fontsize="x-small",
            rotation=90,
            padding=3,
        )
    axes.set_xticks(range(len(ranks)), [str(r) for r in ranks])
    axes.margins(y=0.15)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def measured_on(result: dict[str, Any]) -> str:
    """Return a line that says where and when `tables` was measured."""
    return f"measured, {result['cpu']}, {result['clock_ghz']:.2f} GHz, {result['date']}"


def draw_tables(path: Path, result: dict[str, Any]) -> None:
    """Draw bars of measured and modelled seconds. ValueError when `path` cannot be written."""
    rows = result["rows"]
    places = range(len(rows))
    title = (
        f"{result['recipe']} fp32, native kernels\n{measured_on(result)}; model: mean error "
        f"{result['mean_time_error_percent']:.1f} %"
    )
    with _figure(path, 9, 1.5 + 0.36 * len(rows), title) as (axes,):
        axes.barh([p - 0.2 for p in places], [r["seconds"] for r in rows], 0.4, label="measured")
        modelled = axes.barh(
            [p + 0.2 for p in places], [r["model_seconds"] for r in rows], 0.4, label="model"
        )
        axes.bar_label(
            modelled,
            [f"{r['time_error_percent']:+.1f} %" for r in rows],
            fontsize="x-small",
            padding=3,
        )
        axes.set_yticks(places, [r["name"] for r in rows], fontsize="small")
        axes.invert_yaxis()
        axes.margins(x=0.1, y=0.01)
        axes.set_xlabel("seconds per iteration")
        axes.grid(axis="x", alpha=0.3)
