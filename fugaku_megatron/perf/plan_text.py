"""Plans as text, JSON and pictures: the table, days and node hours, the pipeline over time, the command line.

Test: pytest tests/test_perf_plan.py
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

from ..run import batches
from ..run.config import GROUPS, RunConfig, flag
from ..run.outputs import writing
from ..run.recipes import RECIPES
from .model import Prediction, step
from .pipeline import Span, spans
from .search import Plan, Search

WIDTH, ROWS = 100, 8  # of the picture
HEAD = (f"{'':>3} {'sec/it':>8} {'range (9 of 10)':>17} {'TFLOPs':>8} {'MiB':>6} {'bubble':>7} {'ranks':>5} {'DP':>5} {'TP':>3} "
        f"{'PP':>3} {'MBS':>3} {'recompute':>10} {'ZeRO':>4} {'days':>7} {'node hours':>10}")
PICTURED = 4  # pipeline lengths of micro-batches that a picture shows at most


def recompute_name(run: RunConfig) -> str:
    """none, selective, full, or block and its layers per stage."""
    training = run.training
    if training.recompute_granularity != "full":
        return training.recompute_granularity or "none"
    return f"block {training.recompute_num_layers}" if training.recompute_method == "block" else "full"


def iterations(plan: Plan) -> int | None:
    """The run's length; None where it has none."""
    training, size = plan.run.training, plan.layout.global_batch_size(plan.run)
    if training.train_iters is None and training.train_samples is None:
        return None
    return batches.length(training, batches.RampUp.of(plan.run.batch, size))[0]


def _days(plan: Plan) -> tuple[str, str]:
    count = iterations(plan)
    if count is None:
        return "-", "-"
    return f"{count * plan.seconds / 86400:.1f}", f"{count * plan.seconds / 3600 * plan.system.nodes:.3g}"


def text(best: Sequence[tuple[Plan, Prediction]], found: Search, args: argparse.Namespace) -> str:
    """Everything that plan prints of a search."""
    first, prediction = best[0]
    lines = [f"{first.system.nodes} nodes of {first.system.machine.name}, {first.system.software.name}: {len(found.plans)} layouts "
             "run; seconds, memory and bubble are modelled; TFLOPs and ranks are per node, MiB of the fullest rank", HEAD]
    lines += [_row(i + 1, plan, p) for i, (plan, p) in enumerate(best)]
    if found.dropped:
        lines.append("dropped: " + "; ".join(f"{n} {why}" for why, n in found.dropped.most_common()))
    lines += [f"warning: {w}" for w in prediction.warnings]
    schedule = first.system.software.offers.schedules[0]
    start = "start the first with" + ("" if iterations(first) else ", and --train-iters or --train-samples")
    lines += ["", *picture(first), "", f"schedule {schedule}; {start}", command(first, args)]
    return "\n".join(lines)


def _row(number: int, plan: Plan, p: Prediction) -> str:
    days, hours = _days(plan)
    layout = plan.layout
    span = f"{p.lower:.4g} to {p.upper:.4g}"
    sizes = f"{layout.dp:>5} {layout.tp:>3} {layout.pp:>3} {plan.run.batch.micro_batch_size:>3}"
    return (f"{number:>3} {p.seconds:>8.5g} {span:>17} {p.tflops_per_node:>8.3f} {p.memory_mib_max:>6.0f} "
            f"{p.bubble_fraction:>7.1%} {plan.system.ranks_per_node:>5} {sizes} {recompute_name(plan.run):>10} "
            f"{plan.run.parallel.zero_stage:>4} {days:>7} {hours:>10}")


def as_json(plan: Plan, prediction: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    count = iterations(plan)
    return {"dp": plan.layout.dp, "tp": plan.layout.tp, "pp": plan.layout.pp, "micro_batch_size": plan.run.batch.micro_batch_size,
            "ranks_per_node": plan.system.ranks_per_node, "recompute": recompute_name(plan.run),
            "zero_stage": plan.run.parallel.zero_stage, "schedule": plan.system.software.offers.schedules[0],
            "days": None if count is None else count * plan.seconds / 86400,
            "node_hours": None if count is None else count * plan.seconds / 3600 * plan.system.nodes,
            "command": command(plan, args), **prediction}


def _base(recipe: str | None) -> dict[tuple[str, str], Any]:
    """Values that need no flag: the recipe's, or the fields' defaults."""
    places = [(group, f) for group, config in GROUPS.items() for f in fields(config)]
    if recipe:
        run = RECIPES[recipe.lower()]()
        return {(group, f.name): getattr(getattr(run, group), f.name) for group, f in places}
    return {(group, f.name): None if f.default is MISSING else f.default for group, f in places}


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name) if value else flag("no_" + name)
    return f"{flag(name)} {shlex.join(map(str, value if isinstance(value, tuple) else (value,)))}"


def command(plan: Plan, args: argparse.Namespace) -> str:
    """The command line that trains this plan."""
    base, given = _base(args.recipe), []
    for (group, name), usual in base.items():
        value = getattr(getattr(plan.run, group), name)
        derived = name in ("ffn_hidden_size", "max_position_embeddings") and usual is None
        if value != usual and value is not None and not derived:
            given.append(_flag(name, value))
    recipe = f"--recipe {args.recipe} " if args.recipe else ""
    return f"mpiexec -n {plan.system.world_size} python pretrain_gpt.py {recipe}{' '.join(given)}"


def _spans(plan: Plan) -> tuple[list[Span], int, int]:
    made = step(plan.run, plan.layout, plan.system, plan.system.parameters)
    shown = min(made.microbatches, PICTURED * plan.layout.pp)
    forward, backward = zip(*made.stages)
    return spans(forward, backward, made.transfer, shown), shown, made.microbatches


def picture(plan: Plan) -> list[str]:
    """Some stages over time: F forward, B backward (with recompute), . idle."""
    found, shown, microbatches = _spans(plan)
    end, pp = max(s.end for s in found), plan.layout.pp
    stages = sorted({round(i * (pp - 1) / max(1, min(ROWS, pp) - 1)) for i in range(min(ROWS, pp))})
    lines = []
    for stage in stages:
        cells = ["."] * WIDTH
        for s in (s for s in found if s.stage == stage):
            low = int(s.start / end * WIDTH)
            for i in range(low, max(low + 1, min(WIDTH, round(s.end / end * WIDTH)))):
                cells[min(i, WIDTH - 1)] = "F" if s.forward else "B"
        lines.append(f"stage {stage:>3} |{''.join(cells)}|")
    part = f"{shown} of {microbatches} micro-batches" if shown < microbatches else f"all {microbatches} micro-batches"
    return [f"pipeline of the first plan, {part}, {end:.3g} s (F forward, B {_backward(plan)}, . idle; model)", *lines]


def _backward(plan: Plan) -> str:
    """What a backward of the plan is."""
    return "backward" if plan.run.training.recompute_granularity is None else "backward with recompute"


def png(plan: Plan, file: str) -> None:
    """The same as a picture file. Raises ValueError when it cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no window, and pyplot's global state untouched
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    found, shown, microbatches = _spans(plan)
    figure = Figure(figsize=(12, 1 + 0.15 * max(8, plan.layout.pp)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for forward, colour, label in ((True, "tab:blue", "forward"), (False, "tab:orange", _backward(plan))):
        chosen = [s for s in found if s.forward == forward]
        axes.barh([s.stage for s in chosen], [s.end - s.start for s in chosen], left=[s.start for s in chosen], height=0.9,
                  color=colour, label=label, edgecolor="white", linewidth=0.2)
    axes.set(xlabel="seconds (model)", ylabel="stage", ylim=(plan.layout.pp - 0.4, -0.6))
    axes.set_title(f"1F1B, {shown} of {microbatches} micro-batches", loc="left")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False)  # above the bars, not over them
    with writing("--png", file):
        figure.savefig(file, dpi=120, format="png")
