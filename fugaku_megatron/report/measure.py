"""Measurement of a report's sections."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from ..comm.agreement import find_nodes
from ..comm.base import Comm
from ..host import allocator, runtime
from ..host.energy import Counters
from ..host.machine import facts
from ..text.named_files import JsonObject
from . import communication, kernel_rates, layers, record, training
from .context import SHRUNK, Context, Scale
from .figures import text
from .findings import findings
from .page import page
from .record import ALWAYS, NAMES, STARTED, Budget


def host_section(context: Context) -> JsonObject:
    found = context.world.all_gather_object(
        {**facts(), "mapping": context.mapping} if context.nodes.leads else None
    )
    return {"nodes": [node for node in found if node]}


# In the report's order.
SECTIONS: dict[str, Callable[[Context], JsonObject]] = {
    "host": host_section,
    "kernels": kernel_rates.kernel_section,
    "communication": communication.communication_section,
    "training": training.training_section,
    "layers": layers.layers_section,
    "storage": training.storage_section,
}


def measure(world: Comm, args: argparse.Namespace) -> None:
    """Measure and write section by section. Collective."""
    budget = Budget(args.minutes, spent=args.spent + time.monotonic() - STARTED)
    report = None
    if world.rank == 0:
        report = record.Record(args.output, budget, {".html": page, ".txt": text}, args.with_names)
        report.write()
        end_with_signal(report)
    context = make_context(world, args)
    chosen = [name for name in NAMES if name in (args.only or NAMES)]
    for number, name in enumerate(chosen):
        if context.agreed(name not in ALWAYS and budget.left <= 0):
            if report:
                report.data["left_out"] = chosen[number:]
            break
        result = one_section(context, budget, chosen, number)
        if report:
            found = report.data["sections"]
            found[name] = result
            report.data |= {"findings": findings(found), "hours": layers.hours(found)}
            if context.machine:
                report.data["machine"] = context.machine
            report.write()
    if report:
        report.end("finished", complete=True)
        shown = args.output.with_suffix(".txt")
        print(shown.read_text(encoding="utf-8"), end="")
        print(f"wrote {args.output}, {args.output.with_suffix('.html')} and {shown}")


def make_context(world: Comm, args: argparse.Namespace) -> Context:
    """Set up this rank as for a training run. Collective."""
    nodes = find_nodes(world)
    before = os.sched_getaffinity(0)
    _, *mapping = runtime.init(world, nodes=nodes).splitlines()  # the first line names the host
    pinned = os.sched_getaffinity(0) != before
    return Context(
        world=world,
        nodes=nodes,
        scale=SHRUNK if args.shrunk else Scale(),
        pinned=pinned,
        mapping=mapping,
        save=args.save,
        free=allocator.free_bytes(),
        energy=Counters.find() if nodes.leads else Counters(""),
    )


def one_section(context: Context, budget: Budget, chosen: list[str], number: int) -> JsonObject:
    """Measure a section within its time, which rank 0 decides. Collective."""
    name = chosen[number]
    following = tuple(chosen[number + 1 :])
    context.seconds = context.agreed(budget.of(name, following))
    context.begin = time.monotonic()
    if context.world.rank == 0:
        record.progress(
            f"{number + 1}/{len(chosen)} {name}, up to {record.clock(context.seconds)}; "
            f"{record.clock(budget.used)} used, at most {record.clock(budget.left)} left"
        )
    result = SECTIONS[name](context)
    return {**result, "seconds": time.monotonic() - context.begin}


def end_with_signal(report: record.Record) -> None:
    def end(number: int, frame: FrameType | None) -> NoReturn:
        report.end(f"ended by {signal.Signals(number).name}", complete=False)
        record.progress(f"ended by {signal.Signals(number).name}; {report.path} is partial")
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
