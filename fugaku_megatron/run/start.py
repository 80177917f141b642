"""Start of a run on one rank: check, build data and trainer, resume, and run the loop."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

from ..checkpoint.lock import hold
from ..cli.arguments import Arguments
from ..comm.agreement import Nodes, everywhere, find_nodes, on_root
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..comm.node import share_groups
from ..config.faults import COMPARISON_INTERVAL
from ..config.layout import Layout
from ..config.run_config import RunConfig
from ..data.chat_dataset import lost_lines, packing_lines
from ..data.sampler import ReaderGroup
from ..data.unchanged import records
from ..host import allocator, kernels, runtime
from ..host.allocator import peak_memory_mib
from ..host.energy import Counters
from ..host.observed import Phases
from ..observe.abft import Checksums
from ..observe.energy import EnergyWatch
from ..observe.memory import MemoryWatch, check_memory, rank_bytes
from ..observe.metrics_writer import MetricsWriter, format_peak_memory
from ..observe.observers import Heartbeats, Observers, place
from ..observe.profile import Profile
from ..observe.rerun import Rerun
from ..observe.screen import append
from ..observe.stragglers import RankTimes
from ..observe.wandb_run import WandbRun
from ..observe.watchdog import Watchdog
from ..training.replicas import comparison_line
from ..observe.history import HISTORY
from ..training.trainer import Progress, Trainer
from .announce import announce, data_line, iteration_line, skip_line, validation_line
from .checks import check_outputs, check_run
from .data import (
    Data,
    build_data,
    find_reader_group,
    no_evaluation_note,
    run_length,
    samples_needed,
    valid_sizes,
)
from .kernel_choice import build_ops, choose_kernels
from .loop import Session
from .plan import settle
from .resume import find_checkpoint, resume_training, with_padding
from .tokenizer import read_tokenizer, tokenizer_notes, with_vocabulary


def configure_process(run: RunConfig, world: Comm, nodes: Nodes | None = None) -> str:
    """`runtime.init` as the run asks for it, before the first large tensor; returns the log's lines. Collective."""
    system, parallel, needed = (
        run.system,
        run.parallel,
        rank_bytes(run, Layout.from_run(run, world.size), world.rank),
    )
    far = nodes is not None and nodes.count > 1
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
            reserve_core=parallel.overlap_grad_reduce or far and overlaps,
        ),
        nodes=nodes,
        needed=needed,
    )


def build_trainer(
    run: RunConfig,
    world: Comm,
    groups: Groups,
    data: Data,
    backends: dict[str, str],
    observers: Observers,
    readers: ReaderGroup | None = None,
) -> Trainer:
    """This rank's trainer, observed."""
    train, valid = data
    trainer = Trainer(
        run,
        world,
        observers.groups(groups),
        train,
        valid,
        ops=build_ops(run, backends, observers.kernels(kernels)),
        readers=readers,
        watch=observers.watch,
        waiting_for_data=observers.reading,
    )
    if observers.checksums:
        observers.checksums.watch(trainer.optimizer.flat)
    return trainer


def open_log(run: RunConfig, world: Comm, iterations: int, progress: Progress) -> MetricsWriter:
    """The log of iterations: lines, history, TensorBoard."""
    output = run.output
    return MetricsWriter(
        iterations,
        output.log_interval,
        printing=world.rank == 0,
        start_iteration=progress.iteration,
        tensorboard_dir=output.tensorboard_dir,
        history_path=Path(output.save) / HISTORY if output.save else None,
        live=output.log_live,
        log_file=output.log_file,
        wandb=wandb_run(run),
    )


def wandb_run(run: RunConfig) -> WandbRun | None:
    """What --wandb-project asks for."""
    output = run.output
    if output.wandb_project is None or output.wandb_exp_name is None:
        return None
    return WandbRun(
        output.wandb_project,
        output.wandb_exp_name,
        output.wandb_entity,
        output.wandb_save_dir or output.save,
        asdict(run),
    )


def _say(run: RunConfig, world: Comm, *lines: str | None) -> None:
    """Print what the log says before the first iteration as soon as it is known, on rank 0, and add it to --log-file."""
    if world.rank == 0:
        print(*filter(None, lines), sep="\n", end="\n" if any(lines) else "", flush=True)
        append(run.output.log_file, *filter(None, lines))


def start(arguments: Arguments, world: Comm, watchdog: Watchdog) -> Session:
    """Check, build and resume. Raises ValueError for a user's mistake before anything expensive where that is possible."""
    enter = watchdog.heart.enter
    enter("the start: looking for a checkpoint")
    with everywhere():
        tokenizer = read_tokenizer(arguments.run, world)
        run = with_vocabulary(arguments.run, tokenizer)
        layout = Layout.from_run(run, world.size)
    nodes = find_nodes(world)
    place(watchdog, world, nodes)
    run, chosen = settle(run, layout, world, nodes)
    resume = find_checkpoint(run, world)
    run = with_padding(run, resume)
    check_outputs(run, resume, world, nodes)
    machine = configure_process(run, world, nodes)
    groups = share_groups(Grid(*layout.sizes).groups(world), kernels)
    _say(run, world, *announce(arguments, run, layout, machine, nodes.count), *chosen)
    with everywhere():
        _say(run, world, check_memory(run, layout, world, nodes), iteration_line(run, layout))
    enter("the start: reading data")
    readers = find_reader_group(run, groups, nodes)
    data = build_data(run, groups, layout, resume.progress, readers, tokenizer, resume.order)
    saved = resume.state.get("tokenizer")
    _say(
        run,
        world,
        data_line(data[0]),
        *packing_lines(data[0]),
        *lost_lines(*data),
        validation_line(data[1]),
        None if resume.order.train else skip_line(run, data[0]),
        *tokenizer_notes(run, tokenizer, saved, world),
    )
    enter("the start: choosing kernels")
    choice = choose_kernels(
        run, layout, world, resume.state.get("kernels")
    )  # before the model: timing takes memory of its own
    _say(run, world, *choice.lines)
    enter("the start: building the model")
    profile = Profile(run, layout, world) if run.output.profile else None
    checksums = Checksums(run.numbers.abft) if run.numbers.abft else None
    beats = Heartbeats(watchdog.heart, Grid(*layout.sizes), world.rank)
    observers = Observers(Phases(), beats, profile, checksums)
    trainer = build_trainer(run, world, groups, data, choice.backends, observers, readers)
    trainer.data_files = on_root(world, lambda: records(data))
    sizes = valid_sizes(run, layout, data[1], world)
    if (run.training.eval_iters or run.training.full_validation) and not sizes:
        _say(run, world, no_evaluation_note(run))
    enter("the start: loading a checkpoint")
    _say(run, world, *resume_training(trainer, resume))
    trainer.tokenizer = tokenizer or saved
    given = run.numbers.check_weight_hash_across_dp_replicas_interval != COMPARISON_INTERVAL
    if world.size > 1 or given:
        _say(run, world, comparison_line(trainer.replicas, run, groups))
    trainer.order = resume.order.or_else(*samples_needed(run, layout, resume.progress))
    enter("the start")
    iterations, _ = run_length(run, layout, resume.progress)
    writer = open_log(run, world, iterations, trainer.progress)
    if run.numbers.rerun_on_spike:
        trainer.before_update = Rerun(trainer, writer.event).before_update
    allocator.trim()
    times, memory = (
        RankTimes(run, layout, world, observers.phases, writer.print),
        MemoryWatch(world, nodes, writer.event),
    )
    return Session(
        trainer,
        writer,
        iterations,
        sizes,
        profile,
        times,
        memory,
        EnergyWatch(world, nodes, Counters.find()),
        watchdog,
        checksums,
    )


def pretrain(arguments: Arguments, world: Comm, watchdog: Watchdog) -> None:
    """The run, from checked flags to the last checkpoint. Collective over `world`."""
    run, lines = check_run(arguments.run, world)
    arguments = replace(arguments, run=run, notes=(*arguments.notes, *lines))
    with hold(
        arguments.run.output.save,
        world,
        lambda: watchdog.heart.enter("the start: waiting for the lock of --save"),
    ):
        _train(start(arguments, world, watchdog), world)


def _train(session: Session, world: Comm) -> None:
    """From the first iteration to the last checkpoint. Collective over `world`."""
    try:
        with session.signals:
            session.evaluate_only() if session.trainer.run.training.skip_train else session.run()
        memory = world.gather_object(peak_memory_mib())
        if memory is not None:
            session.writer.print(format_peak_memory(memory))
    finally:
        session.trainer.close()
        session.writer.close()
