"""Pipeline schedules on real MPI ranks whose stages sleep instead of computing: seconds of each list, walked and measured.

    python -m benchmarks schedule --stages 8 --microbatches 7 --slot-ms 100

Messages, communicators and the loop that walks a list are the trainer's. A forward sleeps one slot, a backward two, the gradients
of inputs and of weights one each, divided by the number of chunks: what is measured is the list, not the cores.
Left out: computation (`step`), the seconds that a list takes by itself (pipeline/timeline.py).
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from fugaku_megatron.config.checks import check
from fugaku_megatron.config.outputs import check_picture
from fugaku_megatron.host import runtime
from fugaku_megatron.logs import pipeline_plot
from fugaku_megatron.pipeline.schedule import Schedule, build
from fugaku_megatron.pipeline.timeline import Costs, Span, spans

from . import disturbance, driver, jobs
from .child import ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this family."""
    parser.add_argument("--stages", type=int, default=8, help="ranks, one for each stage (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, default=7, help="of an iteration (default: %(default)s)")
    parser.add_argument("--slot-ms", type=float, default=100.0, help="milliseconds of a stage's forward (default: %(default)s)")
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 5], help="of interleaved and ZB-H1 schedules (default: 2 5)")
    parser.add_argument("--rounds", type=int, default=1, help="timed turns of each schedule (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--png", type=Path, metavar="FILE", help="picture of each schedule, its list beside the last measured turn "
                                                                 "(needs matplotlib)")


def schedules(stages: int, microbatches: int, chunks: list[int]) -> list[Schedule]:
    """What is compared; 1F1B, with which the others are compared, first."""
    kinds = [("1f1b", 1), *(("interleaved", v) for v in chunks), ("zb-h1", 1), *(("zb-h1", v) for v in chunks), ("zbv", 2)]
    return [build(name, stages, v, microbatches) for name, v in kinds]


def run(options: argparse.Namespace) -> None:
    """Measure, print, write --json. ValueError for numbers that cannot be measured."""
    check(options.stages >= 2, f"--stages {options.stages}: give 2 or more, one stage waits for nobody")
    for name in ("microbatches", "slot_ms", "rounds"):
        value = getattr(options, name)
        check(value > 0, f"--{name.replace('_', '-')} {value}: give a number above 0")
    check(min(options.chunks) >= 2, f"--chunks {min(options.chunks)}: give 2 or more, one chunk is 1F1B")
    check_picture(options.png)
    watch = disturbance.Watch(os.cpu_count() or 1, jobs.children_seconds)
    rows = measured(options)
    turns = [row.pop("spans") for row in rows]
    if options.png:
        picture(options, turns)
    result = {"rows": rows, "busy": watch.others() > disturbance.OTHERS, "cpu": runtime.cpu_model(), "rounds": options.rounds,
              "repeat": driver.command_line()}
    show(result, options)
    if options.png:
        print(f"wrote {options.png}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, which rank 0 prints. RuntimeError when the ranks fail."""
    order = {name: getattr(options, name) for name in ("microbatches", "slot_ms", "chunks", "rounds")}
    return list(ranks(options.stages, "schedule_rank", order))


def picture(options: argparse.Namespace, turns: list[list[list[Any]]]) -> None:
    """Every schedule's list and what the ranks did. turns: the fields of the spans of each schedule."""
    rows = []
    for plan, turn in zip(schedules(options.stages, options.microbatches, options.chunks), turns, strict=True):
        name = plan.name + f", {plan.placement.chunks} chunks" * (plan.placement.chunks > 1)
        rows.append((name, spans(plan, Costs.alike(plan, options.slot_ms / 1e3)), [Span(*fields) for fields in turn]))
    pipeline_plot.compare(options.png, rows)


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """The table."""
    print(f"{'schedule':<12} {'chunks':>6} {'list s':>8} {'measured s':>10} {'of list':>8} {'x 1F1B':>7}")
    for row in result["rows"]:
        print(f"{row['schedule']:<12} {row['chunks']:>6} {row['list_seconds']:>8.3f} {row['measured_seconds']:>10.3f} "
              f"{row['measured_seconds'] / row['list_seconds']:>8.3f} {row['ratio_to_1f1b']:>7.3f}")
    print(f"{options.stages} sleeping stages on {result['cpu']}, {options.microbatches} micro-batches, a forward is "
          f"{options.slot_ms:g} ms, measured" + ("; BUSY MACHINE" if result["busy"] else ""))
    print(result["repeat"])
