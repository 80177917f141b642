"""Pictures of runs and of pipelines.

A run: loss (training, validation) over iterations or tokens, with small panels for learning rate, TFLOPs and energy. It has one
colour in all panels; the load of experts is a panel of its own. The title says its size, layout and directory.

A pipeline: stages down, time across, what each stage does in colours, and its memory next to it.

    python -m fugaku_megatron.logs.plot schedule profile/trace.json profile/schedule.png

A planned and a measured one have the same form. Traces of several ranks in Chrome's format are merged into one file, from which
comes the schedule that a pipeline really ran. Times of a trace are microseconds, of spans seconds. Left out: where planned spans
come from (`timeline.spans`), what a rank records (`host.observed`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config.command_line import shown, writing
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..costs import accounting
from ..named_files import read_text
from ..pipeline import parts
from ..pipeline.timeline import COMPUTATIONS, Span
from .iteration import size_name
from .metrics import read_history

WIDTH = 90  # characters of a title
AXES = {
    "iteration": "iteration",
    "tokens": "consumed_tokens",
}  # what a curve is drawn over -> the field of a record
Records = list[dict[str, Any]]
SMALL_PANELS = (
    ("learning_rate", "learning rate"),
    ("tflops", "TFLOPs per rank"),
    ("watts", "power (W)"),
    ("tokens_per_joule", "tokens per joule"),
)  # the last two of runs that measure energy


def describe(run: RunConfig, dp: int) -> str:
    """A run's size and layout: 124M, DP 2 x TP 1 x PP 1, fp32."""
    parallel = run.parallel
    tp, pp, cp = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    return f"{size_name(accounting.parameters(run))}, {Layout(dp * tp * pp * cp, tp, pp, dp, cp=cp)}, {run.precision.name}"


def title(description: str, place: str | os.PathLike) -> str:
    """The title of a picture: what runs, and the end of the path where it is, one line each."""
    path = os.fspath(place)
    return "\n".join(
        filter(None, (description, path if len(path) <= WIDTH else "..." + path[-WIDTH:]))
    )


def loss_curve(
    path_png: str | os.PathLike, history: Records | str | os.PathLike, heading: str = ""
) -> bool:
    """Draw a history (its records, or the path of its file) into `path_png`, under `heading`.

    If there is nothing to draw, if matplotlib is missing, or if a file cannot be read or written, it prints one line that says so
    and returns False: a picture ends no run.
    """
    try:
        return loss_curves(
            path_png, {"": history if isinstance(history, list) else read_history(history)}, heading
        )
    except (OSError, ValueError) as error:
        print(f"{path_png}: not drawn, {error}")
        return False


def start_loss_curve(
    path_png: str | os.PathLike, history: str | os.PathLike, heading: str = ""
) -> subprocess.Popen:
    """`loss_curve` in a process of its own."""
    return start("loss", os.fspath(path_png), os.fspath(history), heading)


def start(*words: str, **options: Any) -> subprocess.Popen:
    """This module as a program: a rank that draws would keep matplotlib, 35 MiB.

    words: its command line. options: of subprocess.Popen.
    """
    package = Path(__file__).parents[1]
    path = os.pathsep.join(filter(None, (str(package.parent), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", f"{package.name}.logs.plot", *words],
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": "utf-8:surrogateescape"},
        **options,
    )


def loss_curves(
    path_png: str | os.PathLike,
    runs: Mapping[str, Records],
    heading: str = "",
    x: str = "iteration",
) -> bool:
    """As `loss_curve` for several runs (name -> records) in one picture; OSError when the file cannot be written.

    x: a key of AXES.
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
    loads = (
        [record for records in runs.values() for record in records if record["kind"] == "experts"]
        if len(runs) == 1
        else []
    )
    _draw(path_png, drawn, heading, x, loads[-1] if loads else None)
    return True


def _with_loss(records: Records, kind: str) -> Records:
    return [r for r in records if r["kind"] == kind and r.get("lm_loss") is not None]


def _draw(
    path_png: str | os.PathLike,
    runs: Mapping[str, tuple[Records, Records]],
    heading: str,
    x: str,
    loads: dict[str, Any] | None,
) -> None:
    """loads: a record of kind "experts"."""
    from matplotlib.backends.backend_agg import (
        FigureCanvasAgg,
    )  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6 if loads is None else 8), layout="constrained")
    FigureCanvasAgg(figure)
    small = (
        SMALL_PANELS
        if any(r.get("watts") for train, _ in runs.values() for r in train)
        else SMALL_PANELS[:2]
    )
    grid = figure.add_gridspec(
        2 if loads is None else 3,
        len(small),
        height_ratios=(3, 1) if loads is None else (3, 1, 1.5),
    )
    panels = [
        figure.add_subplot(grid[0, :]),
        *(figure.add_subplot(grid[1, i]) for i in range(len(small))),
    ]
    for number, (name, (train, validation)) in enumerate(runs.items()):
        color = f"C{number % 10}"  # of a run in every panel
        _line(panels[0], train, x, "lm_loss", label=shown(name) or "training", color=color)
        _line(
            panels[0],
            validation,
            x,
            "lm_loss",
            label=None if name else "validation",
            color=color if name else "C1",
            marker="o",
            linestyle="--",
        )
        for panel, (field, _) in zip(panels[1:], small, strict=True):
            _line(panel, train, x, field, color=color)
    for panel, label in zip(panels, ("lm loss", *(label for _, label in small)), strict=True):
        panel.set(xlabel=x, ylabel=label)
        panel.grid(alpha=0.3)
    validated = len(runs) > 1 and any(validation for _, validation in runs.values())
    if panels[0].get_legend_handles_labels()[0]:
        panels[0].legend(fontsize="small", title="dashed: validation" if validated else None)
    if loads is not None:
        _draw_loads(figure.add_subplot(grid[2, :]), loads)
    figure.suptitle(shown(heading), fontsize="medium")
    figure.savefig(path_png, dpi=120, format="png")


def _draw_loads(axes: Any, record: dict[str, Any]) -> None:
    """The load of every expert (layers with experts, e), 1 being the mean."""
    image = axes.imshow(record["loads"], aspect="auto", interpolation="nearest", vmin=0.0)
    numbers = range(0, len(record["layers"]), 1 + len(record["layers"]) // 8)
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_yticks(list(numbers), [record["layers"][number] for number in numbers])
    axes.figure.colorbar(image, ax=axes, label=f"load at iteration {record['iteration']}")


def _line(axes: Any, records: Records, x: str, name: str, **style: Any) -> None:
    places = [(record.get(AXES[x]), record.get(name)) for record in records]
    points = [point for point in places if None not in point]
    if points:
        axes.plot(*zip(*points), **style)


# Pipelines -----------------------------------------------------------------------------------------------------------------------

# (colour, label, operations), in the order of the legend; the colours differ in lightness, too, for readers who see few of them.
KINDS = (
    ("tab:blue", "F forward", (parts.FORWARD,)),
    ("tab:orange", "B backward", (parts.BACKWARD,)),
    ("tab:orange", "I gradient of the input", (parts.BACKWARD_INPUT,)),
    ("tab:green", "W gradient of the weights", (parts.BACKWARD_WEIGHT,)),
    ("tab:red", "message under way", (parts.RECV_FORWARD, parts.RECV_BACKWARD)),
)
IDLE = "gainsboro"
LIGHTEST = 0.45  # how much of its colour a stage's last chunk has
Trace = dict[str, Any]


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
        1 + max(s.chunk for s in spans),
    )
    axes.barh(range(stages), [end - begin] * stages, left=begin, height=0.9, color=IDLE)
    drawn = []
    for colour, label, ops in KINDS:
        for chunk in range(chunks):
            own = [s for s in spans if s.op in ops and s.chunk == chunk]
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


def read_trace(path: str | os.PathLike) -> Trace:
    """A trace: its events are those of "traceEvents"."""
    remedy = "pass a trace of a run with --profile"
    text = read_text(path, "", remedy)
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: not JSON, or cut: {remedy}") from None


def merge_traces(
    paths: Sequence[Path], merged: Path, placement: parts.Placement, pipeline: Sequence[int]
) -> list[Path]:
    """Write the events of all traces into one file, a trace at a time in memory; returns the traces that are not there.

    placement, pipeline: of the schedule that `measured_spans` finds in it, and the ranks of its stages.
    """
    missing = [path for path in paths if not path.is_file()]
    other = json.dumps({"placement": asdict(placement), "pipeline": list(pipeline)})
    with open(merged, "w", encoding="utf-8") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {other}, "traceEvents": [')
        separator = "\n"
        for path in paths:
            for event in [] if path in missing else read_trace(path)["traceEvents"]:
                file.write(separator + json.dumps(event))
                separator = ",\n"
        file.write("\n]}\n")
    return missing


def measured_spans(trace: Trace) -> list[Span]:
    """What the pipeline did in the last recorded iteration, in the form of `timeline.spans`; empty without instructions.

    A receive begins when its message was sent: until then the stage was idle.
    """
    placement = parts.Placement(**trace["otherData"]["placement"])
    measured = {
        (span.stage, span.op, span.microbatch, span.chunk): span for span in _instructions(trace)
    }  # later ones replace
    sent = {}
    for span in measured.values():
        if span.op in parts.SENDS:
            receiver, tag = placement.peer(span.stage, _message(span))
            sent[receiver, tag, span.microbatch] = span.start
    found = [span for span in measured.values() if span.op in COMPUTATIONS]
    for span in measured.values():
        if span.op in parts.RECEIVES:
            _, tag = placement.peer(span.stage, _message(span))
            start = max(span.start, sent.get((span.stage, tag, span.microbatch), span.start))
            found += [_between(span, start, span.end)] if start < span.end else []
    begin = min((span.start for span in found), default=0.0)
    return [
        _between(span, span.start - begin, span.end - begin)
        for span in sorted(found, key=lambda s: (s.stage, s.start))
    ]


def _instructions(trace: Trace) -> Iterator[Span]:
    """Every instruction of the pipeline's ranks, of each rank in the order of time."""
    stages = {rank: stage for stage, rank in enumerate(trace["otherData"]["pipeline"])}
    for event in trace["traceEvents"]:
        about = event.get("args", {})
        if event["ph"] == "X" and "microbatch" in about and event["pid"] in stages:
            yield Span(
                stages[event["pid"]],
                event["name"],
                about["microbatch"],
                about["chunk"],
                event["ts"] / 1e6,
                (event["ts"] + event["dur"]) / 1e6,
            )


def _message(span: Span) -> parts.Instruction:
    return parts.Instruction(span.op, span.microbatch, span.chunk)


def _between(span: Span, start: float, end: float) -> Span:
    return Span(span.stage, span.op, span.microbatch, span.chunk, start, end)


def measured_memory(trace: Trace) -> list[float]:
    """MiB of the process of each stage at its peak; empty where a stage's is not known."""
    peaks = {
        event["pid"]: event["args"]["peak_mib"]
        for event in trace["traceEvents"]
        if "peak_mib" in event.get("args", {})
    }
    pipeline = trace["otherData"]["pipeline"]
    return [peaks[rank] for rank in pipeline] if peaks.keys() >= set(pipeline) else []


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
    if sys.argv[1] == "loss":
        loss_curve(*sys.argv[2:])
    else:
        draw_trace(*sys.argv[2:])
