"""The trainer: builds a rank's part of the run, steps, evaluates, saves and loads.

Left out: the loop with its log and its reasons to leave (`session`), what comes before it (`pretrain`), the plan without training
(`dry_run`). Legend: s sequence, b micro-batch, h hidden.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import Checkpoint, load_shards, open_checkpoint
from ..checkpoint.manifest import Folders
from ..checkpoint.node_copy import node_first_steps
from ..checkpoint.save import (
    BackgroundSave,
    Description,
    Snapshot,
    Steps,
    run_steps,
    save_steps,
    shard_writer,
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
from ..costs.accounting import pipeline_split, sequence_shards, zero_shards
from ..data.dataset import NEW_ORDER, DataOrder, Dataset
from ..data.marks import TokenCounts
from ..data.sampler import ReaderGroup
from ..data.unchanged import Record, check_unchanged
from ..nn.model import VOCABULARY, Stage
from ..nn.ops import Ops
from ..nn.parameter import PARAMETER_DTYPES
from ..optim.optimizer import Optimizer
from ..pipeline import schedule
from . import expert_counts
from .micro_batches import MicroBatchWindow, RunBatches, Source
from .replicas import Difference, Replicas, ReplicasDiffer
from .step import StepExecutor, StepShape

WEIGHTS, MOMENTS = (WEIGHT,), ("exp_avg/", "exp_avg_sq/")  # beginnings of keys in a checkpoint


Watch = Callable[[schedule.Executor], schedule.Executor]


@dataclass
class Progress:
    """Where the run stands; all of it is saved.

    unscheduled: samples of `consumed_samples` that the schedules of learning rate and weight decay do not count, since their
    iterations made no update, or since the schedules began anew.
    """

    iteration: int = 0
    consumed_samples: int = 0
    skipped: int = 0
    nans: int = 0
    unscheduled: int = 0

    @property
    def scheduled_samples(self) -> int:
        """Where the schedules stand."""
        return self.consumed_samples - self.unscheduled


@dataclass(frozen=True)
class ForeignModel:
    """Weights of another program, to which adapters belong.

    names, read: arguments of `fill_shards`. carried: the model's tokenizer files, if there are any.
    """

    directory: Path
    names: Collection[str]
    read: Callable[[str], Tensor]
    carried: Path | None = None
    iteration: None = None


@dataclass(frozen=True)
class IterationResult:
    """Figures of one training iteration, equal on every rank. consumed: samples before it. work: of marked samples, whose share
    alone is this rank's. experts: see `rank_watch.gather_loads`. z_loss: the part of the loss that --use-z-loss added, None
    without the flag."""

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
        """True if no label of the samples counts in the loss."""
        return self.work is not None and not self.work.counted


def uncounted_line(iteration: int, result: IterationResult) -> str:
    """Return the log's warning about an iteration in which no label counts."""
    return (
        f"warning: iteration {iteration} has 0 counted tokens: no label of its "
        f"{result.global_batch_size} samples counts in the loss, so nothing was learned"
    )


@dataclass
class Trainer:
    """One rank of a run. Raises ValueError when the run does not fit on `world.size` ranks.

    train, valid: datasets, needed where `reads_data`; None elsewhere. readers: the ranks whose first one reads the samples of this
    one; then only that one needs the datasets. ops: what runs the operations of a step. watch: see
    StepExecutor. make_schedule: the training schedule of so many micro-batches. waiting_for_data: is entered around what fetches
    samples. before_update: is given the samples consumed before an iteration and its loss when gradients are summed, and returns
    the loss of those that the update shall use. tokenizer: what a checkpoint says of the run's (`data.tokenizer.identity`). order:
    samples that the orders of the data were first made for. data_files: what a checkpoint says of the data's files.
    """

    run: RunConfig
    world: Comm
    groups: Groups
    train: Dataset | None = None
    valid: Dataset | None = None
    progress: Progress = field(default_factory=Progress)
    ops: Ops = field(default_factory=Ops.build)
    watch: Watch | None = None
    make_schedule: Callable[[RunConfig, int], schedule.Schedule] = run_schedule.build_schedule
    readers: ReaderGroup | None = None
    waiting_for_data: Callable[[], AbstractContextManager[None]] = nullcontext
    before_update: Callable[[int, float], float] | None = None
    tokenizer: dict[str, Any] | None = None
    order: DataOrder = NEW_ORDER
    data_files: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        run = self.run
        self.layout = Layout.from_run(run, self.world.size)
        self.stage = Stage(run, self.groups, self.ops)
        self.optimizer = Optimizer(self.stage, run, self.groups, self.ops)
        self.replicas = Replicas(self.optimizer, self.stage, self.groups)
        self.ramp = sizes_of(run, self.layout.global_batch_size(run))
        self.skips = Skips.parse(run.data.skip_samples)
        self.param_schedule = ParamSchedule.from_run(run, self.layout.global_batch_size(run))
        self.folders = Folders(self.world)  # of checkpoints
        self._batches: Source | None = None
        self._shift = 0  # see `RunBatches`
        self.base: dict[str, Any] = {}  # of adapters: the model that they belong to
        background = run.output.save and run.output.async_save
        self._snapshot = Snapshot(self._saved_shards()) if background else None

    def batch_size(self, consumed: int) -> int:
        """Global batch size of the iteration that starts at `consumed` samples."""
        return self.ramp(consumed)

    # One step ------------------------------------------------------------------------------------------------------------------

    @property
    def batches(self) -> RunBatches:
        """Where this rank's micro-batches come from."""
        return RunBatches(self.run, self.groups, self.readers, self.waiting_for_data, self._shift)

    def _execute(
        self,
        source: Source | None,
        work: TokenCounts | None,
        consumed: int,
        lists: schedule.Schedule,
        factor: float,
        training: bool,
        stage: Stage | None = None,
        watch: Watch | None = None,
    ) -> list[Tensor]:
        """The losses of this rank's micro-batches, whose mean over all ranks is the mean over the labels of the global batch that
        count. source, work: of the iteration, which has begun."""
        run, model, parts = self.run, self.run.model, lists.microbatches * self.layout.replicas
        sequence = model.seq_length // (sequence_shards(run, self.layout.tp) * self.layout.cp)
        shape = StepShape(
            activation=(sequence, run.batch.micro_batch_size, model.hidden_size),
            dtype=PARAMETER_DTYPES[run.precision.name],
            loss_factor=factor,
            training=training,
            recompute=run.training.recompute_granularity if training else None,
            count=None if work is None else max(work.counted, 1) / parts,
            tokens=None if work is None else max(self._unpadded(work), 1) * self.layout.cp / parts,
        )
        window = MicroBatchWindow(
            self.batches.micro_batches(source, consumed, lists.microbatches), len(self.stage.chunks)
        )
        return StepExecutor(
            stage or self.stage, self.groups.pp, window, shape, watch or self.watch
        ).run(lists)

    def _unpadded(self, work: TokenCounts) -> int:
        """Return how many tokens of the work are not padding."""
        return work.samples * self.run.model.seq_length - work.padded

    def _mean_loss(self, losses: list[Tensor]) -> float:
        """Mean over micro-batches and data-parallel ranks, from the last stage to all."""
        loss = (
            torch.stack(losses).double().mean() if losses else torch.zeros((), dtype=torch.float64)
        )
        if self.stage.last:
            self.groups.dp.all_reduce(loss).div_(self.groups.dp.size)
        return self.groups.pp.broadcast(loss, root=self.stage.placement.last_stage).item()

    def train_step(self) -> IterationResult:
        """One iteration: forwards and backwards, gradient sums, update. Collective."""
        started, consumed = time.perf_counter(), self.progress.consumed_samples
        size, scale = self.batch_size(consumed), self.optimizer.scaler.scale
        if self._batches is None:
            self._batches = self.batches.open(
                self.train, consumed, self.batch_size, self.skips.samples
            )
        loss, work = self._gradients(self._batches, consumed, scale)
        experts = expert_counts.gather_loads(
            self.stage, self.run, self.groups, self.layout.microbatches(self.run, size)
        )
        z_loss = self._take_z_loss() if self.run.model.z_loss else None
        if self.before_update:
            loss = self.before_update(consumed, loss)
        scheduled = self.progress.scheduled_samples
        lr = self.param_schedule.learning_rate(scheduled)
        step = self.optimizer.step(
            lr,
            self.param_schedule.weight_decay(scheduled),
            self.run.output.log_num_zeros_in_grad,
            self.param_schedule.decoupled.learning_rate(scheduled),
        )
        self.progress.iteration += 1
        self.progress.consumed_samples = self.skips.samples(consumed, size)[-1] + 1
        self.progress.skipped += step.skipped
        self.progress.unscheduled += step.skipped * (self.progress.consumed_samples - consumed)
        self.progress.nans += loss != loss
        return IterationResult(
            loss,
            step.grad_norm,
            step.num_zeros,
            step.skipped,
            lr,
            scale,
            size,
            consumed,
            time.perf_counter() - started,
            work,
            experts,
            z_loss,
        )

    def _take_z_loss(self) -> float:
        """Return the mean of what --use-z-loss added to the losses of the iteration, and forget it. Collective."""
        parts: list[Tensor] = []
        if self.stage.last:
            parts = list(self.stage.last.z_losses.values())
            self.stage.last.z_losses.clear()
        return self._mean_loss(parts)

    def _gradients(
        self,
        source: Source | None,
        consumed: int,
        scale: float,
        stage: Stage | None = None,
        watch: Watch | None = None,
    ) -> tuple[float, TokenCounts | None]:
        """Forwards and backwards of the iteration that begins at sample `consumed`, and sums of gradients; the mean loss.

        Also the work of its samples, where they are marked.
        """
        work = self.batches.begin(source)
        microbatches = self.layout.microbatches(self.run, self.batch_size(consumed))
        self.optimizer.zero_grad(microbatches)
        expert_counts.forget_loads(self.stage)
        if self.stage.last:
            self.stage.last.z_losses.clear()
        losses = self._execute(
            source,
            work,
            consumed,
            self.make_schedule(self.run, microbatches),
            scale / (microbatches * self.layout.replicas),
            True,
            stage,
            watch,
        )
        self.optimizer.reduce_gradients()
        # Not after the update, whose gathers of weights would come first on their communicator.
        return self._mean_loss(losses), work

    def repeat(
        self,
        consumed: int,
        scale: float,
        stage: Stage | None = None,
        watch: Watch | None = None,
        shift: int = 0,
    ) -> float:
        """What `train_step` did before its update in the iteration that began at sample `consumed`, once more; the mean loss.

        scale: of the loss. stage: the trainer's own, or another one that holds its parameters. watch: as in StepExecutor, around
        the trainer's own. shift: ranks compute the samples of the data-parallel rank so many places
        further on. Collective.
        """
        own = self.watch
        self._shift = shift
        source = self.batches.open(self.train, consumed, self.batch_size, self.skips.samples)

        def both(executor: schedule.Executor) -> schedule.Executor:
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
        """Mean loss over `iterations` global batches of a dataset from sample `first` on, or over their labels that count.

        NaN if no label counts. Collective.
        """
        if self.run.training.eval_micro_batch_size:
            return self._with_its_micro_batches().evaluate(dataset, first, iterations)
        size = self.layout.eval_batch_size(self.run)
        lists = run_schedule.build_schedule(
            self.run, self.layout.microbatches(self.run, size)
        ).forward_only()
        total, weights = 0.0, 0
        source = self.batches.open(dataset, first, lambda _: size)
        for i in range(iterations):
            work = self.batches.begin(source)
            weight = 1 if work is None else work.counted
            total += weight * self._mean_loss(
                self._execute(source, work, first + i * size, lists, 1.0, training=False)
            )
            weights += weight
        if source:
            source.close()
        return total / weights if weights else math.nan

    def _with_its_micro_batches(self) -> Trainer:
        """This trainer, weights and all, whose micro-batches are those of an evaluation."""
        other, run = copy.copy(self), evaluation_run(self.run)
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
        """Raise ValueError, on every rank, where a file of the data changed since it was opened. Collective."""
        agree(self.world, lambda: check_unchanged((self.train, self.valid)), name_rank=False)

    def close(self) -> None:
        """Stop reading ahead, and end what is under way."""
        self.optimizer.buckets.await_weights()
        if self._batches is not None:
            self._batches.close()
            self._batches = None

    # Checkpoints ----------------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything but tensors. Dropout and initial weights are functions of (seed, sample), so the random state of every
        rank is the seed and the position in the data."""
        return {
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
            **({"lora": self.base} if self.run.lora.on else {}),
            "rng": {
                "generator": "philox4x32-10",
                "seed": self.run.training.seed,
                "sample": self.progress.consumed_samples,
            },
        }

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
                local, directory, shards, description, self.folders, wait=self._snapshot is None
            )
        return save_steps(
            directory, shard_writer(self.world.rank, shards), description, self.folders
        )

    def _saved_shards(self) -> list[Shard]:
        shards = self.optimizer.checkpoint_shards(owned=True)
        return [
            shard
            for shard in shards
            if not self.run.output.no_save_optim or shard.key.startswith(WEIGHTS)
        ]

    def find_difference(self) -> Difference | None:
        """Compare replicas, unless the run does not; None if all agree. Collective."""
        if not self.run.numbers.check_weight_hash_across_dp_replicas_interval:
            return None
        return self.replicas.difference(self.progress.iteration)

    def describe_difference(self, found: Difference, directory: str | None) -> str:
        """Return the log's line on a difference, which is recorded next to the checkpoints in
        `directory`. Collective.
        """
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
        """Raise ReplicasDiffer on every rank if ranks that hold the same state have other bits.
        Collective.
        """
        if found := self.find_difference():
            raise ReplicasDiffer(self.describe_difference(found, directory))

    def record_fault(self, directory: str, why: str, suspect_from: int | None) -> Fault:
        """Record next to the checkpoints why the run ends (`checkpoint.trusted`). Collective."""
        iteration = self.progress.iteration
        return on_root(self.world, lambda: record_fault(directory, iteration, why, suspect_from))

    def save(self, directory: str) -> None:
        """Write a checkpoint of the present iteration. Collective.

        ValueError on every rank when one cannot write.

        ReplicasDiffer, and nothing is written, if ranks that hold the same state have other bits.
        """
        self.check_replicas(directory)
        run_steps(self._save_steps(directory, self._saved_shards()))

    def save_in_background(self, directory: str) -> BackgroundSave:
        """Begin to write a copy of the present iteration: of memory with --async-save, or else of --save-local. Collective.

        The save before must be finished. ReplicasDiffer as for `save`.
        """
        self.check_replicas(directory)
        shards = self._saved_shards()
        if self.run.output.async_save and self._snapshot is None:
            self._snapshot = Snapshot(shards)
        copies = self._snapshot.take(shards) if self._snapshot else shards
        return BackgroundSave(self._save_steps(directory, copies, node_first=True))

    def load(self, source: str | Checkpoint, weights_only: bool = False) -> dict[str, Any]:
        """Go on from a checkpoint of any layout, or from the latest one in a directory; returns its `state`. Collective.

        weights_only: take its weights, of any dtype, and nothing else. Moments may have another dtype as well. Every shard is read
        by the rank that saves it; the ranks that hold it too get it from that one. Raises ValueError on every rank for a checkpoint
        that is damaged, of another model or of another program.
        """
        checkpoint = open_checkpoint(source, self.world) if isinstance(source, str) else source
        saved = checkpoint.config["model"] = with_block(checkpoint.config.get("model", {}))
        model = architecture(self.run.model, saved if weights_only else None)
        wanted, state = self.run.optimizer, checkpoint.state
        shards = [
            shard
            for shard in self.optimizer.checkpoint_shards(owned=True)
            if not (weights_only or wanted.no_load_optim) or shard.key.startswith(WEIGHTS)
        ]
        # New rows of the vocabulary begin as those of a new run.
        load_shards(
            checkpoint,
            shards,
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

    def load_base(
        self, base: Checkpoint | ForeignModel, saved: dict[str, Any] | None = None
    ) -> None:
        """Take the weights that adapters belong to. saved: what the adapters' checkpoint says of them. Collective.

        The first data-parallel ranks read, the others get the weights from them. ValueError on every rank where they are others.
        """
        flat = self.optimizer.flat
        if isinstance(base, ForeignModel):
            names, read = base.names, base.read
            agree(self.world, lambda: fill_shards(flat.frozen_shards(), names, read))
        else:
            base.config["model"] = with_block(base.config.get("model", {}))
            load_shards(
                base,
                flat.frozen_shards(),
                self.folders,
                architecture(self.run.model),
                VOCABULARY,
                converts=WEIGHTS,
            )
        for memory in flat.frozen_memory:
            memory.spread()
        self.ops.weights_changed(frozen=True)
        found = (
            None
            if self.run.precision.fp16
            else flat.fingerprint(self.run.model.vocab_size or 0, self.groups)
        )
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
        """Take whole weights of another program, and nothing else; arguments as of `fill_shards`, any shape. Collective.

        Every rank reads what it holds. ValueError on every rank where one cannot.
        """
        shards = [
            shard
            for shard in self.optimizer.checkpoint_shards(owned=True)
            if shard.key.startswith(WEIGHTS)
        ]
        agree(self.world, lambda: fill_shards(shards, names, read))
        self.optimizer.after_load()
        self.replicas.reset()


def layout_record(run: RunConfig, layout: Layout) -> dict[str, int | str]:
    """The layout as a checkpoint has it."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        **({"context_parallel_size": layout.cp} if layout.cp > 1 else {}),
        "pipeline_split": ",".join(map(str, pipeline_split(run))),
        "data_parallel_size": layout.dp,
        "zero_shards": zero_shards(run, layout),
    }
