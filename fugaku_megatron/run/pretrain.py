"""A run of the command on one rank: check, assemble, open the outputs, run the loop."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from ..checkpoint.lock import hold
from ..cli.arguments import Arguments
from ..comm.agreement import Nodes, everywhere, find_nodes, on_root
from ..comm.base import Comm
from ..config.faults import COMPARISON_INTERVAL
from ..costs.plan import Plan
from ..host import allocator
from ..host.allocator import peak_memory_mib
from ..host.energy import Counters
from ..observe.export import spans
from ..observe.export.hours import HOURS, Hours
from ..observe.export.metrics_writer import LogOutputs, MetricsWriter, format_peak_memory
from ..observe.export.telemetry import Otlp, Telemetry
from ..observe.export.writers import open_writers
from ..observe.hang.stragglers import RankTimes
from ..observe.hang.watchdog import Watchdog
from ..observe.log.screen import append
from ..observe.numbers.audit import watch_numbers
from ..observe.observers import place
from ..observe.resources.energy import EnergyWatch
from ..observe.resources.memory_errors import MemoryErrors
from ..observe.resources.memory_watch import MemoryWatch, check_memory
from ..start.signals import STOPS, kept_stop
from ..training.replicas import comparison_line
from .announce import announce, iteration_line
from .assemble import Assembly, StartLog, assemble, configure_process, resolve_start
from .checkpoint_source import find_checkpoint, resumed_plan
from .checks import check_outputs, check_run
from .loop import Session
from .memory_copies import copy_group, find_in_memory, open_copies
from .sources import Sources


def _say(log_file: str | None, world: Comm, *lines: str | None) -> None:
    known = [line for line in lines if line]
    if world.rank != 0:
        return
    if known:
        print(*known, sep="\n", flush=True)
    append(log_file, *known)


def start(
    plan: Plan, notes: Sequence[str], world: Comm, watchdog: Watchdog, telemetry: Telemetry
) -> Session:
    """Check, build and resume. Raise ValueError for a user's mistake, if possible before anything expensive."""
    say = partial(_say, plan.config.output.log_file, world)
    watchdog.heart.enter("the start: looking for a checkpoint")
    nodes = find_nodes(world)
    place(watchdog, world, nodes)
    plan, sources = find_sources(plan, world, nodes)
    check_outputs(plan, sources.resume, world, nodes)
    group, note = copy_group(plan, world, nodes, resumed=sources.resume.iteration is not None)
    machine = configure_process(plan, world, nodes)
    say(*announce(notes, plan, machine, nodes.count), *plan.choices)
    with everywhere():
        say(check_memory(plan, world, nodes), iteration_line(plan))
    if sources.memory is not None:
        say(*sources.memory.lines)
    say(note)
    log = StartLog(watchdog.heart, telemetry, say=say, note=say)
    assembly = assemble(plan, world, nodes, sources, log)
    session = open_session(assembly, nodes, watchdog, log, sources.resume.source)
    session.copies = open_copies(session.trainer, nodes, group, sources.memory)
    return session


def find_sources(plan: Plan, world: Comm, nodes: Nodes) -> tuple[Plan, Sources]:
    """Resolve the vocabulary and automatic choices, and find the checkpoint. Collective."""

    def find(resolved: Plan) -> tuple[Plan, Sources]:
        memory = find_in_memory(resolved, world, nodes)
        resume = find_checkpoint(resolved, world, memory=memory)
        return resumed_plan(resolved, resume), Sources(resume, memory=memory)

    return resolve_start(plan, world, nodes, find)


def open_session(
    assembly: Assembly, nodes: Nodes, watchdog: Watchdog, log: StartLog, source: str = ""
) -> Session:
    """Open the outputs of an assembled run. Collective.

    source: flag of the checkpoint's place
    """
    trainer = assembly.trainer
    world = trainer.world
    plan = trainer.plan
    run = plan.config
    observers = assembly.observers
    given = run.numbers.check_weight_hash_across_dp_replicas_interval != COMPARISON_INTERVAL
    if world.size > 1 or given:
        log.say(comparison_line(trainer.replicas, run, assembly.groups))
    trainer.order = trainer.order.or_else(plan.length.train_samples, plan.length.valid_samples)

    log.heart.enter("the start")
    printing = world.rank == 0
    output = run.output
    writers = open_writers(run, plan.iteration, printing, log.say)
    if printing and output.save:
        saving = "save"
        if output.save_local:
            saving = "save_local"
        elif output.async_save:
            saving = "async_save"
        path = Path(output.save) / HOURS
        writers.append(Hours(path, plan.iteration, log.telemetry.times, saving, source))
    writer = MetricsWriter(
        plan.length.iterations,
        plan.log_interval,
        LogOutputs(
            live=output.log_live,
            log_file=output.log_file,
            writers=(*writers, log.telemetry),
        ),
        printing=printing,
        start_iteration=plan.iteration,
    )
    log.say(watch_numbers(trainer, writer.event))
    allocator.trim()
    return Session(
        trainer,
        writer,
        iterations=plan.length.iterations,
        valid_sizes=assembly.valid_sizes,
        profile=observers.profile,
        observers=(
            EnergyWatch(world, nodes, Counters.find()),  # first, so that joules end with the step
            MemoryWatch(world, nodes, writer.event),
            MemoryErrors(world, nodes, writer.event),
            RankTimes(run, plan.layout, world, observers.phases, writer.print),
        ),
        watchdog=watchdog,
        telemetry=log.telemetry,
    )


def open_telemetry(plan: Plan, world: Comm) -> Telemetry:
    """Return the export of --otel-enabled on rank 0, and none on others. Collective."""
    otlp = Otlp.of(plan.config, plan.layout.dp)
    if otlp is None:
        return Telemetry()
    on_root(world, otlp.check)
    if world.rank != 0:
        return Telemetry()
    return Telemetry(otlp, partial(_say, plan.config.output.log_file, world))


def pretrain(arguments: Arguments, world: Comm, watchdog: Watchdog) -> None:
    """Run from flags to the last checkpoint. Collective."""
    plan, lines = check_run(arguments.run, world)

    def asked_to_stop() -> bool:
        watchdog.heart.enter("the start: waiting for the lock of --save")
        return kept_stop(map(signal.getsignal, STOPS)) is not None

    with (
        closing(open_telemetry(plan, world)) as telemetry,
        hold(plan.config.output.save, world, asked_to_stop) as check_lock,
    ):
        with telemetry.span(spans.STARTUP):
            session = start(plan, (*arguments.notes, *lines), world, watchdog, telemetry)
        session.trainer.check_lock = check_lock
        try:
            with session.signals:
                if plan.config.training.skip_train:
                    session.evaluate_only()
                else:
                    session.run()
            memory = world.gather_object(peak_memory_mib())
            if memory is not None:
                session.writer.print(format_peak_memory(memory))
        finally:
            session.trainer.close()
            session.writer.close()
