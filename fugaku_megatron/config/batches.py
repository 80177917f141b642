"""Global batch size by samples consumed, and the run length."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from .fields import check
from .run_config import RunConfig
from .sample_rules import Skips, StepSizes
from .training import TrainingConfig

NO_SKIPS = Skips()
MAX_SIZES = 2**16  # in a ramp, because each one is checked


@dataclass(frozen=True)
class RampUp:
    """Batch-size ramp of --rampup-batch-size START INCREMENT SAMPLES, up to `global_batch_size`.

    Steps are even over the first `ramp_samples` samples, in the floating-point arithmetic of
    Megatron-LM's megatron/core/num_microbatches_calculator.py. Raises ValueError if they do not end
    at the global batch size.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

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
        return range(self.start, self.global_batch_size + 1, self.increment)

    def __call__(self, consumed: int) -> int:
        return self.start + self.increment * self._steps(consumed)

    def _steps(self, consumed: int) -> int:
        steps = len(self.sizes()) - 1
        if consumed > self.ramp_samples or not steps or not self.ramp_samples:
            return steps
        return int(consumed / (self.ramp_samples / steps))

    def next_change(self, consumed: int) -> int | None:
        """Return the first sample after `consumed` with another size, or None."""
        steps = self._steps(consumed)
        last = len(self.sizes()) - 1
        if steps == last:
            return None
        # Rounding moves the result by at most one sample.
        exact = -(-(steps + 1) * self.ramp_samples // last)
        return bisect_right(range(exact + 2), steps, lo=max(consumed, exact - 1), key=self._steps)


Sizes = RampUp | StepSizes


def sizes_of(run: RunConfig, global_batch_size: int) -> Sizes:
    """Return the schedule or ramp of the flags, or else a constant size."""
    if steps := run.batch.step_batch_size_schedule:
        return StepSizes.parse(steps, run.model.seq_length)
    start, increment, samples = run.batch.rampup_batch_size or (global_batch_size, 1, 0)
    return RampUp(start, increment, samples, global_batch_size)


def length(
    training: TrainingConfig,
    sizes: Sizes,
    iteration: int = 0,
    samples: int = 0,
    skips: Skips = NO_SKIPS,
    seq_length: int = 1,
) -> tuple[int, int]:
    """Return (iterations, samples) at the end, after a start at `iteration` with `samples`
    consumed.

    The run ends at the first of --train-iters, the last whole iteration of --train-samples, and the
    iteration that reaches --train-tokens. Under --step-batch-size-schedule, --train-samples ends
    with the iteration that reaches it, as in Megatron-LM (update_train_iters). Raises ValueError
    without a length.

    skips: samples left out, but counted as consumed
    """
    lengths = (training.train_iters, training.train_samples, training.train_tokens)
    check(any(value is not None for value in lengths), "pass --train-iters or --train-samples")
    last = training.train_samples if isinstance(sizes, RampUp) else None
    while left := _iterations_left(
        training, sizes(samples), last is not None, iteration, samples, seq_length
    ):
        size = sizes(samples)
        change = sizes.next_change(samples)
        ahead = left if change is None else min(left, -(-(change - samples) // size))
        more, end = skips.advance(samples, size, ahead)
        if last is not None and end > last:
            break
        iteration += more
        samples = end
    if training.train_iters is not None:
        iteration = min(iteration, training.train_iters)
    return iteration, samples


def _iterations_left(
    training: TrainingConfig, size: int, whole: bool, iteration: int, samples: int, seq_length: int
) -> int:
    """Return the iterations left at this size. whole: end --train-samples with a whole iteration"""
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
    return length(
        run.training,
        sizes_of(run, global_batch_size),
        iteration,
        samples,
        Skips.parse(run.data.skip_samples),
        run.model.seq_length,
    )


def samples_after(sizes: Sizes, iterations: int) -> int:
    return length(TrainingConfig(train_iters=iterations), sizes)[1]


def last_samples(sizes: Sizes, iterations: int, count: int) -> int:
    """Return the samples in the last `count` iterations; earlier ones have the first's size."""
    missing = max(0, count - iterations)
    begin = samples_after(sizes, iterations - count + missing)
    return samples_after(sizes, iterations) - begin + missing * sizes(0)


def requested_samples(run: RunConfig, global_batch_size: int, end: int) -> int:
    """Return the number of samples in the training data's order, which determines the epochs.

    As in Megatron-LM: --train-samples, or --train-iters full batches. The full batch of
    --step-batch-size-schedule is one micro-batch per data-parallel rank, so the result is `end` in
    every layout.

    end: samples at the end of the run, the minimum
    """
    training = run.training
    batch = 0 if run.batch.step_batch_size_schedule else global_batch_size
    return max(training.train_samples or (training.train_iters or 0) * batch, end)
