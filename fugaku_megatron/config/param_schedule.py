"""Learning rate and weight decay by samples consumed, as in Megatron-LM's optimizer_param_scheduler.py."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from .batches import last_samples, length, samples_after, sizes_of
from .decay_shapes import SHAPES, SchedulePoint
from .fields import check, flag
from .optimizer import OptimizerConfig
from .run_config import RunConfig
from .training import TrainingConfig

ROUNDING = 1e-9  # relative error of a length that is not a whole number of samples

# Fields with one length: a name, and a unit. At most one of them is set.
UNITS = ("iters", "samples", "tokens", "fraction")
WARM_UP = "lr_warmup"
DECAY = "lr_decay"
WSD_DECAY = "lr_wsd_decay"
LENGTH = "train"


def _given(config: OptimizerConfig | TrainingConfig, length: str) -> str:
    for unit in UNITS:
        if value := getattr(config, f"{length}_{unit}", None):
            return f"{flag(f'{length}_{unit}')} {value:.12g}"
    return ""


@dataclass(frozen=True)
class ParamSchedule:
    """Learning rate and weight decay by samples counted.

    All lengths are in samples, possibly fractional. wsd_samples: final decay in --lr-decay-style
    WSD
    """

    config: OptimizerConfig
    warmup_samples: float
    decay_samples: float
    total_samples: float
    wsd_samples: float = 0

    @staticmethod
    def from_run(run: RunConfig, global_batch_size: int) -> ParamSchedule:
        """Build the schedule from the -iters, -samples or -tokens flags and the run's batch sizes.

        Raises ValueError unless the warm-up is shorter than the decay and ends before WSD's final
        decay.
        """
        o = run.optimizer
        t = run.training
        s = run.model.seq_length
        sizes = sizes_of(run, global_batch_size)
        iterations = o.lr_decay_iters or t.train_iters or 0
        total = (
            t.train_samples or samples_after(sizes, t.train_iters or 0) or (t.train_tokens or 0) / s
        )
        decay = (
            o.lr_decay_samples
            or samples_after(sizes, o.lr_decay_iters or 0)
            or (o.lr_decay_tokens or 0) / s
            or total
        )
        warmup = (
            o.lr_warmup_samples
            or samples_after(sizes, o.lr_warmup_iters)
            or o.lr_warmup_tokens / s
            or (o.lr_warmup_fraction or 0) * decay
        )
        check(
            not warmup or warmup < decay,
            f"the warm-up of the learning rate, {warmup:.10g} samples ({_given(o, WARM_UP)}), is not below the {decay:.10g} "
            f"samples of its decay ({_given(o, DECAY) or _given(t, LENGTH)}): shorten it, or lengthen the decay",
        )
        if not SHAPES[o.lr_decay_style].final_decay:
            return ParamSchedule(o, warmup, decay, total)
        if decay != samples_after(sizes, iterations):  # in samples or tokens
            iterations, _ = length(TrainingConfig(train_tokens=decay), sizes)
        wsd = o.lr_wsd_decay_samples or last_samples(sizes, iterations, o.lr_wsd_decay_iters or 0)
        check(
            wsd + warmup <= decay * (1 + ROUNDING) or not decay,
            f"{_given(o, WSD_DECAY)}, {wsd:.10g} samples, is longer than the {decay - warmup:.10g} samples between the warm-up "
            f"({_given(o, WARM_UP) or 'none'}) and the end of the decay ({_given(o, DECAY) or _given(t, LENGTH)}): shorten it",
        )
        return ParamSchedule(o, warmup, decay, total, wsd)

    def notes(self, training: TrainingConfig) -> list[str]:
        """Report a schedule that is longer than the run, as Megatron-LM permits."""
        o = self.config
        end = _given(training, LENGTH)
        if self.warmup_samples > self.total_samples:
            return [
                f"the warm-up of the learning rate, {_given(o, WARM_UP)}, is longer than the run, {end}: it does not reach "
                f"--lr {o.lr:g}"
            ]
        if self.decay_samples > self.total_samples and self.decays:
            return [
                f"the learning rate decays over {_given(o, DECAY)}, longer than the run, {end}: its last rate is "
                f"{self.learning_rate(math.ceil(self.total_samples)):.3e}"
            ]
        return []

    @property
    def decays(self) -> bool:
        return SHAPES[self.config.lr_decay_style].decays

    @property
    def decoupled(self) -> ParamSchedule:
        """Schedule for weights with --decoupled-lr; without the flag the same schedule."""
        o = self.config
        if o.decoupled_lr is None:
            return self
        lowest = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
        config = replace(
            o, lr=o.decoupled_lr, min_lr=lowest, decoupled_lr=None, decoupled_min_lr=None
        )
        return replace(self, config=config)

    def state(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> ParamSchedule:
        return ParamSchedule(**{**state, "config": OptimizerConfig(**state["config"])})

    def learning_rate(self, samples: int) -> float:
        """Return the learning rate of an iteration that starts at `samples`."""
        o = self.config
        if self.warmup_samples and samples <= self.warmup_samples:
            return o.lr_warmup_init + (o.lr - o.lr_warmup_init) * samples / self.warmup_samples
        shape = SHAPES[o.lr_decay_style]
        if shape.decays and samples > self.decay_samples:
            return o.min_lr
        if shape.rate is not None:
            return shape.rate(
                SchedulePoint(
                    samples,
                    self.warmup_samples,
                    decay_samples=self.decay_samples,
                    lr=o.lr,
                    min_lr=o.min_lr,
                )
            )
        return o.min_lr + self._factor(samples) * (o.lr - o.min_lr)

    def _factor(self, samples: int) -> float:
        o = self.config
        shape = SHAPES[o.lr_decay_style]
        if not shape.final_decay:
            # The length is above 0, possibly below 1; 0 only for a run without samples.
            length = self.decay_samples - self.warmup_samples
            return shape.factor((samples - self.warmup_samples) / (length or 1))
        begun = samples - (self.decay_samples - self.wsd_samples)
        if begun <= 0:
            return 1.0
        return SHAPES[o.lr_wsd_decay_style].factor(begun / self.wsd_samples)

    def weight_decay(self, samples: int) -> float:
        o = self.config
        start, end = o.weight_decays
        shape = SHAPES[o.weight_decay_incr_style]
        if not shape.decays or samples > self.total_samples:
            return end
        return start + (end - start) * shape.factor(1.0 - samples / max(1, self.total_samples))
