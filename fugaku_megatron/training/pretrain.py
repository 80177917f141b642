"""A run on one rank: check, build data and trainer, resume, and hand over to the loop.

Left out: the loop (`session`), MPI start-up (`comm.launch`). Entry point: pretrain_gpt.py   Test: pytest tests/mpi
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

from ..checkpoint.load import read_state
from ..checkpoint.manifest import latest_iteration
from ..checkpoint.save import check_replaces, check_writable
from ..comm.agreement import everywhere, on_root
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..comm.launch import describe
from ..data.dataset import Dataset, MockDataset, build_datasets
from ..data.tokenizer import build_tokenizer
from ..host import allocator, kernels, placement, runtime
from ..host.profiler import Profiler
from ..logs.metrics import MetricsWriter, format_peak_memory, peak_memory_mib
from ..logs.run_log import format_run
from ..nn import autotune, ops
from ..run import accounting, batches
from ..run.accounting import Layout
from ..run.arguments import Arguments
from ..run.config import RunConfig, check
from .optim import DTYPES
from .session import HISTORY, Session
from .train import Progress, Trainer, reads_data


def with_vocabulary(run: RunConfig, world: Comm) -> RunConfig:
    """The run with its vocabulary size known: --vocab-size, or the tokenizer's. One rank reads the files.

    Raises ValueError on every rank when neither is given or the tokenizer has more tokens than --vocab-size.
    """
    data, given = run.data, run.model.vocab_size
    if data.vocab_file is None:
        check(given is not None, "the vocabulary size is unknown: give --vocab-file and --merge-file, or --vocab-size")
        return run
    size = on_root(world, lambda: build_tokenizer(data.tokenizer_type, data.vocab_file, data.merge_file).vocab_size)
    check(given is None or given >= size, f"--vocab-size {given} is below the {size} tokens of --vocab-file {data.vocab_file}: "
          f"give at least {size}, or leave it out")
    return replace(run, model=replace(run.model, vocab_size=given or size))


def evaluations(run: RunConfig, iterations: int) -> int:
    """How many evaluations a run of `iterations` makes: every --eval-interval, and one at the end."""
    return (iterations // run.training.eval_interval + 1) if run.training.eval_iters else 0


def run_length(run: RunConfig, layout: Layout, progress: Progress) -> tuple[int, int]:
    """(iterations, samples) at the end of a run that stands at `progress`."""
    ramp = batches.RampUp.of(run.batch, layout.global_batch_size(run))
    return batches.length(run.training, ramp, progress.iteration, progress.consumed_samples)


def build_data(run: RunConfig, groups: Groups, layout: Layout,
               progress: Progress | None = None) -> tuple[Dataset | None, Dataset | None]:
    """Training and validation samples on the ranks that read data, (None, None) elsewhere. Collective.

    progress: where a resumed run stands.
    """
    size = layout.global_batch_size(run)
    iterations, samples = run_length(run, layout, progress or Progress())
    valid_samples = evaluations(run, iterations) * run.training.eval_iters * size
    readers = groups.world.split(0 if reads_data(groups) else 1, groups.world.rank)
    if not reads_data(groups):
        return None, None
    model, seed = run.model, run.training.seed
    if run.data.mock_data:
        return (MockDataset(model.vocab_size, model.seq_length, samples, seed),
                MockDataset(model.vocab_size, model.seq_length, valid_samples, seed + 1) if valid_samples else None)
    train, valid, _ = build_datasets(run.data.data_path, run.data.split, model.seq_length, (samples, valid_samples, 0), seed,
                                     model.vocab_size, readers)
    return train, valid


def check_early(arguments: Arguments, world_size: int) -> Layout | None:
    """Everything that can be checked without files: the same ValueError on every rank."""
    run = arguments.run
    check(run.data.mock_data or run.data.data_path is not None, "give --data-path (see tools/preprocess_data.py) or --mock-data")
    batches.length(run.training, batches.RampUp(1, 1, 0, 1))
    ranks = run.output.profile_ranks
    check(not run.output.profile or max(ranks) < world_size, f"--profile-ranks {' '.join(map(str, ranks))}: the run has ranks 0 to "
          f"{world_size - 1}: give some of them")
    chunk = run.system.fp16_accumulation_chunk
    check(chunk is None or kernels.has_fp16_arithmetic(), f"--fp16-accumulation-chunk {chunk} needs FP16 arithmetic, which "
          f"instruction set {kernels.active()} lacks: leave it out, or set FUGAKU_MEGATRON_TARGET=portable for a slow emulation")
    Layout.of(run, world_size)


def configure_process(run: RunConfig, world: Comm) -> str:
    """Memory, threads, cores, clock and denormals of this rank, before its first large tensor; returns the log's line.

    Collective; ValueError on every rank for a clock that is not the one asked for.
    """
    system, mask = run.system, sorted(os.sched_getaffinity(0))
    memory = allocator.tune(system.allocator)
    everyone = world.all_gather_object((platform.node(), mask))
    here = [rank for rank, (node, _) in enumerate(everyone) if node == platform.node()]
    with everywhere():
        place = placement.place(mask, [everyone[rank][1] for rank in here], here.index(world.rank), os.environ,
                                placement.cpu_quota(), system.thread_affinity)
        placement.apply(place, run.training.use_flush_denormal)
        ghz = runtime.check_clock(system.cpu_frequency, place.cpus or mask)
    return runtime.machine_summary(describe(world), len(mask), len(here), place.threads, bool(place.cpus), memory, ghz)


def choose_kernels(run: RunConfig, layout: Layout, world: Comm, saved: dict[str, str] | None = None) -> list[str]:
    """Set the kernels of every operation, the same on all ranks; returns the log's lines. Collective.

    A resumed run keeps the automatic choice that it was `saved` with: other kernels have other last bits.
    """
    wanted = run.system.kernels
    if wanted == "auto" and saved:
        ops.use(saved)
        return [f"kernels: as saved, {', '.join(f'{family} {name}' for family, name in saved.items())}"]
    if wanted != "auto":
        ops.use(wanted)
        return [f"kernels: {wanted} (instruction set {kernels.active()})"]
    timings = autotune.measure(run, layout.tp, DTYPES[run.precision.name])
    ops.use(world.broadcast_object({t.family: t.faster for t in timings}))
    return [f"kernels: auto, forward and backward on this run's shapes, rank 0 (instruction set {kernels.active()})",
            *autotune.table(timings)]


def choose_products(run: RunConfig) -> list[str]:
    """Set whether packed weights are kept and where linear layers sum in FP16; returns the log's lines. Only the C++ kernels can
    do the latter, so they then run these layers."""
    ops.use_packed_weights(run.system.cache_packed_weights)
    chunk = run.system.fp16_accumulation_chunk or 0
    ops.use_fp16_accumulation(chunk)
    if not chunk:
        return []
    ops.use({"gemm": "native"})
    return [f"kernels: gemm native, sums of {chunk} products in FP16, their sums in FP32"]


def announce(arguments: Arguments, run: RunConfig, layout: Layout, machine: str, nodes: int) -> list[str]:
    """What the log says before the first iteration."""
    size = layout.global_batch_size(run)
    hardware, model = accounting.hardware_flops(run, size), accounting.model_flops(run, size)
    return [
        *(f"note: {note}" for note in arguments.notes),
        machine,
        format_run(run, layout, nodes),
        f"world size {layout.world_size}: data parallel {layout.dp}, pipeline parallel {layout.pp}, tensor parallel {layout.tp}; "
        f"{run.precision.name}, ZeRO stage {run.parallel.zero_stage}, recompute {run.training.recompute_granularity or 'none'}",
        f"parameters {accounting.parameters(run):,}, padded vocabulary {accounting.padded_vocab_size(run.model, layout.tp)}",
        f"FLOPs per iteration of {size} samples: {hardware:.4e} hardware (recompute counted; TFLOPs in the log, per rank), "
        f"{model:.4e} model (no recompute, causal attention once); ratio {model / hardware:.3f}",
    ]


def start(arguments: Arguments, world: Comm) -> Session:
    """Check, build and resume. Raises ValueError for a user's mistake before anything expensive where that is possible."""
    with everywhere():
        check_early(arguments, world.size)
        run = with_vocabulary(arguments.run, world)
        layout = Layout.of(run, world.size)
    output, state = run.output, {}
    found = output.load and (output.ckpt_step or on_root(world, lambda: latest_iteration(output.load)))
    if found:
        state = read_state(output.load, found, world)
    progress = Progress(**state.get("progress", {}))
    if output.save:
        check_replaces(output.save, output.load, found, world)
        check_writable(output.save, world)
    if output.tensorboard_dir:
        check_writable(output.tensorboard_dir, world, "--tensorboard-dir", (0,))
    if output.profile:
        check_writable(output.profile_dir, world, "--profile-dir", output.profile_ranks)
    machine = configure_process(run, world)
    groups = Grid(world.size, layout.tp, layout.pp).groups(world)
    train, valid = build_data(run, groups, layout, progress)
    chosen = choose_kernels(run, layout, world, state.get("kernels"))  # before the model: timing takes memory of its own
    profiler = Profiler() if output.profile and world.rank in output.profile_ranks else None
    if profiler:
        trainer = Trainer(run, world, profiler.groups(groups), train, valid, watch=profiler.watch)
    else:
        trainer = Trainer(run, world, groups, train, valid)
    lines = announce(arguments, run, layout, machine, len(set(world.all_gather_object(platform.node()))))
    has_valid = any(world.all_gather_object(valid is not None))
    if run.training.eval_iters and not has_valid:
        lines.append(f"note: no evaluation: --split {run.data.split} leaves none of the documents to validation")
    if found:
        trainer.load(output.load, found)
        seed = state["rng"]["seed"]
        lines.append(f"resumed from {output.load} at iteration {trainer.progress.iteration}")
        if seed != run.training.seed:
            lines.append(f"note: --seed is {run.training.seed}, the checkpoint's {seed}: the order of the data and the dropout "
                         "masks are others from here on")
    elif output.load:
        lines.append(f"no checkpoint in --load {output.load}: starting anew")
    lines += chosen + choose_products(run)
    iterations, _ = run_length(run, layout, progress)
    writer = MetricsWriter(iterations, output.log_interval, printing=world.rank == 0, start_iteration=trainer.progress.iteration,
                           tensorboard_dir=output.tensorboard_dir,
                           history_path=Path(output.save) / HISTORY if output.save else None)
    for line in lines:
        writer.print(line)
    allocator.trim()
    return Session(trainer, writer, iterations, has_valid, profiler)


def pretrain(arguments: Arguments, world: Comm) -> None:
    """The run, from checked flags to the last checkpoint. Collective over `world`."""
    session = start(arguments, world)
    try:
        with session.signals:
            session.run()
        memory = world.gather_object(peak_memory_mib())
        if memory is not None:
            session.writer.print(format_peak_memory(memory))
    finally:
        session.trainer.close()
        session.writer.close()
