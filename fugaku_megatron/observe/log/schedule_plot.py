"""Pipeline schedule plots: modelled and measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from ...cli.output_files import picture
from ...pipeline import instructions
from ...pipeline.timeline import Span
from ...text.named_files import StrPath
from ..profile.trace import measured_memory, measured_spans, read_trace
from .loss_plot import title

# (colour, label, operations), in the order of the legend; the lightness differs as well, for colour-blind readers.
KINDS = (
    ("tab:blue", "F forward", (instructions.FORWARD,)),
    ("tab:orange", "B backward", (instructions.BACKWARD,)),
    ("tab:orange", "I gradient of the input", (instructions.BACKWARD_INPUT,)),
    ("tab:green", "W gradient of the weights", (instructions.BACKWARD_WEIGHT,)),
    ("tab:red", "message under way", (instructions.RECV_FORWARD, instructions.RECV_BACKWARD)),
)
IDLE = "gainsboro"
LIGHTEST = 0.45  # fraction of the colour in a stage's last model chunk
Kinds = dict[str, str]  # label -> colour


def draw(
    path: StrPath,
    spans: Sequence[Span],
    memory: Sequence[float],
    heading: str,
    axis: str = "seconds (model)",
) -> None:
    """Plot a schedule into a PNG file, later model chunks lighter.

    memory: peak MiB per stage, if known
    """
    stages = 1 + max(span.stage for span in spans)
    widths = (6, 1) if memory else (1,)
    with picture(path, 14, 1.6 + 0.22 * max(6, stages)) as figure:
        panels = figure.subplots(1, len(widths), squeeze=False, sharey=True, width_ratios=widths)[0]
        kinds = _bars(panels[0], spans, stages)
        panels[0].set(xlabel=axis, ylabel="stage", ylim=(stages - 0.5, -0.5))
        panels[0].set_title(heading, loc="left", fontsize="medium")
        if memory:
            panels[1].barh(range(stages), memory, height=0.8, color="slategrey")
            panels[1].set(xlabel="MiB of a rank")
        _legend(figure, kinds, columns=len(KINDS) + 1)


def compare(path: StrPath, rows: Sequence[tuple[str, Sequence[Span], Sequence[Span]]]) -> None:
    """Write a PNG with rows of (name, planned spans, measured spans)."""
    stages = 1 + max(span.stage for _, planned, _ in rows for span in planned)
    kinds: Kinds = {}
    last = 0.0
    height = 0.9 + len(rows) * (0.7 + 0.17 * max(6, stages))
    with picture(path, 16, height, dpi=110) as figure:
        grid = figure.subplots(len(rows), 2, squeeze=False, sharex=True, sharey=True)
        for panels, (name, planned, measured) in zip(grid, rows, strict=True):
            for axes, origin, spans in (
                (panels[0], "planned", planned),
                (panels[1], "measured", measured),
            ):
                end = max(span.end for span in spans)
                last = max(last, end)
                kinds |= _bars(axes, spans, stages)
                axes.set_title(f"{name}, {origin}: {end:.2f} s", loc="left", fontsize="medium")
            panels[0].set(ylabel="stage", ylim=(stages - 0.5, -0.5))
        for axes in grid[-1]:
            axes.set(xlabel="seconds", xlim=(0, last))
        _legend(figure, kinds, columns=len(kinds) + 1)


def _legend(figure: Any, kinds: Kinds, columns: int) -> None:
    from matplotlib.patches import Patch

    figure.legend(
        handles=[
            Patch(color=colour, label=label) for label, colour in {**kinds, "idle": IDLE}.items()
        ],
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize="small",
    )


def _bars(axes: Any, spans: Sequence[Span], stages: int) -> Kinds:
    from matplotlib.colors import to_rgb
    from matplotlib.ticker import MaxNLocator

    begin = min(s.start for s in spans)
    end = max(s.end for s in spans)
    chunks = 1 + max(s.model_chunk for s in spans)
    axes.barh(range(stages), end - begin, left=begin, height=0.9, color=IDLE)
    drawn: Kinds = {}
    for colour, label, ops in KINDS:
        of_kind = [s for s in spans if s.op in ops]
        if of_kind:
            drawn[label] = colour
        for chunk in range(chunks):
            white = (1 - LIGHTEST) * chunk / max(1, chunks - 1)
            shown = [s for s in of_kind if s.model_chunk == chunk]
            axes.barh(
                [s.stage for s in shown],
                [s.end - s.start for s in shown],
                left=[s.start for s in shown],
                height=0.9,
                color=[white + (1 - white) * primary for primary in to_rgb(colour)],
                edgecolor="white",
                linewidth=0.2,
            )
    axes.set_xlim(begin, end)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    return drawn


def draw_trace(source: str, png: str) -> None:
    trace = read_trace(source)
    spans = measured_spans(trace)
    if not spans:
        raise ValueError(
            f"{source} holds no instructions of a schedule: pass the trace.json of a run with --profile"
        )
    heading = title("Schedule of rank 0's pipeline, measured", os.path.abspath(source))
    draw(png, spans, measured_memory(trace), heading, "seconds (measured)")


if __name__ == "__main__":
    draw_trace(*sys.argv[1:])
