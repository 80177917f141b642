"""Pictures of pipeline schedules: modelled and measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ..cli.output_files import writing
from ..pipeline import instructions
from ..pipeline.timeline import Span
from .loss_plot import title
from .trace import measured_memory, measured_spans, read_trace

# (colour, label, operations), in the order of the legend; the colours differ in lightness, too, for readers who see few of them.
KINDS = (
    ("tab:blue", "F forward", (instructions.FORWARD,)),
    ("tab:orange", "B backward", (instructions.BACKWARD,)),
    ("tab:orange", "I gradient of the input", (instructions.BACKWARD_INPUT,)),
    ("tab:green", "W gradient of the weights", (instructions.BACKWARD_WEIGHT,)),
    ("tab:red", "message under way", (instructions.RECV_FORWARD, instructions.RECV_BACKWARD)),
)


IDLE = "gainsboro"


LIGHTEST = 0.45  # how much of its colour a stage's last chunk has


def draw(
    path: str | os.PathLike,
    spans: Sequence[Span],
    memory: Sequence[float],
    heading: str,
    axis: str = "seconds (model)",
) -> None:
    """Write the picture of `spans` as a PNG file. Raises ValueError, naming --png, when it cannot be written.

    memory: MiB of a rank of each stage at its peak; empty where it is not known. Later chunks of a stage are lighter.
    """
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = 1 + max(span.stage for span in spans)
    figure = Figure(figsize=(14, 1.6 + 0.22 * max(6, stages)), layout="constrained")
    FigureCanvasAgg(figure)
    widths = (6, 1) if memory else (1,)
    panels = figure.subplots(1, len(widths), squeeze=False, sharey=True, width_ratios=widths)[0]
    drawn = _bars(panels[0], spans, stages)
    panels[0].set(xlabel=axis, ylabel="stage", ylim=(stages - 0.5, -0.5))
    panels[0].set_title(heading, loc="left", fontsize="medium")
    if memory:
        panels[1].barh(range(stages), memory, height=0.8, color="slategrey")
        panels[1].set(xlabel="MiB of a rank")
    figure.legend(
        handles=[Patch(color=colour, label=label) for colour, label in (*drawn, (IDLE, "idle"))],
        loc="outside lower center",
        ncols=len(KINDS) + 1,
        frameon=False,
        fontsize="small",
    )
    with writing("--png", os.fspath(path)):
        figure.savefig(path, dpi=120, format="png")


def compare(
    path: str | os.PathLike, rows: Sequence[tuple[str, Sequence[Span], Sequence[Span]]]
) -> None:
    """Write pipelines next to one another as a PNG file: a row for each (name, planned spans, measured spans), one axis of seconds.

    Raises ValueError, naming --png, when it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    stages = 1 + max(span.stage for _, planned, _ in rows for span in planned)
    figure = Figure(
        figsize=(16, 0.9 + len(rows) * (0.7 + 0.17 * max(6, stages))), layout="constrained"
    )
    FigureCanvasAgg(figure)
    kinds: dict[str, str] = {}
    for panels, (name, *both) in zip(
        figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey=True), rows, strict=True
    ):
        for axes, spans, origin in zip(panels, both, ("planned", "measured"), strict=True):
            kinds |= {label: colour for colour, label in _bars(axes, spans, stages)}
            axes.set_title(
                f"{name}, {origin}: {max(s.end for s in spans):.2f} s",
                loc="left",
                fontsize="medium",
            )
        panels[0].set(ylabel="stage", ylim=(stages - 0.5, -0.5))
    for axes in panels:
        axes.set(
            xlabel="seconds",
            xlim=(0, max(s.end for _, *both in rows for spans in both for s in spans)),
        )
    figure.legend(
        handles=[
            Patch(color=colour, label=label) for label, colour in {**kinds, "idle": IDLE}.items()
        ],
        loc="outside lower center",
        ncols=len(kinds) + 1,
        frameon=False,
        fontsize="small",
    )
    with writing("--png", os.fspath(path)):
        figure.savefig(path, dpi=110, format="png")


def _bars(axes: Any, spans: Sequence[Span], stages: int) -> list[tuple[str, str]]:
    """Draw every span; returns the (colour, label) of the kinds that there are."""
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    begin, end, chunks = (
        min(s.start for s in spans),
        max(s.end for s in spans),
        1 + max(s.model_chunk for s in spans),
    )
    axes.barh(range(stages), [end - begin] * stages, left=begin, height=0.9, color=IDLE)
    drawn = []
    for colour, label, ops in KINDS:
        for chunk in range(chunks):
            own = [s for s in spans if s.op in ops and s.model_chunk == chunk]
            white = (1 - LIGHTEST) * chunk / max(1, chunks - 1)
            axes.barh(
                [s.stage for s in own],
                [s.end - s.start for s in own],
                left=[s.start for s in own],
                height=0.9,
                color=[white + (1 - white) * part for part in to_rgb(colour)],
                edgecolor="white",
                linewidth=0.2,
            )
        drawn += [(colour, label)] if any(s.op in ops for s in spans) else []
    axes.set_xlim(begin, end)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return drawn


def draw_trace(source: str, png: str) -> None:
    """The schedule of a merged trace as a picture. ValueError when there is none, or it cannot be written."""
    trace = read_trace(source)
    found = measured_spans(trace)
    if not found:
        raise ValueError(
            f"{source} holds no instructions of a schedule: pass the trace.json of a run with --profile"
        )
    heading = title("Schedule of rank 0's pipeline, measured", os.path.abspath(source))
    draw(png, found, measured_memory(trace), heading, "seconds (measured)")


if __name__ == "__main__":
    draw_trace(*sys.argv[1:])
