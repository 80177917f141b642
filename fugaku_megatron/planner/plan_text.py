"""Plans as text, JSON and picture, with days, node hours and the command line to start."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import replace

from ..config import batches
from ..config.fields import flag_words
from ..config.layout import Layout
from ..config.recipes import RECIPES
from ..config.run_config import RunConfig, all_flags
from ..costs.run_schedule import recompute_name
from ..observe.log import schedule_plot
from ..pipeline.instructions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import row
from ..pipeline.timeline import Span, spans
from ..text.named_files import JsonObject, StrPath
from . import peak_memory
from .model import Prediction, step
from .search import LayoutCandidate, Search
from .system import System

# of the picture, in characters and lines
WIDTH = 100
ROWS = 8


HEAD = (
    f"{'':>3} {'sec/it':>8} {'range':>17} {'slow net':>8} {'TFLOPs':>8} {'MiB':>6} {'bubble':>7} {'ranks':>5} "
    f"{'DP':>5} {'TP':>3} {'PP':>3} {'MBS':>3} {'schedule':>8} {'recompute':>10} {'ZeRO':>4} {'days':>7} {'node hours':>10}"
)


RANGE = "range: bounds of sec/it that should hold nine of ten runs, from the model's error on published runs"


LETTERS = {FORWARD: "F", BACKWARD: "B", BACKWARD_INPUT: "I", BACKWARD_WEIGHT: "W"}


def schedule_name(run: RunConfig) -> str:
    name = run.parallel.schedule
    count = run.placement.model_chunks
    schedule = row(name)
    if count > 1 and schedule.chunks is None:
        return f"{schedule.short or name} {count}"
    return name


def iterations(plan: LayoutCandidate) -> int | None:
    training = plan.run.training
    if (
        training.train_iters is None
        and training.train_samples is None
        and training.train_tokens is None
    ):
        return None
    return batches.run_length(plan.run, plan.layout.global_batch_size(plan.run))[0]


def _duration(plan: LayoutCandidate) -> tuple[float, float] | None:
    count = iterations(plan)
    if count is None:
        return None
    return count * plan.seconds / 86400, count * plan.seconds / 3600 * plan.system.nodes


def text(
    best: Sequence[tuple[LayoutCandidate, Prediction]], result: Search, args: argparse.Namespace
) -> str:
    """Return the table of the best plans, reasons of dropped layouts, and the first plan's command."""
    first, prediction = best[0]
    lines = [
        f"{first.system.nodes} nodes of {first.system.machine.name}, {first.system.software.name}: {len(result.plans)} "
        "plans run; seconds, memory and bubble are modelled; TFLOPs and ranks are per node, MiB of the fullest rank",
        *rates(first),
        RANGE,
        *(f"warning: {w}" for w in prediction.warnings),
        HEAD,
    ]
    lines += [_row(i + 1, plan, p) for i, (plan, p) in enumerate(best)]
    if result.dropped:
        lines.append(
            "dropped: " + "; ".join(f"{n} {why}" for why, n in result.dropped.most_common())
        )
    schedule = schedule_name(first.run)
    start = "start the first with" + (
        "" if iterations(first) else ", and --train-iters or --train-samples"
    )
    lines += ["", *pipeline(first), "", f"schedule {schedule}; {start}", command(first, args)]
    return "\n".join(lines)


def rates(plan: LayoutCandidate) -> list[str]:
    machine = plan.system.machine
    fitted = plan.system.parameters.reduce_gbs
    if machine.slow_reduce_gbs is None:
        return []
    return [
        f"large all-reduces between nodes: sec/it at {fitted or 2 * machine.large_allreduce_gbs:.3g} GB/s a link, slow net at "
        f"{machine.slow_reduce_gbs:.3g}: published runs reached both"
    ]


def _row(number: int, plan: LayoutCandidate, p: Prediction) -> str:
    duration = _duration(plan)
    layout = plan.layout
    days, hours = (f"{duration[0]:.1f}", f"{duration[1]:,.0f}") if duration else ("-", "-")
    span = f"{p.lower:.4g} to {p.upper:.4g}"
    sizes = f"{layout.dp:>5} {layout.tp:>3} {layout.pp:>3} {plan.run.batch.micro_batch_size:>3}"
    return (
        f"{number:>3} {p.seconds:>8.5g} {span:>17} {p.slow_network:>8.5g} {p.tflops_per_node:>8.3f} {p.memory_mib_max:>6.0f} "
        f"{p.bubble_fraction:>7.1%} {plan.system.ranks_per_node:>5} {sizes} {schedule_name(plan.run):>8} "
        f"{recompute_name(plan.run):>10} "
        f"{plan.run.parallel.zero_stage:>4} {days:>7} {hours:>10}" + _shared(plan)
    )


def _shared(plan: LayoutCandidate) -> str:
    layout = plan.layout
    words = ""
    if layout.cp > 1:
        words += f", CP {layout.cp} {plan.run.typical_cp_comm_type}"
    if plan.run.model.num_experts:
        words += f", EP {layout.ep} x {layout.etp or layout.tp}"
    return words


def as_json(plan: LayoutCandidate, prediction: JsonObject, args: argparse.Namespace) -> JsonObject:
    """Return layout, settings, duration and command, merged with the prediction."""
    days, node_hours = _duration(plan) or (None, None)
    return {
        "dp": plan.layout.dp,
        "tp": plan.layout.tp,
        "pp": plan.layout.pp,
        "cp": plan.layout.cp,
        "cp_comm_type": plan.run.typical_cp_comm_type if plan.layout.cp > 1 else None,
        "ep": plan.layout.ep,
        "micro_batch_size": plan.run.batch.micro_batch_size,
        "ranks_per_node": plan.system.ranks_per_node,
        "recompute": recompute_name(plan.run),
        "zero_stage": plan.run.parallel.zero_stage,
        "schedule": schedule_name(plan.run),
        "days": days,
        "node_hours": node_hours,
        "command": command(plan, args),
        **prediction,
    }


def train_flags(plan: LayoutCandidate, args: argparse.Namespace) -> list[str]:
    words = ["--recipe", args.recipe] if args.recipe else []
    recipe = RECIPES[args.recipe.lower()]().values if args.recipe else {}
    for each in all_flags():
        default = recipe.get(each.name, each.default)
        value = plan.run.values[each.name]
        if value not in (default, None) and (default is not None or not each.is_derived):
            words += flag_words(each.name, value)
    return words


def command(plan: LayoutCandidate, args: argparse.Namespace) -> str:
    return shlex.join(
        [
            "mpiexec",
            "-n",
            str(plan.system.world_size),
            "fugaku-megatron",
            "train",
            *train_flags(plan, args),
        ]
    )


def pipeline(plan: LayoutCandidate) -> list[str]:
    """Draw up to ROWS stages over time: F forward, B backward (with recompute), . idle."""
    bars, shown, microbatches, _ = modelled(plan.run, plan.layout, plan.system)
    end = max(s.end for s in bars)
    pp = plan.layout.pp
    stages = sorted({round(i * (pp - 1) / max(1, min(ROWS, pp) - 1)) for i in range(min(ROWS, pp))})
    lines = []
    for stage in stages:
        cells = ["." for _ in range(WIDTH)]
        for s in (s for s in bars if s.stage == stage and s.op in LETTERS):
            low = int(s.start / end * WIDTH)
            for i in range(low, max(low + 1, min(WIDTH, round(s.end / end * WIDTH)))):
                cells[min(i, WIDTH - 1)] = LETTERS[s.op]
        lines.append(f"stage {stage:>3} |{''.join(cells)}|")
    backward = (
        "I gradients of inputs, W of weights" if shown.splits_backward else f"B {_backward(plan)}"
    )
    legend = f"F forward, {backward}, . idle"
    return [
        f"pipeline of the first plan, {shown_part(shown, microbatches)}, {end:.3g} s ({legend}; model)",
        *lines,
    ]


def _backward(plan: LayoutCandidate) -> str:
    if plan.run.training.recompute_granularity is None:
        return "backward"
    return "backward with recompute"


def png(plan: LayoutCandidate, file: str) -> None:
    """Draw the plan's pipeline over time, with the modelled MiB of every stage, into `file`."""
    system = plan.system
    held = [
        peak_memory.stage_mib(
            plan.run,
            plan.layout,
            stage,
            system.software,
            system.nodes,
            system.memory,
        )
        for stage in range(plan.layout.pp)
    ]
    draw(plan.run, plan.layout, system, file, held)


PICTURED = 4  # a picture shows at most this many times the number of stages in micro-batches


def modelled(
    run: RunConfig, layout: Layout, system: System
) -> tuple[list[Span], Schedule, int, float]:
    whole = step(run, layout, system)
    shown = replace(
        whole.schedule, microbatches=min(whole.schedule.microbatches, PICTURED * layout.pp)
    )
    return spans(shown, whole.costs), shown, whole.schedule.microbatches, whole.seconds


def shown_part(shown: Schedule, microbatches: int) -> str:
    if shown.microbatches < microbatches:
        return f"{shown.microbatches} of {microbatches} micro-batches"
    return f"all {microbatches} micro-batches"


def draw(
    run: RunConfig,
    layout: Layout,
    system: System,
    file: StrPath,
    memory: Sequence[float],
) -> None:
    """Draw the pipeline over time as PNG.

    memory: MiB on a rank, by stage
    """
    bars, shown, microbatches, seconds = modelled(run, layout, system)
    count = run.placement.model_chunks
    model_chunks = f", {count} chunks of layers a stage" if count > 1 else ""
    heading = (
        f"{shown.name}{model_chunks}, {shown_part(shown, microbatches)}, recompute "
        f"{recompute_name(run)}; an iteration takes {seconds:.4g} s (model, {system.machine.name})"
    )
    schedule_plot.draw(file, bars, memory, heading)
