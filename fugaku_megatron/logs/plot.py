"""A picture of runs: loss (training, validation) over iterations, with small panels for learning rate and TFLOPs.

Test: pytest tests/test_plot.py
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from .metrics import read_history

Records = list[dict[str, Any]]


def loss_curve(path_png: str | os.PathLike, history: Records | str | os.PathLike) -> bool:
    """Draw a history (its records, or the path of its file) into `path_png`.

    If there is nothing to draw, if matplotlib is missing, or if a file cannot be read or written, it prints one line that says so
    and returns False: a picture ends no run.
    """
    try:
        return loss_curves(path_png, {"": history if isinstance(history, list) else read_history(history)})
    except (OSError, ValueError) as error:
        print(f"{path_png}: not drawn, {error}")
        return False


def loss_curves(path_png: str | os.PathLike, runs: Mapping[str, Records]) -> bool:
    """As `loss_curve` for several runs (name -> records) in one picture; OSError when the file cannot be written."""
    drawn = {name: (_with_loss(records, "train"), _with_loss(records, "validation")) for name, records in runs.items()}
    if not any(train or validation for train, validation in drawn.values()):
        print(f"{path_png}: not drawn, the history has no loss yet")
        return False
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path_png}: not drawn, a package is missing: pip install matplotlib")
        return False
    _draw(path_png, drawn)
    return True


def _with_loss(records: Records, kind: str) -> Records:
    return [r for r in records if r["kind"] == kind and r.get("lm_loss") is not None]


def _draw(path_png: str | os.PathLike, runs: Mapping[str, tuple[Records, Records]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    loss = figure.add_subplot(grid[0, :])
    for name, (train, validation) in runs.items():
        before = f"{name} " if len(runs) > 1 else ""
        _line(loss, train, "lm_loss", label=f"{before}training")
        _line(loss, validation, "lm_loss", label=f"{before}validation", marker="o")
    loss.set(xlabel="iteration", ylabel="lm loss")
    loss.legend()
    for column, (name, label) in enumerate((("learning_rate", "learning rate"), ("tflops", "TFLOPs per rank"))):
        panel = figure.add_subplot(grid[1, column])
        for train, _ in runs.values():
            _line(panel, train, name)
        panel.set(xlabel="iteration", ylabel=label)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(path_png, dpi=120, format="png")


def _line(axes: Any, records: Records, name: str, **style: Any) -> None:
    points = [(record["iteration"], record[name]) for record in records if record.get(name) is not None]
    if points:
        axes.plot(*zip(*points), **style)
