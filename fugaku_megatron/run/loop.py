"""A run's loop on one rank: train, evaluate, log, save, leave on request."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..checkpoint.memory_copy import MemoryCopies
from ..checkpoint.save import BackgroundSave
from ..config.run_config import RunConfig
from ..costs.flops import hardware_flops
from ..host import allocator, machine, runtime
from ..observe.export import spans
from ..observe.export.history import HISTORY
from ..observe.export.metrics_writer import MetricsWriter
from ..observe.export.telemetry import Telemetry
from ..observe.hang.watchdog import Watchdog
from ..observe.log import loss_plot
from ..observe.log.expert_load import ExpertWatch
from ..observe.log.iteration_metrics import IterationMetrics
from ..observe.numbers.nonfinite import find_nonfinite
from ..observe.observer import Observer
from ..observe.profile.profile import Profile
from ..start.exit_codes import ExitCode
from ..start.signals import StopSignals
from ..training.replicas import Difference, ReplicasDiffer
from ..training.trainer import IterationResult, Trainer, uncounted_line
from .hf_export import HfExport

LOSS_CURVE = "loss_curve.png"
DIVERGED_STEPS = 5  # skipped iterations in a row
EXPLAINED_AT_MOST = 3  # skipped iterations of one start: under a fixed loss scale there may be many


@dataclass
class Session:
    """Trainer with its log, and the reasons to leave early."""

    trainer: Trainer
    writer: MetricsWriter
    iterations: int
    valid_sizes: tuple[int, ...]
    profile: Profile | None = None
    observers: Sequence[Observer] = ()
    watchdog: Watchdog = field(default_factory=Watchdog.off)
    telemetry: Telemetry = field(default_factory=Telemetry)
    signals: StopSignals = field(default_factory=StopSignals)
    skipped_in_a_row: int = 0  # without a falling loss scale
    explained: int = 0  # searches for the first Inf or NaN
    save_due: bool = False
    checked_iteration: int = -1  # of the last check of the data files
    save_timer: runtime.ExitTimer = field(init=False)
    saving: BackgroundSave | None = None
    saved_iteration: int = 0  # of the last save that began
    copies: MemoryCopies | None = None
    copying: BackgroundSave | None = None  # to other nodes' memory
    hf_export: HfExport | None = None
    picture: subprocess.Popen[bytes] | None = None  # process that draws the losses
    trained: bool = False  # an iteration in this process
    uncounted: int = 0  # iterations of this process without a counted label
    picture_is_old: bool = False  # a later save has more losses

    def __post_init__(self) -> None:
        model = self.config.model
        if model.num_experts:
            experts = ExpertWatch(model, self.writer, self.trainer.layout.ep)
            self.observers = (*self.observers, experts)
        self.save_timer = runtime.ExitTimer(self.config.output.save_interval_in_mins)

    @property
    def iteration(self) -> int:
        return self.trainer.progress.iteration

    @property
    def config(self) -> RunConfig:
        return self.trainer.run

    def run(self) -> None:
        """Train until the end or a reason to leave. Collective."""
        save = self.config.output.save
        timer = runtime.ExitTimer(self.config.training.exit_duration_in_mins)
        saved = self.iteration
        if saved >= self.iterations:
            self.writer.print(f"nothing left to train: at iteration {saved} of {self.iterations}")
        end = saved if self._asked_to_leave() else self.iterations
        self._complete_copy()
        while self.iteration < end:
            result, values = self._step()
            self._finish_copy()  # before the iteration counts: at most --save-memory are repeated
            self._log(result, values)
            self._check_divergence(result)
            if self._ends(self.config.numbers.check_weight_hash_across_dp_replicas_interval):
                self._compare_replicas()
            self._evaluate()
            reason, due, written = self._reason_to_leave(timer)
            if self.saving and written:
                self._advance_save(self.saving)
            output = self.config.output
            self.save_due |= due or self._ends(output.save_interval)
            self.save_due |= self._ends(output.save_hf_interval)
            if reason:
                self.writer.flush()
            self._copy_if_due(reason)
            # Diverged weights must not replace good ones.
            if save and (reason or self.save_due and not self.skipped_in_a_row):
                self._check_data()
                self._save(save)
                saved = self.iteration
            if reason:
                self.writer.print(f"leaving after iteration {self.iteration}: {reason}")
                break
        self._check_data()
        self._check_trained()
        if save and saved != self.iteration:
            self._save(save)
        self._finish_save()
        self._remove_copies()
        if self.profile:
            self.profile.end(self.writer.print)
        self._finish_hf_export()
        self._await_picture()

    def _ends(self, interval: int | None) -> bool:
        return bool(interval and self.iteration % interval == 0)

    def evaluate_only(self) -> None:
        """Evaluate the first validation samples for --skip-train; save nothing. Collective."""
        if self.valid_sizes:
            self._print_validation(0)
        self.writer.print("--skip-train: nothing is trained")

    def _asked_to_leave(self) -> bool:
        """Return True after a signal on any rank, before the first iteration. Collective."""
        requested = torch.tensor(int(self.signals.stop_requested))
        asked = bool(self.trainer.world.all_reduce(requested, "max"))
        if asked:
            self.writer.print("leaving before the first iteration: a signal asked to stop")
        return asked

    def _step(self) -> tuple[IterationResult, dict[str, Any]]:
        self.telemetry.begin_interval()
        for observer in self.observers:
            observer.begin()
        faults, system_seconds = allocator.page_faults()
        profiled = self.profile.iteration(self.writer.print) if self.profile else nullcontext()
        with (
            self.watchdog.heart.iteration(self.iteration + 1),
            profiled,
            self._first_iteration(),
            self.telemetry.span(spans.ITERATION, iteration=self.iteration + 1) as attributes,
        ):
            try:
                result = self.trainer.train_step()
            except ReplicasDiffer as error:
                self._leave_for(error.found)
            attributes["skipped"] = result.skipped
        after = allocator.page_faults()
        values = {
            "minor_faults": after[0] - faults,
            "system_seconds": after[1] - system_seconds,
        }
        for observer in self.observers:
            values |= observer.end(result)
        self.watchdog.measured(result.seconds)
        return result, values

    def _first_iteration(self) -> AbstractContextManager[object]:
        if self.trained:
            return nullcontext()
        self.trained = True
        return self.telemetry.span(spans.FIRST_ITERATION, iteration=self.iteration + 1)

    def _log(self, result: IterationResult, values: dict[str, Any]) -> None:
        trainer = self.trainer
        run = self.config
        consumed = trainer.progress.consumed_samples
        norm = trainer.optimizer.params_norm() if run.output.log_params_norm else None
        logs = self._ends(self.writer.log_interval) or self.iteration == self.iterations
        if logs:
            for observer in self.observers:
                values |= observer.finish_interval(self.iteration)
            if self.writer.printing:
                values["clock_ghz"] = machine.clock_ghz()
        work = result.work
        squares = work.squares if work and run.data.masks_attention else None
        padded = work.padded if work else 0
        flops = hardware_flops(run, result.global_batch_size, squares, padded)
        rank_flops = flops / trainer.world.size
        for depth, loss in enumerate(result.predictions, 1):
            values[f"mtp_{depth}_loss"] = loss
        self.writer.add(
            IterationMetrics(
                self.iteration,
                self.iterations,
                consumed_samples=consumed,
                consumed_tokens=consumed * run.model.seq_length,
                elapsed_seconds=result.seconds,
                learning_rate=result.learning_rate,
                global_batch_size=result.global_batch_size,
                lm_loss=result.loss,
                lm_loss_alone=None if result.z_loss is None else result.loss - result.z_loss,
                loss_scale=result.loss_scale,
                grad_norm=result.grad_norm,
                num_zeros=result.num_zeros,
                params_norm=norm,
                skipped=int(result.skipped),
                tflops=rank_flops / result.seconds / 1e12,
                counted_tokens=work.counted if work else None,
                **values,
            )
        )
        if result.nothing_counted:
            self.uncounted += 1
            self.writer.event(self.iteration, uncounted_line(self.iteration, result))
        if self.iteration == self.iterations:
            self.writer.flush()
        if logs:
            for observer in self.observers:
                observer.report(self.iteration)

    def _check_divergence(self, result: IterationResult) -> None:
        """Raise SystemExit(ExitCode.DIVERGED) after DIVERGED_STEPS skipped steps in a row without a falling loss scale.

        Nothing is saved: the last checkpoint is from before.
        """
        if result.skipped and not self.trainer.optimizer.scaler.falling:
            self.skipped_in_a_row += 1
        else:
            self.skipped_in_a_row = 0
        # The search for the source costs an iteration.
        if self.skipped_in_a_row == 1 and self.explained < EXPLAINED_AT_MOST:
            self.explained += 1
            text = find_nonfinite(self.trainer, result.consumed, result.loss_scale)
            where = f"Inf or NaN in the gradients of iteration {self.iteration}"
            self.writer.event(self.iteration, f"{where}: {text}")
        if self.skipped_in_a_row < DIVERGED_STEPS:
            return
        self._finish_save()  # of a checkpoint from before
        self.writer.flush()
        save = self.config.output.save
        place = f" in {save}" if save else ""
        self.writer.print(
            f"diverged: the gradients of the last {DIVERGED_STEPS} iterations up to {self.iteration} "
            "held an Inf or NaN, and no update was made. Nothing is saved: continue from the last checkpoint"
            f"{place} with a lower --lr, or with --clip-grad"
        )
        raise SystemExit(ExitCode.DIVERGED)

    def _compare_replicas(self) -> None:
        """Raise SystemExit(REPLICAS_DIFFER) if replicas differ, after the current save."""
        if found := self.trainer.find_difference():
            self._leave_for(found)

    def _leave_for(self, found: Difference) -> NoReturn:
        """Raise SystemExit(REPLICAS_DIFFER) with a difference between ranks, after the current save."""
        self._finish_save()
        save = self.config.output.save
        self._leave(ExitCode.REPLICAS_DIFFER, self.trainer.describe_difference(found, save))

    def _leave(self, code: ExitCode, text: str) -> NoReturn:
        if code == ExitCode.REPLICAS_DIFFER:
            self._remove_copies()  # they may be suspect
        self.writer.flush()
        self.writer.event(self.iteration, text)
        raise SystemExit(code) from None

    def _check_data(self) -> None:
        """Raise SystemExit(USER_ERROR) without a save if a data file changed: the last checkpoint is from before."""
        if self.iteration == self.checked_iteration:
            return
        try:
            self.trainer.check_data()
        except ValueError as error:
            self._finish_save()
            self._leave(ExitCode.USER_ERROR, f"leaving after iteration {self.iteration}: {error}")
        self.checked_iteration = self.iteration

    def _check_trained(self) -> None:
        """Raise SystemExit(USER_ERROR) at the end of a run without a counted label."""
        iteration = self.iteration
        if iteration < self.iterations or self.uncounted < iteration or not iteration:
            return
        self._finish_save()
        self._leave(
            ExitCode.USER_ERROR,
            f"nothing was trained: no label of {iteration} iterations counts in the loss. The last weights are not saved: pass "
            "data with other labels",
        )

    def _evaluate(self) -> None:
        training = self.config.training
        iteration = self.iteration
        last = iteration == self.iterations
        start = training.start_eval_at_iter or 0
        if (
            not self.valid_sizes
            or iteration < start
            or not (last or iteration % training.eval_interval == 0)
        ):
            return
        left_out = max(0, -(-start // training.eval_interval) - 1)
        self._print_validation(-(-iteration // training.eval_interval) - 1 - left_out)

    def _print_validation(self, number: int) -> None:
        self._check_data()
        trainer = self.trainer
        iteration = self.iteration
        several = self.config.training.multiple_validation_sets
        sets = trainer.layout.evaluated(self.config, self.valid_sizes, number)
        for index, (first, iterations) in enumerate(sets):
            what = f"evaluation after iteration {iteration}"
            with self._phase(what, spans.EVALUATE, eval_iters=iterations):
                loss = trainer.evaluate(trainer.valid, first, iterations)
            suffix = f"-{index}" if several else ""
            self.writer.validation(iteration, loss, trainer.progress.consumed_samples, suffix)

    def _reason_to_leave(self, timer: runtime.ExitTimer) -> tuple[str | None, bool, bool]:
        """Return (reason to leave, --save-interval-in-mins is over on rank 0, no rank writes), equal on every rank."""
        interval = self.config.training.exit_interval
        world = self.trainer.world
        writes = self.saving is not None and not self.saving.done
        flags = [
            self.signals.stop_requested,
            timer.expired,
            world.rank == 0 and self.save_timer.expired,
            writes,
        ]
        reduced = world.all_reduce(torch.tensor(flags, dtype=torch.int32), "max")
        signalled, late, due, writing = reduced.tolist()
        reason = None
        if self._ends(interval):
            reason = f"--exit-interval {interval}"
        elif signalled:
            reason = "a signal asked to stop"
        elif late:
            reason = "--exit-duration-in-mins is over"
        return reason, bool(due), not writing

    def _save(self, directory: str) -> None:
        """Save, or begin to with --async-save or --save-local, after the previous save and a comparison of replicas."""
        self._finish_save()
        self._finish_hf_export()  # this save may remove the checkpoint that is exported
        self._compare_replicas()
        self.save_due = False
        self.save_timer = runtime.ExitTimer(self.config.output.save_interval_in_mins)
        self.saved_iteration = self.iteration
        output = self.config.output
        with self._saves(spans.SAVE):
            if output.async_save or output.save_local:
                self.saving = self.trainer.save_in_background(directory)
            else:
                self.trainer.save(directory)
        if not self.saving:
            self._report_save()
        self.telemetry.end_interval()

    @contextmanager
    def _phase(self, what: str, span: str, **attributes: float) -> Iterator[None]:
        """Name the block in heartbeats, and mark it as a span."""
        with self.watchdog.heart.phase(what), self.telemetry.span(span, **attributes):
            yield

    def _saves(self, span: str) -> AbstractContextManager[None]:
        iteration = self.saved_iteration
        return self._phase(f"save of iteration {iteration}", span, iteration=iteration)

    def _complete_copy(self) -> None:
        """Protect a state from which the run continues after it lost a node."""
        if self.copies and self.copies.is_incomplete:
            self._copy(self.copies)

    def _copy_if_due(self, reason: str | None) -> None:
        """Begin a copy unless the run ends, which saves, or weights diverge."""
        due = self._ends(self.config.output.save_memory) and self.iteration < self.iterations
        if self.copies and due and not (reason or self.skipped_in_a_row):
            self._check_data()
            self._compare_replicas()
            self._copy(self.copies)

    def _copy(self, copies: MemoryCopies) -> None:
        """Copy the state to other nodes' memory during the next iteration."""
        assert self.config.output.save
        with self._copies(spans.COPY):
            self.copying = self.trainer.copy_in_background(copies, self.config.output.save)

    def _remove_copies(self) -> None:
        self._finish_copy()
        if self.copies:
            self.copies.remove()

    def _finish_copy(self) -> None:
        if self.copying:
            with self._copies(spans.COPY_FINALIZE):
                self.copying.finish()
            self.copying = None

    def _copies(self, span: str) -> AbstractContextManager[None]:
        iteration = self.iteration
        return self._phase(f"copy after iteration {iteration}", span, iteration=iteration)

    def _advance_save(self, saving: BackgroundSave) -> None:
        """Advance a background save; all ranks have finished its present step."""
        with self._saves(spans.FINALIZE):
            done = saving.advance()
        if done:
            self.saving = None
            self._report_save()

    def _finish_save(self) -> None:
        while self.saving:
            self._advance_save(self.saving)

    def _report_save(self) -> None:
        directory = self.config.output.save
        self.writer.print(f"saved checkpoint of iteration {self.saved_iteration} to {directory}")
        if directory and self.writer.printing:
            self._draw(directory)
            interval = self.config.output.save_hf_interval
            if interval and self.saved_iteration % interval == 0:
                self.hf_export = HfExport.begin(directory, self.saved_iteration)

    def _finish_hf_export(self) -> None:
        if self.hf_export:
            self.writer.event(self.saved_iteration, self.hf_export.finish())
            self.hf_export = None

    def _draw(self, directory: str) -> None:
        self.picture_is_old = self.picture is not None and self.picture.poll() is None
        if not self.picture_is_old:
            description = loss_plot.describe(self.config, self.trainer.layout.dp)
            heading = loss_plot.title(description, os.path.abspath(directory))
            picture = os.path.join(directory, LOSS_CURVE)
            history = os.path.join(directory, HISTORY)
            self.picture = loss_plot.start_loss_curve(picture, history, heading)

    def _await_picture(self) -> None:
        if self.picture:
            self.picture.wait()
            directory = self.config.output.save
            if directory and self.picture_is_old:
                self._draw(directory)
                self.picture.wait()
