"""One rank's trainer: training steps and evaluations of its state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..comm.agreement import agree
from ..config.run_config import RunConfig
from ..data.dataset import Dataset
from ..data.marks import TokenCounts
from ..data.reader_group import ReaderGroup
from ..data.unchanged import check_unchanged
from ..nn.model import Stage
from ..nn.parameter import PARAMETER_DTYPES
from ..pipeline.instructions import Executor
from ..pipeline.schedule import Schedule
from . import expert_counts
from .checkpoints import TrainingState
from .micro_batches import BatchReader, MicroBatchWindow, SampleRange
from .replicas import Difference, ReplicasDiffer
from .step import StepExecutor, StepShape

Watch = Callable[[Executor], Executor]


def _no_phase(name: str, **attributes: float) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True)
class IterationResult:
    """A training iteration's figures, equal on every rank.

    consumed: samples before it. work: of marked samples; only its share is this rank's own.
    experts: `gather_loads`. z_loss: share of --use-z-loss in the loss, None without the flag.
    predictions: mean losses of the MTP modules, which `loss` does not include.
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
    predictions: tuple[float, ...] = ()

    @property
    def nothing_counted(self) -> bool:
        return self.work is not None and not self.work.counted


class GlobalBatch(NamedTuple):
    """Samples in an iteration that has begun. consumed: samples before it."""

    reader: BatchReader
    work: TokenCounts | None
    consumed: int


class Observation(NamedTuple):
    """Another stage with the same parameters, and another observer, for a repeated iteration."""

    stage: Stage
    watch: Watch | None


class Auditor(Protocol):
    """Checks of the machine around an iteration. `consumed`: samples before it. All methods are collective."""

    def before_gradients(self, consumed: int) -> None: ...

    def before_update(self, consumed: int) -> Difference | None: ...

    def after_update(self) -> Difference | None: ...

    def broken_seal(self) -> Difference | None:
        """Compare the state with the last update's."""


def uncounted_line(iteration: int, result: IterationResult) -> str:
    return (
        f"warning: iteration {iteration} has 0 counted tokens: no label of its "
        f"{result.global_batch_size} samples counts in the loss, so nothing was learned"
    )


@dataclass
class Trainer(TrainingState):
    """One rank in a run.

    train, valid: datasets, on ranks where `reads_data` is true.
    readers: ranks that share samples; only the first one needs the datasets.
    watch: wraps the executor of an iteration in an observer.
    waiting_for_data: context around every fetch of samples.
    before_update: (samples consumed, loss) -> loss, called between gradient reduction and update;
        it may replace the gradients.
    audit: see `observe.numbers.audit`.
    phase: name -> context around "audit", "forward_backward" and "optimizer" of an iteration, and around an iteration of "evaluate".
    """

    train: Dataset | None = None
    valid: Dataset | None = None
    _: KW_ONLY
    watch: Watch | None = None
    readers: ReaderGroup | None = None
    waiting_for_data: Callable[[], AbstractContextManager[None]] = nullcontext
    before_update: Callable[[int, float], float] | None = None
    audit: Auditor | None = None
    phase: Callable[..., AbstractContextManager[object]] = _no_phase

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reader: BatchReader | None = None  # of the training data

    # One step ------------------------------------------------------------------------------------------------------------------

    def read_train(self, consumed: int, shift: int = 0) -> BatchReader:
        """Open the training data from sample `consumed` on. shift: see `SampleRange`"""
        plan = self.plan
        samples = SampleRange(self.train, consumed, plan.batch_sizes, plan.skips.samples, shift)
        return BatchReader(self.run, self.groups, samples, self.readers, self.waiting_for_data)

    def _execute(
        self,
        batch: GlobalBatch,
        schedule: Schedule,
        factor: float,
        training: bool,
        observation: Observation | None = None,
    ) -> list[Tensor]:
        """Run a schedule; return this rank's micro-batch losses.

        Their mean over all ranks is the mean over counted labels.
        """
        reader, work, consumed = batch
        run = reader.run
        microbatches = schedule.microbatches * self.layout.replicas
        sequence = run.model.seq_length // (run.sequence_shards * self.layout.cp)
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
            prediction_counts=self._prediction_counts(run, work, microbatches) if training else (),
        )
        micro_batches = reader.micro_batches(consumed, schedule.microbatches)
        window = MicroBatchWindow(micro_batches, len(self.stage.chunks))
        stage, watch = observation or Observation(self.stage, self.watch)
        return StepExecutor(stage, self.groups.pp, window, shape, watch).run(schedule)

    def _prediction_counts(
        self, run: RunConfig, work: TokenCounts | None, microbatches: int
    ) -> tuple[float, ...]:
        """Return the mean labels of each MTP module in a micro-batch. microbatches: of all ranks"""
        if work is not None:
            return tuple(max(counted, 1) / microbatches for counted in work.predicted)
        samples = run.batch.micro_batch_size / self.layout.cp
        length = run.model.seq_length
        depths = range(1, run.model.predictions + 1)
        return tuple(samples * (length - depth) for depth in depths)

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
        size = self.plan.batch_sizes(consumed)
        scale = self.optimizer.scaler.scale
        if self._reader is None:
            self._reader = self.read_train(consumed)
        if self.audit:
            with self.phase("audit"):
                self.audit.before_gradients(consumed)
        with self.phase("forward_backward"):
            loss, work = self._gradients(self._reader, consumed, scale)
        experts = expert_counts.gather_loads(
            self.stage, self.run, self.groups, self.layout.microbatches(self.run, size)
        )
        z_loss = self._pop_z_loss() if self.run.model.z_loss else None
        predictions = self._pop_predictions()
        if self.audit:
            with self.phase("audit"):
                found = self.audit.before_update(consumed)
            self._leave_if(found)
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
        self.progress.consumed_samples = self.plan.skips.samples(consumed, size)[-1] + 1
        if step.skipped:
            self.progress.skipped += 1
            self.progress.unscheduled += self.progress.consumed_samples - consumed
        if math.isnan(loss):
            self.progress.nans += 1
        if self.audit:
            with self.phase("audit"):
                found = self.audit.after_update()
            self._leave_if(found)
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
            predictions=predictions,
        )

    def _leave_if(self, found: Difference | None) -> None:
        if found is not None:
            raise ReplicasDiffer(self.describe_difference(found, None), found)

    def find_difference(self) -> Difference | None:
        """Compare the state with the last update's, then replicas; None if all agree. Collective."""
        if self.audit and (found := self.audit.broken_seal()):
            return found
        return super().find_difference()

    def _pop_z_loss(self) -> float:
        """Return and clear the iteration's mean z-loss. Collective."""
        z_losses: list[Tensor] = []
        if self.stage.last:
            z_losses = list(self.stage.last.z_losses.values())
            self.stage.last.z_losses.clear()
        return self._mean_loss(z_losses)

    def _pop_predictions(self) -> tuple[float, ...]:
        """Return and clear the mean losses of the MTP modules. Collective."""
        losses: list[Tensor] = []
        if self.stage.last:
            losses = list(self.stage.last.prediction_losses.values())
            self.stage.last.prediction_losses.clear()
        depths = range(self.run.model.predictions)
        return tuple(self._mean_loss([each[depth] for each in losses]) for depth in depths)

    def _gradients(
        self,
        reader: BatchReader,
        consumed: int,
        scale: float,
        observation: Observation | None = None,
    ) -> tuple[float, TokenCounts | None]:
        """Compute and reduce an iteration's gradients; return the mean loss, and the work of marked samples."""
        work = reader.begin()
        schedule = self.schedule_of(self.plan.batch_sizes(consumed))
        self.optimizer.zero_grad(schedule.microbatches)
        expert_counts.reset_loads(self.stage)
        if self.stage.last:
            self.stage.last.z_losses.clear()
            self.stage.last.prediction_losses.clear()
        losses = self._execute(
            GlobalBatch(reader, work, consumed),
            schedule,
            factor=scale / (schedule.microbatches * self.layout.replicas),
            training=True,
            observation=observation,
        )
        self.optimizer.reduce_gradients()
        # Before the update: its weight gathers would precede the loss on their communicator.
        return self._mean_loss(losses), work

    def schedule_of(self, samples: int) -> Schedule:
        """Return the pipeline schedule of a training iteration. samples: its global batch size"""
        return self.plan.schedule_of(samples)

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

        stage: another stage with the same parameters. shift: see `SampleRange`.
        """
        own = self.watch

        def both(executor: Executor) -> Executor:
            watched = own(executor) if own else executor
            return watch(watched) if watch else watched

        with closing(self.read_train(consumed, shift)) as reader:
            observation = Observation(stage or self.stage, both)
            return self._gradients(reader, consumed, scale, observation)[0]

    @torch.no_grad()
    def evaluate(self, dataset: Dataset | None, first: int, iterations: int) -> float:
        """Return the mean loss over counted labels of `iterations` global batches from sample `first` on, or NaN. Collective."""
        size = self.plan.eval_batch_size
        plan = self.plan.evaluation
        schedule = plan.schedule_of(size).forward_only()
        total = 0.0
        weights = 0
        reader = BatchReader(
            plan.config,
            self.groups,
            SampleRange(dataset, first, lambda _: size),
            readers=self.readers,
            waiting=self.waiting_for_data,
        )
        with closing(reader):
            for i in range(iterations):
                work = reader.begin()
                weight = 1 if work is None else work.counted
                batch = GlobalBatch(reader, work, first + i * size)
                with self.phase("evaluate", eval_iteration=i + 1):
                    losses = self._execute(batch, schedule, factor=1.0, training=False)
                total += weight * self._mean_loss(losses)
                weights += weight
        return total / weights if weights else math.nan

    def check_data(self) -> None:
        """Raise ValueError if a data file changed since it was opened. Collective."""
        agree(self.world, lambda: check_unchanged((self.train, self.valid)), name_rank=False)

    def close(self) -> None:
        """Stop reading ahead, and wait for the weights that the last update gathers."""
        super().close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None
