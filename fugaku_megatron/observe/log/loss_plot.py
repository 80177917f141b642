"""Loss plots."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from ...cli.output_files import drawing, shown
from ...config.layout import Layout
from ...config.run_config import RunConfig
from ...costs.stages import model_parameters
from ...start.child_program import start_module
from ...text.named_files import JsonObject, StrPath
from ..export.history import read_history
from .iteration_metrics import size_name

WIDTH = 90  # characters of a title
AXES = {"iteration": "iteration", "tokens": "consumed_tokens"}  # x axis -> field of a record
Records = list[JsonObject]
# (field, label); the last two only if energy is measured.
SMALL_PANELS: tuple[tuple[str, str], ...] = (
    ("learning_rate", "learning rate"),
    ("tflops", "TFLOPs per rank"),
    ("watts", "power (W)"),
    ("tokens_per_joule", "tokens per joule"),
)


def describe(run: RunConfig, dp: int) -> str:
    layout = Layout(dp * run.tp * run.pp * run.cp, run.tp, run.pp, dp, cp=run.cp)
    return f"{size_name(model_parameters(run))}, {layout}, {run.precision.name}"


def title(description: str, place: StrPath) -> str:
    path = os.fspath(place)
    if len(path) > WIDTH:
        path = "..." + path[-WIDTH:]
    return "\n".join(filter(None, (description, path)))


def loss_curve(path_png: StrPath, history: Records | StrPath, heading: str = "") -> bool:
    """Plot a history (records or their file) into `path_png`.

    Print one line and return False without a loss or matplotlib, or on a file error: a plot never ends a run.
    """
    try:
        records = history if isinstance(history, list) else read_history(history)
        return loss_curves(path_png, {"": records}, heading)
    except (OSError, ValueError) as error:
        print(f"{path_png}: not drawn, {error}")
        return False


def start_loss_curve(
    path_png: StrPath, history: StrPath, heading: str = ""
) -> subprocess.Popen[Any]:
    """Draw in another process: matplotlib would cost a rank 35 MiB."""
    return start_module("observe.log.loss_plot", os.fspath(path_png), os.fspath(history), heading)


def loss_curves(
    path_png: StrPath,
    runs: Mapping[str, Records],
    heading: str = "",
    x: str = "iteration",
) -> bool:
    """Plot several runs (name -> records) as `loss_curve`. OSError for a file error.

    x: a key of AXES
    """
    drawn = {
        name: (_with_loss(records, "train"), _with_loss(records, "validation"))
        for name, records in runs.items()
    }
    if not any(train or validation for train, validation in drawn.values()):
        print(f"{path_png}: not drawn, the history has no loss yet")
        return False
    if importlib.util.find_spec("matplotlib") is None:
        print(
            f"{path_png}: not drawn, a package is missing: pip install matplotlib, or this package with its extra [log]"
        )
        return False
    loads = None
    if len(runs) == 1:
        for records in runs.values():
            loads = next((r for r in reversed(records) if r["kind"] == "experts"), None)
    _draw(path_png, drawn, heading=heading, x=x, loads=loads)
    return True


def _with_loss(records: Records, kind: str) -> Records:
    return [r for r in records if r["kind"] == kind and r.get("lm_loss") is not None]


def _draw(
    path_png: StrPath,
    runs: Mapping[str, tuple[Records, Records]],
    heading: str,
    x: str,
    loads: JsonObject | None,
) -> None:
    small = SMALL_PANELS
    if not any(r.get("watts") for train, _ in runs.values() for r in train):
        small = SMALL_PANELS[:2]
    rows: list[Any] = [["lm_loss" for _ in small], [field for field, _ in small]]
    heights = [3.0, 1.0]
    if loads is not None:
        rows.append(["loads" for _ in small])
        heights.append(1.5)
    with drawing(path_png, 8, 6 if loads is None else 8) as figure:
        panels = figure.subplot_mosaic(rows, height_ratios=heights)
        losses = panels["lm_loss"]
        for number, (name, (train, validation)) in enumerate(runs.items()):
            color = f"C{number % 10}"  # of a run in every panel
            _line(losses, train, x, "lm_loss", label=shown(name) or "training", color=color)
            _line(
                losses,
                validation,
                x,
                "lm_loss",
                label=None if name else "validation",
                color=color if name else "C1",
                marker="o",
                linestyle="--",
            )
            for field, _ in small:
                _line(panels[field], train, x, field, color=color)
        for field, label in (("lm_loss", "lm loss"), *small):
            panels[field].set(xlabel=x, ylabel=label)
            panels[field].grid(alpha=0.3)
        validated = len(runs) > 1 and any(validation for _, validation in runs.values())
        if losses.get_legend_handles_labels()[0]:
            losses.legend(fontsize="small", title="dashed: validation" if validated else None)
        if loads is not None:  # (layers with experts, e), relative to the mean
            axes = panels["loads"]
            image = axes.imshow(loads["loads"], aspect="auto", interpolation="nearest", vmin=0.0)
            numbers = range(0, len(loads["layers"]), 1 + len(loads["layers"]) // 8)
            axes.set(xlabel="expert", ylabel="layer")
            axes.set_yticks(list(numbers), [loads["layers"][number] for number in numbers])
            figure.colorbar(image, ax=axes, label=f"load at iteration {loads['iteration']}")
        figure.suptitle(shown(heading), fontsize="medium")


def _line(axes: Any, records: Records, x: str, name: str, **style: Any) -> None:
    places = [(record.get(AXES[x]), record.get(name)) for record in records]
    points = [point for point in places if None not in point]
    if points:
        axes.plot(*zip(*points), **style)


if __name__ == "__main__":
    loss_curve(*sys.argv[1:])
