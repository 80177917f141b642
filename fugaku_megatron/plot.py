"""A picture of a run: loss (training, validation) over iterations, with small panels for learning rate and TFLOPs.

Test: pytest tests/test_plot.py
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from .metrics import read_history


def loss_curve(path_png: str | os.PathLike, history: list[dict[str, Any]] | str | os.PathLike) -> bool:
    """Draw a history (its records, or the path of its file) into `path_png`.

    Returns False, and prints one line saying why, if there is nothing to draw or matplotlib is missing: no run fails
    by it.
    """
    records = history if isinstance(history, list) else read_history(history)
    train = [r for r in records if r["kind"] == "train" and r.get("lm_loss") is not None]
    validation = [r for r in records if r["kind"] == "validation"]
    if not train and not validation:
        print(f"{path_png}: not drawn, the history has no loss yet")
        return False
    if importlib.util.find_spec("matplotlib") is None:
        print(f"{path_png}: not drawn, a package is missing: pip install matplotlib")
        return False
    _draw(path_png, train, validation)
    return True


def _draw(path_png: str | os.PathLike, train: list[dict[str, Any]], validation: list[dict[str, Any]]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(3, 1))
    loss = figure.add_subplot(grid[0, :])
    _line(loss, train, "lm_loss", label="training")
    _line(loss, validation, "lm_loss", label="validation", marker="o")
    loss.set(xlabel="iteration", ylabel="lm loss")
    loss.legend()
    for column, (name, label) in enumerate((("learning_rate", "learning rate"), ("tflops", "TFLOPs per rank"))):
        panel = figure.add_subplot(grid[1, column])
        _line(panel, train, name)
        panel.set(xlabel="iteration", ylabel=label)
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(path_png, dpi=120, format="png")


def _line(axes: Any, records: list[dict[str, Any]], name: str, **style: Any) -> None:
    points = [(record["iteration"], record[name]) for record in records if record.get(name) is not None]
    if points:
        axes.plot(*zip(*points), **style)
