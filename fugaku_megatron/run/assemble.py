"""From a plan to communicators, data, kernels, observers and a loaded trainer.

The command, the library, --check-layout, the report and the calibration assemble their runs here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..comm.agreement import Nodes, everywhere, on_root
from ..comm.base import Comm
from ..comm.grid import Grid, Groups
from ..comm.node import share_groups
from ..costs.plan import Plan
from ..data.chat.chat_dataset import lost_lines, packing_lines
from ..data.reader_group import ReaderGroup, build_reader_group
from ..data.unchanged import records
from ..host import kernels, runtime
from ..host.observed import Phases
from ..nn.ops import FAMILIES
from ..observe.export import spans
from ..observe.export.telemetry import Telemetry
from ..observe.hang.heartbeat import Heartbeat
from ..observe.observers import Heartbeats, Observers
from ..observe.profile.profile import Profile
from ..observe.resources.memory_watch import rank_bytes
from ..training.micro_batches import reads_data
from ..training.trainer import Trainer
from .announce import data_line, skip_line, validation_line
from .data import Data, open_data, valid_sizes
from .kernel_choice import build_ops, choose_kernels
from .limits import MachineLimits
from .resume import resume_training
from .sources import Sources
from .tokenizer import resolve_vocabulary, tokenizer_notes


def _silent(*lines: str | None) -> None:
    pass


@dataclass(frozen=True)
class StartLog:
    """Log of a start. say: prints lines; note: prints lines that the library shows, too"""

    heart: Heartbeat = field(default_factory=Heartbeat)
    telemetry: Telemetry = field(default_factory=Telemetry)
    say: Callable[..., None] = _silent
    note: Callable[..., None] = _silent


class Assembly(NamedTuple):
    """This rank's run. valid_sizes: each validation set's samples."""

    trainer: Trainer
    groups: Groups
    readers: ReaderGroup | None
    observers: Observers
    valid_sizes: tuple[int, ...]


def resolve_start(
    plan: Plan, world: Comm, nodes: Nodes, find: Callable[[Plan], tuple[Plan, Sources]]
) -> tuple[Plan, Sources]:
    """Resolve vocabulary and automatic choices, and find the weights. Collective."""
    run, tokenizer = resolve_vocabulary(plan.config, world)
    with everywhere():
        plan = MachineLimits(world, nodes).resolve(replace(plan, config=run))
    plan, sources = find(plan)
    return plan, replace(sources, tokenizer=tokenizer)


def configure_process(plan: Plan, world: Comm, nodes: Nodes | None = None) -> str:
    """Set up allocator, threads and clock before the first large tensor; return the log's lines. Collective."""
    run = plan.config
    system = run.system
    parallel = run.parallel
    several_nodes = nodes is not None and nodes.count > 1
    overlaps = parallel.tp_comm_overlap or max(run.cp, run.ep) > 1
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


def connect(plan: Plan, world: Comm) -> Groups:
    """Build the process groups. Collective."""
    return share_groups(Grid(*plan.layout.sizes).groups(world), kernels)


def build_trainer(plan: Plan, world: Comm, data: Data) -> Trainer:
    """Build an unobserved trainer for a check or a measurement, with native kernels unless --kernels is torch. Collective."""
    backend = "torch" if plan.config.system.kernels == "torch" else "native"
    ops = build_ops(plan.config, dict.fromkeys(FAMILIES, backend))
    return Trainer(plan, world, connect(plan, world), *data, ops=ops)


def assemble(
    plan: Plan, world: Comm, nodes: Nodes, sources: Sources, log: StartLog | None = None
) -> Assembly:
    """Build communicators, data, kernels, observers and trainer, and load the weights. Collective."""
    log = log or StartLog()
    run = plan.config
    resume = sources.resume
    groups = connect(plan, world)
    readers = None  # random data is not read
    if not run.data.mock_data:
        needs_data = reads_data(run, groups)
        readers = build_reader_group(world, nodes, groups.data_rank, needs_data)

    log.heart.enter("the start: reading data")
    with log.telemetry.span(spans.DATALOADER):
        data = open_data(plan, groups, sources, readers)
    train, valid = data
    log.say(data_line(train), *packing_lines(train))
    log.note(*lost_lines(train, valid))
    log.say(validation_line(valid))
    if not resume.order.train:  # --skip-samples cannot change the checkpoint's sample order
        log.say(skip_line(run, train))
    saved = resume.state.get("tokenizer")
    log.note(*tokenizer_notes(run, sources.tokenizer, saved, world))

    # before the model, because timing takes memory of its own
    log.heart.enter("the start: choosing kernels")
    with log.telemetry.span(spans.MODEL_INIT):
        choice = choose_kernels(plan, world, resume.state.get("kernels"))
        log.say(*choice.lines)

        log.heart.enter("the start: building the model")
        observers = Observers(
            Phases(),
            Heartbeats(log.heart, Grid(*plan.layout.sizes), world.rank),
            Profile(run, plan.layout, world) if run.output.profile else None,
            log.telemetry,
        )
        trainer = Trainer(
            plan,
            world,
            observers.groups(groups),
            train,
            valid,
            ops=build_ops(run, choice.backends, observers.kernels(kernels)),
            readers=readers,
            watch=observers.watch,
            waiting_for_data=observers.reading,
            phase=observers.telemetry.phase,
            order=resume.order,
        )
        trainer.data_files = on_root(world, lambda: records(data))
        sizes = valid_sizes(plan, valid, world)
    if (run.training.eval_iters or run.training.full_validation) and not sizes:
        why = "no --valid-data-path"
        if run.data.data_path:
            why = f"--split {run.data.split} leaves none of the documents to validation"
        log.say(f"note: no evaluation: {why}")

    log.heart.enter("the start: loading a checkpoint")
    with log.telemetry.span(spans.LOAD):
        load_weights(trainer, sources, log)
    return Assembly(trainer, groups, readers, observers, sizes)


def load_weights(trainer: Trainer, sources: Sources, log: StartLog) -> None:
    """Load the weights that a run starts from, or resume it from a checkpoint. Collective."""
    if sources.weights is not None:
        trainer.start_from(sources.weights.dtypes, sources.weights.read)
    else:
        log.note(*resume_training(trainer, sources.resume))
    trainer.tokenizer = sources.tokenizer or sources.resume.state.get("tokenizer")
