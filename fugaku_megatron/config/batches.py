"""What follows from the samples consumed: the global batch size, with it the length of a run, learning rate and weight decay.

The schedules of the last two follow the rules of Megatron-LM's megatron/core/optimizer_param_scheduler.py.
Left out: which samples a rank takes (`data.sampler`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .checks import check, flag
from .run_config import BatchConfig, OptimizerConfig, RunConfig, TrainingConfig
from .sample_rules import Skips, StepSizes

NO_SKIPS = Skips()
MAX_SIZES = 2**16  # of a ramp: each is looked at


@dataclass(frozen=True)
class RampUp:
    """--rampup-batch-size START INCREMENT SAMPLES: the global batch size grows from `start` to `global_batch_size`.

    The steps of `increment` are spread evenly over the first `ramp_samples` samples. Where a step begins at a whole sample, the
    floating-point arithmetic of Megatron-LM's megatron/core/num_microbatches_calculator.py decides, in the versions that have the
    flag. All sizes are in samples. Raises ValueError for sizes below 1 and for an increment that does not lead from start to the
    global batch size.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    @staticmethod
    def from_batch(batch: BatchConfig, global_batch_size: int) -> RampUp:
        """From the run's flags; without --rampup-batch-size the size is constant."""
        start, increment, samples = batch.rampup_batch_size or (global_batch_size, 1, 0)
        return RampUp(start, increment, samples, global_batch_size)

    def __post_init__(self) -> None:
        flag = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples}"
        check(
            self.start >= 1 and self.increment >= 1 and self.ramp_samples >= 0,
            f"{flag}: start and increment must be at least 1, samples at least 0",
        )
        rise = self.global_batch_size - self.start
        check(
            rise >= 0 and rise % self.increment == 0,
            f"{flag}: --global-batch-size {self.global_batch_size} minus start "
            f"{self.start} is {rise}, not a multiple of the increment {self.increment} (0 or more times)",
        )
        check(
            rise // self.increment < MAX_SIZES,
            f"{flag}: {rise // self.increment} steps to --global-batch-size "
            f"{self.global_batch_size}: pass an increment that makes fewer than {MAX_SIZES}",
        )

    def sizes(self) -> range:
        """Every global batch size on the way, in order."""
        return range(self.start, self.global_batch_size + 1, self.increment)

    def __call__(self, consumed: int) -> int:
        """Global batch size of the iteration that begins at `consumed` samples."""
        return self.start + self.increment * self._steps(consumed)

    def _steps(self, consumed: int) -> int:
        steps = len(self.sizes()) - 1
        if consumed > self.ramp_samples or not steps or not self.ramp_samples:
            return steps
        return int(consumed / (self.ramp_samples / steps))

    def next_change(self, consumed: int) -> int | None:
        """The first sample after `consumed` at which the size is another one; None where it stays."""
        steps, last = self._steps(consumed), len(self.sizes()) - 1
        if steps == last:
            return None
        exact = -(
            -(steps + 1) * self.ramp_samples // last
        )  # rounding moves it by one sample at most
        return bisect_right(range(exact + 2), steps, lo=max(consumed, exact - 1), key=self._steps)


Sizes = RampUp | StepSizes


def sizes_of(run: RunConfig, global_batch_size: int) -> Sizes:
    """The global batch size of a run as a function of the samples consumed."""
    steps = run.batch.step_batch_size_schedule
    return (
        StepSizes.parse(steps, run.model.seq_length)
        if steps
        else RampUp.from_batch(run.batch, global_batch_size)
    )


def length(
    training: TrainingConfig,
    sizes: Sizes,
    iteration: int = 0,
    samples: int = 0,
    skips: Skips = NO_SKIPS,
    seq_length: int = 1,
) -> tuple[int, int]:
    """(iterations, samples) at the end of the run, whichever comes first of those that are set: --train-iters, --train-samples,
    the iteration that reaches --train-tokens.

    --train-samples ends with its last whole iteration, and under --step-batch-size-schedule with the iteration that reaches it, as
    in Megatron-LM (megatron/training/training.py, update_train_iters). A resumed run starts at `iteration` with `samples` consumed,
    which it may have reached with another batch size. skips: samples that are left out; they count as consumed. seq_length: tokens
    of a sample. Raises ValueError when none of the flags is set.
    """
    lengths = training.train_iters, training.train_samples, training.train_tokens
    check(any(value is not None for value in lengths), "pass --train-iters or --train-samples")
    last = training.train_samples if isinstance(sizes, RampUp) else None
    while left := _iterations_left(
        training, sizes(samples), last is not None, iteration, samples, seq_length
    ):
        size, change = sizes(samples), sizes.next_change(samples)
        ahead = left if change is None else min(left, -(-(change - samples) // size))
        more, end = skips.advance(samples, size, ahead)
        if last is not None and end > last:
            break
        iteration, samples = iteration + more, end
    return iteration if training.train_iters is None else min(
        iteration, training.train_iters
    ), samples


def _iterations_left(
    training: TrainingConfig, size: int, whole: bool, iteration: int, samples: int, seq_length: int
) -> int:
    """Iterations to the end if all of them had this global batch size. whole: --train-samples has no part of an iteration."""
    left = []
    if training.train_iters is not None:
        left.append(training.train_iters - iteration)
    if training.train_samples is not None:
        samples_left = training.train_samples - samples
        left.append(samples_left // size if whole else -(-samples_left // size))
    if training.train_tokens is not None:
        left.append(-(-(math.ceil(training.train_tokens / seq_length) - samples) // size))
    return max(0, min(left))


def run_length(
    run: RunConfig, global_batch_size: int, iteration: int = 0, samples: int = 0
) -> tuple[int, int]:
    """`length` of a run, its ramp and its skipped samples."""
    return length(
        run.training,
        sizes_of(run, global_batch_size),
        iteration,
        samples,
        Skips.parse(run.data.skip_samples),
        run.model.seq_length,
    )


def samples_after(sizes: Sizes, iterations: int) -> int:
    """Return the samples of the first `iterations` of a run, of which none are left out."""
    samples = 0
    while iterations:
        size, change = sizes(samples), sizes.next_change(samples)
        some = iterations if change is None else min(iterations, -(-(change - samples) // size))
        samples += some * size
        iterations -= some
    return samples


def last_samples(sizes: Sizes, iterations: int, count: int) -> int:
    """Return the samples of the last `count` of so many iterations; those beyond the first have its size."""
    missing = max(0, count - iterations)
    begin = samples_after(sizes, iterations - count + missing)
    return samples_after(sizes, iterations) - begin + missing * sizes(0)


def requested_samples(run: RunConfig, global_batch_size: int, end: int) -> int:
    """Samples that the order of the training data is made for: --train-samples, or --train-iters full batches, as in Megatron-LM.

    How often the data is read, and with it the order of every sample, follows from this number. end: samples at the end of the run,
    of which none may be missing. Under --step-batch-size-schedule a full batch of Megatron-LM is one micro-batch of every
    data-parallel rank. --train-iters of these are never more than `end`, so the result is `end` for every layout.
    """
    training = run.training
    batch = 0 if run.batch.step_batch_size_schedule else global_batch_size
    return max(training.train_samples or (training.train_iters or 0) * batch, end)


# Share of the way from the peak down to --min-lr that is left at a fraction of the decay: 1 at fraction 0, 0 at fraction 1.
SHAPES = {
    "linear": lambda fraction: 1.0 - fraction,
    "cosine": lambda fraction: 0.5 * (math.cos(math.pi * fraction) + 1.0),
    "exponential": lambda fraction: 2.0 * 0.5**fraction - 1.0,
    "minus_sqrt": lambda fraction: 1.0 - math.sqrt(fraction),
}


ROUNDING = 1e-9  # of a length in fractions of a sample
# Flags of one length each, of which at most one is given.
WARM_UPS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction")
DECAYS = ("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens")
WSD_DECAYS = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
LENGTHS = ("train_samples", "train_iters", "train_tokens")


def _given(config: OptimizerConfig | TrainingConfig, names: Sequence[str]) -> str:
    """Return the first of these flags that is set, with its value."""
    for name in names:
        if value := getattr(config, name):
            return f"{flag(name)} {value:.12g}"
    return ""


@dataclass(frozen=True)
class ParamSchedule:
    """Learning rate and weight decay as functions of the samples that the schedule has counted.

    All lengths are in samples, and need not be whole. wsd_samples: of the decay at the end of --lr-decay-style WSD.
    """

    config: OptimizerConfig
    warmup_samples: float
    decay_samples: float
    total_samples: float
    wsd_samples: float = 0

    @staticmethod
    def from_run(run: RunConfig, global_batch_size: int) -> ParamSchedule:
        """From the -iters, -samples or -tokens flags; iterations have the sizes that the run gives them.

        Raises ValueError for a warm-up that is not below the length of the decay, and for a decay of WSD that begins before the
        warm-up ends.
        """
        o, t, s = run.optimizer, run.training, run.model.seq_length
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
            f"the warm-up of the learning rate, {warmup:.10g} samples ({_given(o, WARM_UPS)}), is not below the {decay:.10g} "
            f"samples of its decay ({_given(o, DECAYS) or _given(t, LENGTHS)}): shorten it, or lengthen the decay",
        )
        if o.lr_decay_style != "WSD":
            return ParamSchedule(o, warmup, decay, total)
        if decay != samples_after(sizes, iterations):  # it is in samples or tokens
            iterations, _ = length(TrainingConfig(train_tokens=decay), sizes)
        wsd = o.lr_wsd_decay_samples or last_samples(sizes, iterations, o.lr_wsd_decay_iters or 0)
        check(
            wsd + warmup <= decay * (1 + ROUNDING) or not decay,
            f"{_given(o, WSD_DECAYS)}, {wsd:.10g} samples, is longer than the {decay - warmup:.10g} samples between the warm-up "
            f"({_given(o, WARM_UPS) or 'none'}) and the end of the decay ({_given(o, DECAYS) or _given(t, LENGTHS)}): shorten it",
        )
        return ParamSchedule(o, warmup, decay, total, wsd)

    def notes(self, training: TrainingConfig) -> list[str]:
        """Return a line about a schedule that goes on after the run, as Megatron-LM permits."""
        o, end = self.config, _given(training, LENGTHS)
        if self.warmup_samples > self.total_samples:
            return [
                f"the warm-up of the learning rate, {_given(o, WARM_UPS)}, is longer than the run, {end}: it does not reach "
                f"--lr {o.lr:g}"
            ]
        if self.decay_samples > self.total_samples and o.lr_decay_style != "constant":
            return [
                f"the learning rate decays over {_given(o, DECAYS)}, longer than the run, {end}: its last rate is "
                f"{self.learning_rate(math.ceil(self.total_samples)):.3e}"
            ]
        return []

    @property
    def decoupled(self) -> ParamSchedule:
        """The schedule of the weights that --decoupled-lr is for, which is the same one without it."""
        o = self.config
        if o.decoupled_lr is None:
            return self
        lowest = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
        return replace(
            self,
            config=replace(
                o, lr=o.decoupled_lr, min_lr=lowest, decoupled_lr=None, decoupled_min_lr=None
            ),
        )

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return asdict(self)

    @staticmethod
    def from_state(state: dict[str, Any]) -> ParamSchedule:
        """Back from the checkpoint."""
        return ParamSchedule(**{**state, "config": OptimizerConfig(**state["config"])})

    def learning_rate(self, samples: int) -> float:
        """Rate of the iteration that starts when `samples` were counted (--lr-warmup-init in the first one of a warm-up)."""
        o, style = self.config, self.config.lr_decay_style
        if self.warmup_samples and samples <= self.warmup_samples:
            return o.lr_warmup_init + (o.lr - o.lr_warmup_init) * samples / self.warmup_samples
        if style == "constant":
            return o.lr
        if samples > self.decay_samples:
            return o.min_lr
        if style == "inverse-square-root":
            return max(o.min_lr, o.lr * max(self.warmup_samples, 1) ** 0.5 / max(samples, 1) ** 0.5)
        return o.min_lr + self._left(samples) * (o.lr - o.min_lr)

    def _left(self, samples: int) -> float:
        """Share of the decay that is still to come."""
        if self.config.lr_decay_style != "WSD":
            length = (
                self.decay_samples - self.warmup_samples
            )  # above 0, and possibly below 1; 0 for a run of no samples
            return SHAPES[self.config.lr_decay_style](
                (samples - self.warmup_samples) / (length or 1)
            )
        begun = samples - (self.decay_samples - self.wsd_samples)
        return (
            1.0 if begun <= 0 else SHAPES[self.config.lr_wsd_decay_style](begun / self.wsd_samples)
        )

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the same iteration."""
        o = self.config
        start = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
        end = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
        if o.weight_decay_incr_style == "constant" or samples > self.total_samples:
            return end
        return start + (end - start) * SHAPES[o.weight_decay_incr_style](
            1.0 - samples / max(1, self.total_samples)
        )
