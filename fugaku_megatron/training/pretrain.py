"""A run on one rank: check, build data and trainer, resume, and hand over to the loop.

Left out: the loop (`session`), MPI start-up (`comm.launch`). Entry point: pretrain_gpt.py
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..checkpoint.lock import hold
from ..checkpoint.save import check_replaces, check_writable
from ..comm.agreement import Nodes, everywhere, find_nodes, on_root
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..comm.node import share_groups
from ..config import batches
from ..config.arguments import Arguments
from ..config.batches import ParamSchedule
from ..config.checks import check
from ..config.command_line import check_file
from ..config.groups import COMPARISON_INTERVAL
from ..config.layout import Layout
from ..config.run_config import ParallelConfig, RunConfig
from ..costs import accounting, memory
from ..costs.run_schedule import recompute_name
from ..data.build import listed_data, parse_data_path
from ..data.chat_dataset import check_mask_file, lost_lines, packing_lines
from ..data.dataset import NEW_ORDER, DataOrder, Dataset, MockDataset, TokenArrays, ValidationSets
from ..data.index_cache import IN_MEMORY, IndexCache
from ..data.indexed import check_files
from ..data.marks import mark
from ..data.sampler import ReaderGroup, build_reader_group
from ..data.unchanged import records
from ..host import allocator, kernels, runtime
from ..host.allocator import node_bytes, peak_memory_mib
from ..host.energy import Counters
from ..host.observed import Phases
from ..logs.metrics import MetricsWriter, WandbRun, append, format_peak_memory, read_run_history
from ..logs.run_log import format_run
from ..watchdog.watch import Watchdog
from .machine_faults import Checksums, Rerun
from .observers import Heartbeats, Observers, Profile, place, profiled_ranks
from .rank_watch import (
    EnergyWatch,
    MemoryWatch,
    RankTimes,
    check_memory,
    data_line,
    iteration_line,
    rank_bytes,
    skip_line,
    validation_line,
)
from .replicas import comparison_line
from .resume import Resume, find_checkpoint, resume_training, with_padding
from .session import HISTORY, Session
from .start_choices import (
    build_ops,
    check_same_run,
    choose_kernels,
    end_of_document,
    read_tokenizer,
    settle,
    tokenizer_notes,
    with_vocabulary,
)
from .step import datasets_of, reads_data
from .train import Progress, Trainer

Data = tuple[
    Dataset | None, Dataset | None
]  # training and validation samples, where this rank reads them


def evaluations(run: RunConfig, iterations: int) -> int:
    """How many evaluations a run of `iterations` makes: every --eval-interval, and one at the end. With --skip-train it is one."""
    training = run.training
    left_out = max(0, -(-(training.start_eval_at_iter or 0) // training.eval_interval) - 1)
    count = (
        1 if training.skip_train else max(0, iterations // training.eval_interval + 1 - left_out)
    )
    return count if training.eval_iters else 0


def samples_to_validate(run: RunConfig, layout: Layout, count: int) -> int | None:
    """Samples of the validation data of so many evaluations; None: all there are. Random ones have no end, so that they are as many
    as one evaluation takes."""
    full = run.training.full_validation
    batches_needed = (1 if full else count) * run.training.eval_iters
    return None if full and not run.data.mock_data else batches_needed * layout.eval_batch_size(run)


def valid_sizes(
    run: RunConfig, layout: Layout, valid: Dataset | None, world: Comm
) -> tuple[int, ...]:
    """Samples of each validation set, on every rank; none without validation data. Collective.

    Raises ValueError on every rank for a set that --full-validation cannot make a batch of.
    """
    mine = (
        []
        if valid is None
        else [*map(len, valid.datasets)]
        if isinstance(valid, ValidationSets)
        else [len(valid)]
    )
    sizes = max(world.all_gather_object(tuple(mine)), key=len)
    with everywhere():
        layout.evaluated(run, sizes, 0)
    return sizes


def run_length(run: RunConfig, layout: Layout, progress: Progress) -> tuple[int, int]:
    """(iterations, samples) at the end of a run that stands at `progress`."""
    return batches.run_length(
        run, layout.global_batch_size(run), progress.iteration, progress.consumed_samples
    )


def find_reader_group(run: RunConfig, groups: Groups, nodes: Nodes) -> ReaderGroup | None:
    """Who reads the data for this rank; None where it needs none, and where no file is read. Collective."""
    return (
        None
        if run.data.mock_data
        else build_reader_group(groups.world, nodes, groups.data_rank, reads_data(run, groups))
    )


def samples_needed(run: RunConfig, layout: Layout, progress: Progress) -> tuple[int, int | None]:
    """Return the samples of training and validation data of a run that stands at `progress`, as of `open_data`."""
    size = layout.global_batch_size(run)
    iterations, end = run_length(run, layout, progress)
    valid_samples = samples_to_validate(run, layout, evaluations(run, iterations))
    return batches.requested_samples(run, size, end), valid_samples


def build_data(
    run: RunConfig,
    groups: Groups,
    layout: Layout,
    progress: Progress | None = None,
    readers: ReaderGroup | None = None,
    tokenizer: dict[str, Any] | None = None,
    order: DataOrder = NEW_ORDER,
) -> Data:
    """Training and validation samples on the ranks that read data, (None, None) elsewhere. Collective.

    progress: where a resumed run stands. readers: of this rank; without them every rank that needs data reads it. tokenizer:
    what is known of the run's (`data.tokenizer.identity`). order: that a resumed run began with.
    """
    needed = samples_needed(run, layout, progress or Progress())
    if run.training.skip_train:  # whose validation data has the order of one evaluation
        order = order._replace(valid=None)
    return open_data(run, groups, needed, readers, tokenizer=tokenizer, order=order)


def open_data(
    run: RunConfig,
    groups: Groups,
    samples: tuple[int, int | None],
    readers: ReaderGroup | None = None,
    arrays: Mapping[str, TokenArrays] | None = None,
    tokenizer: dict[str, Any] | None = None,
    order: DataOrder = NEW_ORDER,
) -> Data:
    """`build_data` for these numbers of training and validation samples; a data set of 0 samples is None.

    None: every validation sample once.

    arrays: documents that are in no files, by the names that the run's data flags have for them.
    """
    train, valid = _open(run, groups, samples, readers, arrays or {}, order)
    if not run.data.marks_documents:
        return train, valid
    eod, masks_loss = end_of_document(run.data, tokenizer), run.data.eod_mask_loss
    return mark(train, eod, masks_loss), mark(valid, eod, masks_loss)


def _open(
    run: RunConfig,
    groups: Groups,
    samples: tuple[int, int | None],
    readers: ReaderGroup | None,
    arrays: Mapping[str, TokenArrays],
    order: DataOrder,
) -> Data:
    """`open_data` without marks."""
    reads = readers.reads if readers else reads_data(run, groups)
    reading = groups.world.split(0 if reads else 1, groups.world.rank)
    if not reads:
        return None, None
    if run.data.mock_data:
        model, seed = run.model, run.training.seed
        assert model.vocab_size is not None, "with_vocabulary has settled it"
        train, valid = (
            MockDataset(model.vocab_size, model.seq_length, count, seed + number) if count else None
            for number, count in enumerate(samples)
        )
        return train, valid
    cache = IndexCache(
        run.data.data_cache_path, sys.maxsize if arrays else IN_MEMORY
    )  # no file to keep an index next to
    begun = (*order, None)
    return datasets_of(run, (*samples, 0), reading, node_bytes(), cache, arrays, begun)[:2]


def check_early(run: RunConfig, world_size: int) -> None:
    """Everything that can be checked without files: the same ValueError on every rank."""
    check(
        run.data.mock_data or run.data.files is not None,
        "the run has no data: pass --data-path, a prefix that fugaku-megatron "
        "preprocess wrote, or --mock-data",
    )
    batches.length(run.training, batches.RampUp(1, 1, 0, 1))
    ranks = run.output.profile_ranks
    check(
        not run.output.profile or max(ranks) < world_size,
        f"--profile-ranks {' '.join(map(str, ranks))}: the run has ranks 0 to "
        f"{world_size - 1}: pass some of these",
    )
    chunk = run.system.fp16_accumulation_chunk
    check(
        chunk is None or kernels.has_fp16_arithmetic(),
        f"--fp16-accumulation-chunk {chunk} needs FP16 arithmetic, which "
        f"instruction set {kernels.active()} lacks: leave it out, or set FUGAKU_MEGATRON_TARGET=portable for a slow emulation",
    )
    check(
        not run.system.splits_fp32 or kernels.has_bf16_arithmetic(),
        "--fp32-matmul bf16x3 needs BF16 arithmetic, which "
        f"instruction set {kernels.active()} lacks: leave it out",
    )
    ParamSchedule.from_run(run, Layout.from_run(run, world_size).global_batch_size(run))


def with_listed_data(run: RunConfig, world: Comm) -> RunConfig:
    """The run with the data that --data-args-path or --per-split-data-args-path lists; one rank reads the file. Collective."""
    files = run.data.data_args_path, run.data.per_split_data_args_path
    if not any(files):
        return run
    listed = on_root(world, lambda: listed_data(*files))
    changes: dict[str, Any] = {"data_args_path": None, "per_split_data_args_path": None, **listed}
    return replace(run, data=replace(run.data, **changes))


def check_data(run: RunConfig, arrays: Collection[str] = ()) -> None:
    """Raise ValueError for data files that are not there, before anything expensive.

    One rank looks.

    arrays: names of documents that are in no files.
    """
    for name, path in run.data.paths.items():
        for prefix in parse_data_path(path, name)[0]:
            if prefix in arrays:
                continue
            check_files(prefix)
            if run.data.sft:
                check_mask_file(prefix)


def check_run(
    run: RunConfig, world: Comm, arrays: Collection[str] = ()
) -> tuple[RunConfig, list[str]]:
    """Return the run with its listed data, and lines of the log. Collective.

    Make all checks that need neither a model nor a checkpoint. ValueError on every rank.

    arrays: names of documents that are in no files.
    """
    with everywhere():
        check_early(run, world.size)
    run = with_listed_data(run, world)
    lines = check_same_run(run, world)
    on_root(world, lambda: check_data(run, arrays))
    return run, lines


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
        allocator=system.allocator,
        thread_affinity=system.thread_affinity,
        nodes=nodes,
        cpu_frequency=system.cpu_frequency,
        flush_denormals=run.training.use_flush_denormal,
        reserve_core=parallel.overlap_grad_reduce or far and overlaps,
        needed=needed,
    )


def announce(
    arguments: Arguments, run: RunConfig, layout: Layout, machine: str, nodes: int
) -> list[str]:
    """What the log says before the first iteration."""
    size = layout.global_batch_size(run)
    hardware, model = accounting.hardware_flops(run, size), accounting.model_flops(run, size)
    overlaps = ["grad reduce"] * run.parallel.overlap_grad_reduce + [
        "param gather"
    ] * run.parallel.overlap_param_gather
    schedule = ParamSchedule.from_run(run, size)
    return [
        *(f"note: {note}" for note in (*arguments.notes, *schedule.notes(run.training))),
        machine,
        format_run(run, layout, nodes),
        f"world size {layout.world_size}: {layout.words}; "
        f"{run.precision.name}"
        + " with bf16x3 matmuls" * run.system.splits_fp32
        + f", ZeRO stage {run.parallel.zero_stage}, recompute {recompute_name(run)}"
        + ", sequence parallel" * (accounting.sequence_parts(run, layout.tp) > 1)
        + ", overlap: " * bool(overlaps)
        + " and ".join(overlaps),
        f"parameters {accounting.parameters(run):,}, padded vocabulary {accounting.padded_vocab_size(run.model, layout.tp)}"
        + ", padding masked in the loss" * run.model.masks_padding
        + _adapters_text(run),
        f"FLOPs per iteration of {size} samples: {hardware:.4e} hardware (recompute counted; TFLOPs in the log, per rank), "
        f"{model:.4e} model (no recompute, causal attention once); ratio {model / hardware:.3f}",
    ]


def _adapters_text(run: RunConfig) -> str:
    """How many of the parameters adapters have."""
    trained = (
        sum(memory.adapter_parameters(replace(run, parallel=ParallelConfig()), 1))
        if run.lora.on
        else 0
    )
    return f"; trained are {trained:,} of adapters of rank {run.lora.lora_rank}" * run.lora.on


def check_outputs(run: RunConfig, resume: Resume, world: Comm, nodes: Nodes) -> None:
    """Raises ValueError on every rank for a place to write that takes no file, or whose checkpoints would be lost. Collective."""
    output = run.output
    if output.save:
        check_replaces(output.save, output.load, resume.iteration, world)
        check_writable(output.save, world, ranks=(world.rank,) if nodes.leads else ())
        history = Path(output.save) / HISTORY
        on_root(world, lambda: read_run_history(history))
    if output.save and output.save_local:
        check_writable(
            output.save_local, world, "--save-local", (world.rank,) if nodes.leads else ()
        )
    if output.tensorboard_dir:
        check_writable(output.tensorboard_dir, world, "--tensorboard-dir", (0,))
    on_root(world, lambda: check_file("--log-file", output.log_file))
    on_root(world, lambda: check_file("--log-ranks", output.log_ranks))
    if output.profile:
        check_writable(
            output.profile_dir,
            world,
            "--profile-dir",
            profiled_ranks(output, Layout.from_run(run, world.size)),
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


def no_evaluation_note(run: RunConfig) -> str:
    """Why a run that asks for evaluations has no validation data."""
    why = (
        f"--split {run.data.split} leaves none of the documents to validation"
        if run.data.data_path
        else "no --valid-data-path"
    )
    return f"note: no evaluation: {why}"


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
