"""What follows from the samples consumed: the global batch size, with it the length of a run, learning rate and weight decay.

The schedules of the last two follow the rules of Megatron-LM's megatron/core/optimizer_param_scheduler.py.
Left out: which samples a rank takes (`data.sampler`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from .fields import check
from .run_config import RunConfig
from .sample_rules import Skips, StepSizes
from .training import BatchConfig, TrainingConfig

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
