"""The pipeline of a run over time, modelled: what each stage does when, for pictures and text.

Left out: drawing (`logs.pipeline_plot`), the pipeline of a real run (--profile).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from ..logs import pipeline_plot
from ..run.config import RunConfig
from ..run.layout import Layout, placement
from ..run.recompute import recompute_name
from ..schedule import Schedule
from ..timeline import Span, spans
from .model import System, step

PICTURED = 4  # a picture shows at most this many times the number of stages in micro-batches


def modelled(run: RunConfig, layout: Layout, system: System) -> tuple[list[Span], Schedule, int, float]:
    """What the stages do, the schedule that is shown, the micro-batches of the whole one, and seconds of an iteration."""
    whole = step(run, layout, system, system.parameters)
    shown = replace(whole.schedule, microbatches=min(whole.schedule.microbatches, PICTURED * layout.pp))
    return spans(shown, whole.costs), shown, whole.schedule.microbatches, whole.seconds


def part(shown: Schedule, microbatches: int) -> str:
    """How much of an iteration a picture shows."""
    return f"{shown.microbatches} of {microbatches} micro-batches" if shown.microbatches < microbatches else (
        f"all {microbatches} micro-batches")


def draw(run: RunConfig, layout: Layout, system: System, file: str | os.PathLike, memory: Sequence[float]) -> None:
    """The pipeline over time as a PNG file. memory: MiB of a rank of each stage. Raises ValueError when it cannot be written."""
    bars, shown, microbatches, seconds = modelled(run, layout, system)
    chunks, machine = placement(run).chunks, system.machine.name
    heading = (shown.name + f", {chunks} chunks of layers a stage" * (chunks > 1) + f", {part(shown, microbatches)}, recompute "
               f"{recompute_name(run)}; an iteration takes {seconds:.4g} s (model, {machine})")
    pipeline_plot.draw(file, bars, memory, heading)
