"""One rank's trainer: build its stage, step, evaluate, save and load."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.load import Checkpoint, load_shards, open_checkpoint
from ..checkpoint.manifest import Description, Folders
from ..checkpoint.node_copy import node_first_steps
from ..checkpoint.save import (
    BackgroundSave,
    CheckLock,
    Snapshot,
    Steps,
    run_steps,
    save_steps,
    write_shards,
)
from ..checkpoint.shards import WEIGHT, Shard, fill_shards
from ..checkpoint.trusted import REPLICAS, Fault, record_fault
from ..comm.agreement import agree, on_root
from ..comm.base import Comm
from ..comm.grid import Groups
from ..config.batches import sizes_of
from ..config.fields import check
from ..config.layout import Layout, evaluation_run
from ..config.model import architecture, with_block
from ..config.param_schedule import ParamSchedule
from ..config.run_config import RunConfig
from ..config.sample_rules import Skips
from ..costs import run_schedule
from ..costs.activations import sequence_shards
from ..costs.buckets import zero_shards
from ..costs.stages import virtual_stage_sizes
from ..data.dataset import NEW_ORDER, DataOrder, Dataset
from ..data.marks import TokenCounts
from ..data.reader_group import ReaderGroup
from ..data.unchanged import Record, check_unchanged
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from ..optim.optimizer import Optimizer
from ..pipeline.executor import Executor
from ..pipeline.schedule import Schedule
from ..text.named_files import JsonObject
from . import expert_counts
from .micro_batches import MicroBatchWindow, RunBatches, Source
from .replicas import Difference, Replicas, ReplicasDiffer
from .step import StepExecutor, StepShape

# Prefixes of keys in a checkpoint.
WEIGHTS = (WEIGHT,)
MOMENTS = ("exp_avg/", "exp_avg_sq/")

Watch = Callable[[Executor], Executor]


def _no_phase(name: str, **attributes: float) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Progress:
    """A run's position, saved in every checkpoint.

    unscheduled: consumed samples that the schedules do not count, such as of skipped iterations.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nans: int = 0
    unscheduled: int = 0

    @property
    def scheduled_samples(self) -> int:
        return self.consumed_samples - self.unscheduled


@dataclass(frozen=True)
class ForeignModel:
    """Another program's model, to which adapters belong.

    names, read: see `fill_shards`. carried: directory with tokenizer files.
    """

    directory: Path
    names: Collection[str]
    read: Callable[[str], Tensor]
    carried: Path | None = None
    iteration: None = None


@dataclass(frozen=True)
class IterationResult:
    """A training iteration's figures, equal on every rank.

    consumed: samples before it. work: of marked samples; only its share is this rank's own.
    experts: `gather_loads`. z_loss: share of --use-z-loss in the loss, None without the flag.
    """

    loss: float
    grad_norm: float
    num_zeros: float
    skipped: bool
    learning_rate: float
    loss_scale: float
    global_batch_size: int
    consumed: int
    seconds: float
    work: TokenCounts | None = None
    experts: Tensor | None = None
    z_loss: float | None = None

    @property
    def nothing_counted(self) -> bool:
        return self.work is not None and not self.work.counted


class GlobalBatch(NamedTuple):
    """Samples in an iteration that has begun. consumed: samples before it."""

    source: Source | None
    work: TokenCounts | None
    consumed: int


def uncounted_line(iteration: int, result: IterationResult) -> str:
    return (
        f"warning: iteration {iteration} has 0 counted tokens: no label of its "
        f"{result.global_batch_size} samples counts in the loss, so nothing was learned"
    )


@dataclass
class Trainer:
    """One rank in a run.

    train, valid: datasets, on ranks where `reads_data` is true.
    readers: ranks that share samples; only the first one needs the datasets.
    make_schedule: (run, micro-batches) -> training schedule.
    waiting_for_data: context around every fetch of samples.
    before_update: (samples consumed, loss) -> loss, called between gradient reduction and update;
        it may replace the gradients.
    phase: name -> context around "forward_backward" and "optimizer" of an iteration, and around an iteration of "evaluate".
    tokenizer, data_files: records for checkpoints. order: samples for which the order of the data
        was first made. check_lock: raises ValueError on rank 0 once another job writes into --save.
    """

    run: RunConfig
    layout: Layout
    world: Comm
    groups: Groups
    train: Dataset | None = None
    valid: Dataset | None = None
    progress: Progress = field(default_factory=Progress)
    ops: Ops = field(default_factory=Ops.build)
    watch: Watch | None = None
    make_schedule: Callable[[RunConfig, int], Schedule] = run_schedule.build_schedule
    readers: ReaderGroup | None = None
    waiting_for_data: Callable[[], AbstractContextManager[None]] = nullcontext
    before_update: Callable[[int, float], float] | None = None
    phase: Callable[..., AbstractContextManager[object]] = _no_phase
    tokenizer: JsonObject | None = None
    order: DataOrder = NEW_ORDER
    data_files: list[Record] = field(default_factory=list)
    check_lock: CheckLock = bool

    def __post_init__(self) -> None:
        run = self.run
        self.stage = Stage(run, self.groups, self.ops)
        self.optimizer = Optimizer(self.stage, run, self.groups, self.ops)
        self.replicas = Replicas(self.optimizer, self.stage, self.groups)
        self.ramp = sizes_of(run, self.layout.global_batch_size(run))
        self.skips = Skips.parse(run.data.skip_samples)
        self.param_schedule = ParamSchedule.from_run(run, self.layout.global_batch_size(run))
        self.folders = Folders(self.world)  # of checkpoints
        self._batches: Source | None = None
        self._shift = 0  # see `RunBatches`
        self.base: JsonObject = {}  # of adapters: the model that they belong to
        background = run.output.save and run.output.async_save
        self._snapshot = Snapshot(self._saved_shards()) if background else None

    def batch_size(self, consumed: int) -> int:
        return self.ramp(consumed)

    # One step ------------------------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> RunBatches:
        return RunBatches(
            self.run,
            self.layout,
            self.groups,
            self.readers,
            self.waiting_for_data,
            self._shift,
        )

    def _execute(
        self,
        samples: GlobalBatch,
        lists: Schedule,
        factor: float,
        training: bool,
        stage: Stage | None = None,
        watch: Watch | None = None,
    ) -> list[Tensor]:
        """Run a schedule; return this rank's micro-batch losses.

        Their mean over all ranks is the mean over counted labels.
        """
        run = self.run
        source, work, consumed = samples
        microbatches = lists.microbatches * self.layout.replicas
        sequence = run.model.seq_length // (sequence_shards(run) * self.layout.cp)
        count = tokens = None
        if work is not None:
            count = max(work.counted, 1) / microbatches
            unpadded = work.samples * run.model.seq_length - work.padded
            tokens = max(unpadded, 1) * self.layout.cp / microbatches
        shape = StepShape(
            activation=(sequence, run.batch.micro_batch_size, run.model.hidden_size),
            dtype=PARAMETER_DTYPES[run.precision.name],
            loss_factor=factor,
            training=training,
            recompute=run.training.recompute_granularity if training else None,
            count=count,
            tokens=tokens,
        )
        window = MicroBatchWindow(
            self.batches.micro_batches(source, consumed, lists.microbatches), len(self.stage.chunks)
        )
        executor = StepExecutor(
            stage or self.stage, self.groups.pp, window, shape, watch or self.watch
        )
        return executor.run(lists)

    def _mean_loss(self, losses: list[Tensor]) -> float:
        loss = torch.zeros((), dtype=torch.float64)
        if losses:
            loss = torch.stack(losses).double().mean()
        if self.stage.last:
            self.groups.dp.all_reduce(loss).div_(self.groups.dp.size)
        return self.groups.pp.broadcast(loss, root=self.stage.placement.last_stage).item()

    def train_step(self) -> IterationResult:
        """Run one iteration: forward and backward passes, gradient reduction, update. Collective."""
        started = time.perf_counter()
        consumed = self.progress.consumed_samples
        size = self.batch_size(consumed)
        scale = self.optimizer.scaler.scale
        if self._batches is None:
            self._batches = self.batches.open(
                self.train, consumed, self.batch_size, self.skips.samples
            )
        with self.phase("forward_backward"):
            loss, work = self._gradients(self._batches, consumed, scale)
        experts = expert_counts.gather_loads(
            self.stage, self.run, self.groups, self.layout.microbatches(self.run, size)
        )
        z_loss = self._pop_z_loss() if self.run.model.z_loss else None
        if self.before_update:
            loss = self.before_update(consumed, loss)
        scheduled = self.progress.scheduled_samples
        lr = self.param_schedule.learning_rate(scheduled)
        with self.phase("optimizer"):
            step = self.optimizer.step(
                lr,
                self.param_schedule.weight_decay(scheduled),
                self.run.output.log_num_zeros_in_grad,
                self.param_schedule.decoupled.learning_rate(scheduled),
            )
        self.progress.iteration += 1
        self.progress.consumed_samples = self.skips.samples(consumed, size)[-1] + 1
        if step.skipped:
            self.progress.skipped += 1
            self.progress.unscheduled += self.progress.consumed_samples - consumed
        if math.isnan(loss):
            self.progress.nans += 1
        return IterationResult(
            loss=loss,
            grad_norm=step.grad_norm,
            num_zeros=step.num_zeros,
            skipped=step.skipped,
            learning_rate=lr,
            loss_scale=scale,
            global_batch_size=size,
            consumed=consumed,
            seconds=time.perf_counter() - started,
            work=work,
            experts=experts,
            z_loss=z_loss,
        )

    def _pop_z_loss(self) -> float:
        """Return and clear the iteration's mean z-loss. Collective."""
        z_losses: list[Tensor] = []
        if self.stage.last:
            z_losses = list(self.stage.last.z_losses.values())
            self.stage.last.z_losses.clear()
        return self._mean_loss(z_losses)

    def _gradients(
        self,
        source: Source | None,
        consumed: int,
        scale: float,
        stage: Stage | None = None,
        watch: Watch | None = None,
    ) -> tuple[float, TokenCounts | None]:
        """Compute and reduce an iteration's gradients; return the mean loss, and the work of marked samples."""
        work = self.batches.begin(source)
        microbatches = self.layout.microbatches(self.run, self.batch_size(consumed))
        self.optimizer.zero_grad(microbatches)
        expert_counts.reset_loads(self.stage)
        if self.stage.last:
            self.stage.last.z_losses.clear()
        losses = self._execute(
            GlobalBatch(source, work, consumed),
            self.make_schedule(self.run, microbatches),
            factor=scale / (microbatches * self.layout.replicas),
            training=True,
            stage=stage,
            watch=watch,
        )
        self.optimizer.reduce_gradients()
        # Before the update: its weight gathers would precede the loss on their communicator.
        return self._mean_loss(losses), work

    def repeat(
        self,
        consumed: int,
        scale: float,
        stage: Stage | None = None,
        watch: Watch | None = None,
        shift: int = 0,
    ) -> float:
        """Recompute the gradients in the iteration that began at sample `consumed`; return its mean
        loss. Collective.

        stage: another stage with the same parameters. shift: see `RunBatches`.
        """
        own = self.watch
        self._shift = shift
        source = self.batches.open(self.train, consumed, self.batch_size, self.skips.samples)

        def both(executor: Executor) -> Executor:
            watched = own(executor) if own else executor
            return watch(watched) if watch else watched

        try:
            loss, _ = self._gradients(source, consumed, scale, stage, both)
        finally:
            self._shift = 0
        if source:
            source.close()
        return loss

    @torch.no_grad()
    def evaluate(self, dataset: Dataset | None, first: int, iterations: int) -> float:
        """Return the mean loss over counted labels of `iterations` global batches from sample `first` on, or NaN. Collective."""
        if self.run.training.eval_micro_batch_size:
            return self._with_eval_micro_batches().evaluate(dataset, first, iterations)
        size = self.layout.eval_batch_size(self.run)
        lists = run_schedule.build_schedule(
            self.run, self.layout.microbatches(self.run, size)
        ).forward_only()
        total = 0.0
        weights = 0
        source = self.batches.open(dataset, first, lambda _: size)
        for i in range(iterations):
            work = self.batches.begin(source)
            weight = 1 if work is None else work.counted
            samples = GlobalBatch(source, work, first + i * size)
            with self.phase("evaluate", eval_iteration=i + 1):
                losses = self._execute(samples, lists, factor=1.0, training=False)
            total += weight * self._mean_loss(losses)
            weights += weight
        if source:
            source.close()
        return total / weights if weights else math.nan

    def _with_eval_micro_batches(self) -> Trainer:
        other = copy.copy(self)
        run = evaluation_run(self.run)
        other.run = replace(
            run,
            training=replace(
                run.training,
                eval_micro_batch_size=None,
                eval_global_batch_size=self.layout.eval_batch_size(self.run),
            ),
        )
        return other

    def check_data(self) -> None:
        """Raise ValueError if a data file changed since it was opened. Collective."""
        agree(self.world, lambda: check_unchanged((self.train, self.valid)), name_rank=False)

    def close(self) -> None:
        self.optimizer.buckets.await_weights()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # Checkpoints ----------------------------------------------------------------------------------------------------------------

    def state(self) -> JsonObject:
        """Return everything but tensors. Random state is the seed and the data position."""
        state = {
            "progress": asdict(self.progress),
            "scaler": self.optimizer.scaler.state(),
            "optimizer_steps": self.optimizer.steps,
            "kernels": self.ops.choice,
            "param_schedule": self.param_schedule.state(),
            "tokenizer": self.tokenizer,
            "data_order": self.order._asdict(),
            "data_files": self.data_files,
            "no_optimizer": self.run.output.no_save_optim,
            REPLICAS: self.replicas.state(self.progress.iteration),
        }
        if self.run.lora.on:
            state["lora"] = self.base
        state["rng"] = {
            "generator": "philox4x32-10",
            "seed": self.run.training.seed,
            "sample": self.progress.consumed_samples,
        }
        return state

    def _save_steps(self, directory: str, shards: list[Shard], node_first: bool = False) -> Steps:
        local = self.run.output.save_local
        description = Description(
            self.progress.iteration,
            layout_record(self.run, self.layout),
            asdict(self.run),
            self.state(),
            self.run.output.keep_last,
            self.run.output.save_retain_interval,
        )
        if local and node_first:
            return node_first_steps(
                local,
                directory,
                shards,
                description=description,
                folders=self.folders,
                check_lock=self.check_lock,
                wait=self._snapshot is None,
            )
        write = partial(write_shards, self.world.rank, shards)
        return save_steps(
            directory,
            write,
            description=description,
            folders=self.folders,
            check_lock=self.check_lock,
        )

    def _saved_shards(self) -> list[Shard]:
        return self._shards(weights_only=self.run.output.no_save_optim)

    def _shards(self, weights_only: bool) -> list[Shard]:
        return [
            shard
            for shard in self.optimizer.checkpoint_shards(owned=True)
            if not weights_only or shard.key.startswith(WEIGHTS)
        ]

    def find_difference(self) -> Difference | None:
        """Compare replicas, unless the run does not; None if all agree. Collective."""
        if not self.run.numbers.check_weight_hash_across_dp_replicas_interval:
            return None
        return self.replicas.difference(self.progress.iteration)

    def describe_difference(self, found: Difference, directory: str | None) -> str:
        """Record a difference next to the checkpoints in `directory`; return the log's line. Collective."""
        text = f"{found.kind} differ after iteration {self.progress.iteration}: {found.text}"
        trusted = self.replicas.agreed
        if directory:
            trusted = self.record_fault(directory, text, None).trusted
        advice = (
            "start anew without that node, or from a checkpoint that was saved elsewhere"
            if trusted is None
            else f"continue without that node from a checkpoint of iteration {trusted} or before, "
            f"when the {found.kind} agreed"
        )
        return f"{text}. Nothing is saved: {advice}"

    def check_replicas(self, directory: str | None = None) -> None:
        """Raise ReplicasDiffer if copies of the same state differ. Collective."""
        if found := self.find_difference():
            raise ReplicasDiffer(self.describe_difference(found, directory))

    def record_fault(self, directory: str, why: str, suspect_from: int | None) -> Fault:
        """Record the cause of the run's end next to the checkpoints (`checkpoint.trusted`). Collective."""
        iteration = self.progress.iteration
        on_root(self.world, self.check_lock)
        return on_root(self.world, lambda: record_fault(directory, iteration, why, suspect_from))

    def save(self, directory: str) -> None:
        """Write the present iteration's checkpoint. Collective.

        Raise ValueError if a rank cannot write; ReplicasDiffer, before anything is
        written, if copies differ.
        """
        self.check_replicas(directory)
        run_steps(self._save_steps(directory, self._saved_shards()))

    def save_in_background(self, directory: str) -> BackgroundSave:
        """Begin to write a checkpoint from a copy: in memory with --async-save, or else in --save-local. Collective.

        The previous save must be finished. Errors: see `save`.
        """
        self.check_replicas(directory)
        shards = self._saved_shards()
        if self.run.output.async_save and self._snapshot is None:
            self._snapshot = Snapshot(shards)
        copies = self._snapshot.take(shards) if self._snapshot else shards
        return BackgroundSave(self._save_steps(directory, copies, node_first=True))

    def load(self, source: str | Checkpoint, weights_only: bool = False) -> JsonObject:
        """Resume from a checkpoint in any layout, or from the latest in a directory; return its
        `state`. Collective.

        weights_only: load nothing but weights, of any dtype. Raise ValueError for a checkpoint
        that is damaged, or from another model or program.
        """
        checkpoint = open_checkpoint(source, self.world) if isinstance(source, str) else source
        saved = checkpoint.config["model"] = with_block(checkpoint.config.get("model", {}))
        model = architecture(self.run.model, saved, begins=weights_only)
        wanted = self.run.optimizer
        state = checkpoint.state
        # New rows of the vocabulary begin as those of a new run.
        load_shards(
            checkpoint,
            self._shards(weights_only or wanted.no_load_optim),
            self.folders,
            model,
            VOCABULARY,
            converts=WEIGHTS if weights_only else MOMENTS,
        )
        self.optimizer.after_load()
        self.replicas.reset()
        if weights_only:
            return {}
        if not wanted.no_load_optim:
            self.optimizer.scaler.load(state["scaler"])
            self.optimizer.steps = state["optimizer_steps"]
        if wanted.use_checkpoint_opt_param_scheduler:
            check(
                "param_schedule" in state,
                "--use-checkpoint-opt_param-scheduler: the checkpoint in --load "
                f"{checkpoint.directory} holds no schedule of the learning rate: leave the flag out",
            )
            self.param_schedule = ParamSchedule.from_state(state["param_schedule"])
        self.progress = Progress(**state["progress"])
        if wanted.no_load_optim or wanted.no_load_lr_state:
            self.progress.unscheduled = self.progress.consumed_samples
        self.close()
        return state

    def load_base(self, base: Checkpoint | ForeignModel, saved: JsonObject | None = None) -> None:
        """Load the frozen weights to which adapters belong. Collective: the first data-parallel ranks read.

        Raise ValueError if the weights differ from `saved`, their record in the adapters' checkpoint.
        """
        flat = self.optimizer.flat
        if isinstance(base, ForeignModel):
            foreign = base

            def fill(shards: list[Shard]) -> None:
                agree(self.world, lambda: fill_shards(shards, foreign.names, foreign.read))
        else:
            base.config["model"] = with_block(base.config.get("model", {}))
            model = architecture(self.run.model, base.config["model"])
            checkpoint = base

            def fill(shards: list[Shard]) -> None:
                load_shards(checkpoint, shards, self.folders, model, VOCABULARY, converts=WEIGHTS)

        flat.fill_frozen(fill, self.world)
        self.ops.weights_changed(frozen=True)
        found = None
        if not self.run.precision.fp16:
            found = flat.fingerprint(self.run.model.vocab_size or 0, self.groups)
        expected = found if saved is None else saved.get("fingerprint")
        iteration = "" if base.iteration is None else f", iteration {base.iteration},"
        agree(
            self.world,
            lambda: check(
                None in (found, expected) or found == expected,
                f"the model in {base.directory}{iteration} has other weights than the one that "
                "the adapters were trained for, "
                f"{(saved or {}).get('base')}: pass that one as --pretrained-checkpoint",
            ),
            name_rank=False,
        )
        self.base = {
            "base": str(base.directory.absolute()),
            "base_iteration": base.iteration,
            "fingerprint": found,
        }

    def start_from(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Load another program's whole weights, and nothing else, as `fill_shards`. Collective.

        Every rank reads its own shards. Raise ValueError if a rank cannot.
        """
        shards = self._shards(weights_only=True)
        agree(self.world, lambda: fill_shards(shards, names, read))
        self.optimizer.after_load()
        self.replicas.reset()


def layout_record(run: RunConfig, layout: Layout) -> dict[str, int | str]:
    """Return the layout as a manifest records it: parallel sizes, layers of stages, ZeRO shards."""
    record: dict[str, int | str] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
    }
    if layout.cp > 1:
        record["context_parallel_size"] = layout.cp
    return record | {
        "pipeline_split": ",".join(map(str, virtual_stage_sizes(run))),
        "data_parallel_size": layout.dp,
        "zero_shards": zero_shards(run, layout),
    }
