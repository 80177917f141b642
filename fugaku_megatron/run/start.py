"""A run's start on one rank: check, build data and trainer, resume, run the loop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from ..checkpoint.lock import hold
from ..cli.arguments import Arguments
from ..comm.agreement import Nodes, everywhere, find_nodes, on_root
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..comm.node import share_groups
from ..config.faults import COMPARISON_INTERVAL
from ..costs.plan import Plan
from ..data.reader_group import ReaderGroup
from ..data.unchanged import records
from ..host import allocator, kernels, runtime
from ..host.allocator import peak_memory_mib
from ..host.energy import Counters
from ..host.observed import Phases
from ..observe.export import spans
from ..observe.export.metrics_writer import LogOutputs, MetricsWriter, format_peak_memory
from ..observe.export.telemetry import Otlp, Telemetry
from ..observe.export.writers import open_writers
from ..observe.hang.heartbeat import Heartbeat
from ..observe.hang.stragglers import RankTimes
from ..observe.hang.watchdog import Watchdog
from ..observe.log.screen import append
from ..observe.numbers.abft import Checksums
from ..observe.numbers.rerun import Rerun
from ..observe.observers import Heartbeats, Observers, place
from ..observe.profile.profile import Profile
from ..observe.resources.energy import EnergyWatch
from ..observe.resources.memory_watch import MemoryWatch, check_memory, rank_bytes
from ..start.signals import STOPS, kept_stop
from ..training.replicas import comparison_line
from ..training.trainer import Trainer
from .announce import announce, data_lines, iteration_line
from .checkpoint_source import Resume, find_checkpoint, resumed_plan
from .checks import check_outputs, check_run
from .data import Data, build_data, find_reader_group, no_evaluation_note, valid_sizes
from .kernel_choice import build_ops, choose_kernels
from .limits import MachineLimits
from .loop import Session
from .resume import resume_training
from .tokenizer import resolve_vocabulary, tokenizer_notes


@dataclass(frozen=True)
class Communicators:
    """Ranks that work together: all, by node, process groups, and ranks that share data from a reading rank."""

    world: Comm
    nodes: Nodes
    groups: Groups
    readers: ReaderGroup | None


def connect(plan: Plan, world: Comm, nodes: Nodes) -> Communicators:
    """Build the communicators. Collective."""
    groups = share_groups(Grid(*plan.layout.sizes).groups(world), kernels)
    return Communicators(world, nodes, groups, find_reader_group(plan, groups, nodes))


def configure_process(plan: Plan, world: Comm, nodes: Nodes | None = None) -> str:
    """Set up allocator, threads and clock before the first large tensor; return the log's lines. Collective."""
    run = plan.config
    system = run.system
    parallel = run.parallel
    several_nodes = nodes is not None and nodes.count > 1
    overlaps = (
        parallel.tp_comm_overlap
        or max(parallel.context_parallel_size, parallel.expert_model_parallel_size) > 1
    )
    return runtime.init(
        world,
        runtime.ProcessSettings(
            allocator=system.allocator,
            thread_affinity=system.thread_affinity,
            cpu_frequency=system.cpu_frequency,
            flush_denormals=run.training.use_flush_denormal,
            reserve_core=parallel.overlap_grad_reduce or several_nodes and overlaps,
        ),
        nodes=nodes,
        needed=rank_bytes(plan, world.rank),
    )


class Built(NamedTuple):
    """This rank's trainer with its observers. valid_sizes: each validation set's samples."""

    trainer: Trainer
    observers: Observers
    valid_sizes: tuple[int, ...]


def build(
    plan: Plan,
    communicators: Communicators,
    data: Data,
    resume: Resume,
    heart: Heartbeat,
    say: Callable[..., None],
    telemetry: Telemetry | None = None,
) -> Built:
    """Choose the kernels and build this rank's trainer, observed. Collective."""
    run = plan.config
    world = communicators.world
    # before the model, because timing takes memory of its own
    heart.enter("the start: choosing kernels")
    choice = choose_kernels(plan, world, resume.state.get("kernels"))
    say(*choice.lines)

    heart.enter("the start: building the model")
    observers = Observers(
        Phases(),
        Heartbeats(heart, Grid(*plan.layout.sizes), world.rank),
        Profile(run, plan.layout, world) if run.output.profile else None,
        Checksums(run.numbers.abft) if run.numbers.abft else None,
        telemetry or Telemetry(),
    )
    train, valid = data
    trainer = Trainer(
        plan,
        world,
        observers.groups(communicators.groups),
        train,
        valid,
        ops=build_ops(run, choice.backends, observers.kernels(kernels)),
        readers=communicators.readers,
        watch=observers.watch,
        waiting_for_data=observers.reading,
        phase=observers.telemetry.phase,
    )
    if observers.checksums:
        observers.checksums.watch(trainer.optimizer.flat)
    trainer.data_files = on_root(world, lambda: records(data))
    return Built(trainer, observers, valid_sizes(plan, valid, world))


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
    enter = watchdog.heart.enter
    say = partial(_say, plan.config.output.log_file, world)

    enter("the start: looking for a checkpoint")
    run, tokenizer = resolve_vocabulary(plan.config, world)
    nodes = find_nodes(world)
    place(watchdog, world, nodes)
    with everywhere():
        plan = MachineLimits(world, nodes).resolve(replace(plan, config=run))
    resume = find_checkpoint(plan, world)
    plan = resumed_plan(plan, resume)
    run = plan.config
    check_outputs(plan, resume, world, nodes)
    machine = configure_process(plan, world, nodes)
    communicators = connect(plan, world, nodes)
    say(*announce(notes, plan, machine, nodes.count), *plan.choices)
    with everywhere():
        say(check_memory(plan, world, nodes), iteration_line(plan))

    enter("the start: reading data")
    with telemetry.span(spans.DATALOADER):
        data = build_data(
            plan,
            communicators.groups,
            communicators.readers,
            tokenizer=tokenizer,
            order=resume.order,
        )
    train, valid = data
    saved = resume.state.get("tokenizer")
    say(
        *data_lines(plan, data, ordered=bool(resume.order.train)),
        *tokenizer_notes(run, tokenizer, saved, world),
    )

    with telemetry.span(spans.MODEL_INIT):
        trainer, observers, sizes = build(
            plan, communicators, data, resume, watchdog.heart, say, telemetry
        )
    if (run.training.eval_iters or run.training.full_validation) and not sizes:
        say(no_evaluation_note(run))

    enter("the start: loading a checkpoint")
    with telemetry.span(spans.LOAD):
        say(*resume_training(trainer, resume))
    trainer.tokenizer = tokenizer or saved
    given = run.numbers.check_weight_hash_across_dp_replicas_interval != COMPARISON_INTERVAL
    if world.size > 1 or given:
        say(comparison_line(trainer.replicas, run, communicators.groups))
    trainer.order = resume.order.or_else(plan.length.train_samples, plan.length.valid_samples)

    enter("the start")
    printing = world.rank == 0
    writer = MetricsWriter(
        plan.length.iterations,
        plan.log_interval,
        LogOutputs(
            live=run.output.log_live,
            log_file=run.output.log_file,
            writers=(*open_writers(run, plan.iteration, printing, say), telemetry),
        ),
        printing=printing,
        start_iteration=plan.iteration,
    )
    if run.numbers.rerun_on_spike:
        trainer.before_update = Rerun(trainer, writer.event).before_update
    allocator.trim()
    return Session(
        trainer,
        writer,
        iterations=plan.length.iterations,
        valid_sizes=sizes,
        profile=observers.profile,
        observers=(
            EnergyWatch(world, nodes, Counters.find()),  # first, so that joules end with the step
            MemoryWatch(world, nodes, writer.event),
            RankTimes(run, plan.layout, world, observers.phases, writer.print),
        ),
        watchdog=watchdog,
        telemetry=telemetry,
        checksums=observers.checksums,
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
