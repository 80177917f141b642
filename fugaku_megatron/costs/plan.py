"""A run's plan: everything that follows from its flags and its world size, computed once. No torch.

The command, the library, --dry-run, --check-layout and the report build the same plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from ..config import batches
from ..config.layout import Layout, evaluation_run
from ..config.output import default_log_interval
from ..config.param_schedule import ParamSchedule
from ..config.run_config import RunConfig
from ..config.sample_rules import Skips
from ..pipeline.schedule import Schedule
from . import memory, run_schedule
from .flops import hardware_flops, model_flops


class Flops(NamedTuple):
    """An iteration's floating-point operations at the full global batch size.

    hardware: with recomputation
    model: without it, causal attention counted once
    """

    hardware: float
    model: float


class Length(NamedTuple):
    """A run's length.

    iterations, samples: at its end
    train_samples: for the training data's order
    valid_samples: for all evaluations; None: every sample once
    """

    iterations: int
    samples: int
    train_samples: int
    evaluations: int
    valid_samples: int | None


@dataclass(frozen=True)
class Plan:
    """Config, and everything that follows from it and the world size.

    choices: the log's lines about automatic choices, which `MachineLimits.resolve` makes
    iteration, consumed_samples: the run begins here
    open_ended: no flag sets the length; `lasting` lengthens the run

    Values are computed at their first use.
    """

    config: RunConfig
    layout: Layout
    choices: tuple[str, ...] = ()
    iteration: int = 0
    consumed_samples: int = 0
    open_ended: bool = False

    @staticmethod
    def of(config: RunConfig, world_size: int) -> Plan:
        """Lay the run out. Raise ValueError with flag and remedy if it does not fit."""
        return Plan(config, Layout.from_run(config, world_size))

    def resumed(self, iteration: int, consumed_samples: int) -> Plan:
        return replace(self, iteration=iteration, consumed_samples=consumed_samples)

    def lasting(self, iterations: int) -> Plan:
        """Return the plan with so many iterations, if no flag sets the run's length."""
        if not self.open_ended:
            return self
        training = replace(self.config.training, train_iters=iterations)
        return replace(self, config=replace(self.config, training=training))

    @cached_property
    def global_batch_size(self) -> int:
        """Samples in an iteration, after a ramp-up."""
        return self.layout.global_batch_size(self.config)

    @cached_property
    def eval_batch_size(self) -> int:
        return self.layout.eval_batch_size(self.config)

    @cached_property
    def batch_sizes(self) -> batches.Sizes:
        """Samples in an iteration, by consumed samples."""
        return batches.sizes_of(self.config, self.global_batch_size)

    @cached_property
    def skips(self) -> Skips:
        """Samples that --skip-samples leaves out."""
        return Skips.parse(self.config.data.skip_samples)

    @cached_property
    def evaluation(self) -> Plan:
        """Plan with the micro-batches of an evaluation."""
        return replace(self, config=evaluation_run(self.config))

    @cached_property
    def microbatches(self) -> int:
        """A rank's micro-batches at the full global batch size."""
        return self.layout.microbatches(self.config, self.global_batch_size)

    @cached_property
    def schedule(self) -> Schedule:
        return run_schedule.build_schedule(self.config, self.microbatches)

    def schedule_of(self, samples: int) -> Schedule:
        """Return the pipeline schedule of an iteration. samples: its global batch size"""
        microbatches = self.layout.microbatches(self.config, samples)
        return run_schedule.build_schedule(self.config, microbatches)

    @cached_property
    def param_schedule(self) -> ParamSchedule:
        """Learning rate and weight decay by consumed samples."""
        return ParamSchedule.from_run(self.config, self.global_batch_size)

    @cached_property
    def flops(self) -> Flops:
        size = self.global_batch_size
        return Flops(
            hardware=hardware_flops(self.config, size),
            model=model_flops(self.config, size),
        )

    @cached_property
    def memory(self) -> tuple[memory.Memory, ...]:
        """Memory of a rank of each stage."""
        return tuple(
            memory.stage_memory(self.config, self.layout, stage, self.schedule.in_flight(stage))
            for stage in range(self.layout.pp)
        )

    @cached_property
    def length(self) -> Length:
        """Length from the run's beginning. ValueError if no flag sets it."""
        iterations, samples = batches.run_length(
            self.config, self.global_batch_size, self.iteration, self.consumed_samples
        )
        evaluations = self.evaluations(iterations)
        return Length(
            iterations=iterations,
            samples=samples,
            train_samples=batches.requested_samples(self.config, self.global_batch_size, samples),
            evaluations=evaluations,
            valid_samples=self.valid_samples(evaluations),
        )

    @property
    def log_interval(self) -> int:
        given = self.config.output.log_interval
        return given or default_log_interval(self.length.iterations)

    def evaluations(self, iterations: int) -> int:
        """Count evaluations: one every --eval-interval and one at the end; with --skip-train one."""
        training = self.config.training
        if not training.eval_iters:
            return 0
        if training.skip_train:
            return 1
        before_first = -(-(training.start_eval_at_iter or 0) // training.eval_interval) - 1
        return max(0, iterations // training.eval_interval + 1 - max(0, before_first))

    def valid_samples(self, evaluations: int) -> int | None:
        """Return the validation samples for so many evaluations; None: all in the files.

        Random samples have no end: --full-validation reads one evaluation's.
        """
        training = self.config.training
        if not training.full_validation:
            return evaluations * training.eval_iters * self.eval_batch_size
        if self.config.data.mock_data:
            return training.eval_iters * self.eval_batch_size
        return None
