"""The global batch size as a function of the samples consumed, and the length of a run that follows from it. Integers only.

Left out: which samples a rank takes (`data.sampler`). Test: pytest tests/test_batches.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .checks import check
from .config import BatchConfig, TrainingConfig


@dataclass(frozen=True)
class RampUp:
    """--rampup-batch-size START INCREMENT SAMPLES: the global batch size grows from `start` to `global_batch_size`.

    The steps of `increment` are spread evenly over the first `ramp_samples` samples (Megatron-LM's schedule). All sizes are in
    samples. Raises ValueError for sizes below 1 and for an increment that does not lead from start to the global batch size.
    """

    start: int
    increment: int
    ramp_samples: int
    global_batch_size: int

    @staticmethod
    def from_batch(batch: BatchConfig, global_batch_size: int) -> RampUp:
        """From the run's flags; without --rampup-batch-size the size is constant."""
        return RampUp(*(batch.rampup_batch_size or (global_batch_size, 1, 0)), global_batch_size)

    def __post_init__(self) -> None:
        flag = f"--rampup-batch-size {self.start} {self.increment} {self.ramp_samples}"
        check(self.start >= 1 and self.increment >= 1 and self.ramp_samples >= 0,
              f"{flag}: start and increment must be at least 1, samples at least 0")
        rise = self.global_batch_size - self.start
        check(rise >= 0 and rise % self.increment == 0, f"{flag}: --global-batch-size {self.global_batch_size} minus start "
              f"{self.start} is {rise}, not a multiple of the increment {self.increment} (0 or more times)")

    def sizes(self) -> range:
        """Every global batch size on the way, in order."""
        return range(self.start, self.global_batch_size + 1, self.increment)

    def __call__(self, consumed: int) -> int:
        """Global batch size of the iteration that begins at `consumed` samples."""
        steps = len(self.sizes()) - 1
        if consumed >= self.ramp_samples:
            return self.global_batch_size
        return self.start + self.increment * (consumed * steps // self.ramp_samples)


def starts(ramp: RampUp, consumed: int = 0) -> Iterator[int]:
    """The consumed samples at which iterations start, without end: `consumed` first, then one global batch more each time."""
    while True:
        yield consumed
        consumed += ramp(consumed)


def length(training: TrainingConfig, ramp: RampUp, iteration: int = 0, samples: int = 0) -> tuple[int, int]:
    """(iterations, samples) at the end of the run: --train-iters, or as many iterations as --train-samples needs.

    A resumed run starts at `iteration` with `samples` consumed, which it may have reached with another batch size.
    Raises ValueError when neither flag is given.
    """
    check(training.train_iters is not None or training.train_samples is not None, "give --train-iters or --train-samples")
    iters = training.train_iters
    ramped = 0  # iterations before the batch has its final size
    for ramped, consumed in enumerate(starts(ramp, samples), iteration):  # noqa: B007 - used after the loop
        done = ramped >= iters if iters is not None else consumed >= training.train_samples
        if done or consumed >= ramp.ramp_samples:
            break
    if iters is not None:
        return iters, consumed + max(0, iters - ramped) * ramp.global_batch_size
    rest = -(-max(0, training.train_samples - consumed) // ramp.global_batch_size)
    return ramped + rest, consumed + rest * ramp.global_batch_size
