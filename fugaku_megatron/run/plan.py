"""A run's plan: layout, schedule, memory, FLOPs and length, computed once from its config. No
torch.

The command, the library and --dry-run build the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from ..config import batches
from ..config.layout import Layout
from ..config.output import default_log_interval
from ..config.parallel import EITHER, P2P
from ..config.param_schedule import ParamSchedule
from ..config.run_config import RunConfig
from ..costs import memory, run_schedule
from ..costs.flops import hardware_flops, model_flops
from ..pipeline.schedule import Schedule
from ..pipeline.schedule_names import AUTO

if TYPE_CHECKING:
    from ..planner.system import System

T = TypeVar("T")

# Costs of this machine rank the schedules everywhere, so that a dry run on another machine makes the same choice.
MACHINE = "a64fx"


class Limits(Protocol):
    """Bounds that the machine sets on automatic choices. Every method is collective."""

    def sequence_spans_nodes(self, layout: Layout) -> bool: ...

    def tensor_bytes(self, config: RunConfig, layout: Layout) -> int:
        """Return the bytes that a rank's tensors may have, the same on every rank."""

    def choose(self, choice: Callable[[], T]) -> T: ...


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
    """Config, and everything that follows from it and the world size. `resolve` makes its automatic choices.

    choices: the log's lines about them
    iteration, consumed_samples: the run begins here

    Slow values are computed at their first use.
    """

    config: RunConfig
    layout: Layout
    choices: tuple[str, ...] = ()
    iteration: int = 0
    consumed_samples: int = 0

    @staticmethod
    def of(config: RunConfig, world_size: int) -> Plan:
        """Lay the run out. Raise ValueError with flag and remedy if it does not fit."""
        return Plan(config, Layout.from_run(config, world_size))

    def resolve(self, limits: Limits) -> Plan:
        """Return the plan with every automatic choice made. Collective.

        Only --pipeline-schedule auto loads the performance model.
        """
        config = self.config
        layout = self.layout
        masked = config.data.masks_attention
        if layout.cp > 1 and not masked and limits.sequence_spans_nodes(layout):
            config = _between_nodes(config)
        choices: list[str] = []
        ranks_schedules = config.parallel.pipeline_schedule == AUTO and layout.pp > 1
        if ranks_schedules or config.training.recompute_auto:
            space = limits.tensor_bytes(config, layout)
            if ranks_schedules:
                from ..planner import search

                system = modelled_system(layout)
                config, choices = limits.choose(
                    lambda: search.resolve(config, layout, system, space)
                )
            else:
                config, choices = limits.choose(
                    lambda: run_schedule.resolve_recompute(config, layout, space)
                )
        return replace(self, config=config, choices=tuple(choices))

    def resumed(self, iteration: int, consumed_samples: int) -> Plan:
        return replace(self, iteration=iteration, consumed_samples=consumed_samples)

    @property
    def global_batch_size(self) -> int:
        """Samples in an iteration, after a ramp-up."""
        return self.layout.global_batch_size(self.config)

    @property
    def microbatches(self) -> int:
        """A rank's micro-batches at the full global batch size."""
        return self.layout.microbatches(self.config, self.global_batch_size)

    @cached_property
    def schedule(self) -> Schedule:
        return run_schedule.build_schedule(self.config, self.microbatches)

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
            return evaluations * training.eval_iters * self.layout.eval_batch_size(self.config)
        if self.config.data.mock_data:
            return training.eval_iters * self.layout.eval_batch_size(self.config)
        return None


def modelled_system(layout: Layout) -> System:
    """Return nodes of one rank each, a model of any machine."""
    from ..planner.software import THIS_PROJECT
    from ..planner.system import System

    return System.from_names(MACHINE, THIS_PROJECT, layout.world_size, 1)


def _between_nodes(config: RunConfig) -> RunConfig:
    """Pass keys and values between nodes, behind attention, in layers without --cp-comm-type.

    Only if sequences are not cut into documents: all ranks have the same work.
    """
    given = config.parallel.cp_comm_type or (EITHER,)
    resolved = tuple(P2P if comm_type == EITHER else comm_type for comm_type in given)
    return replace(config, parallel=replace(config.parallel, cp_comm_type=resolved))
