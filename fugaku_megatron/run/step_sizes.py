"""--step-batch-size-schedule: the global batch size in steps that begin at given numbers of tokens.

Rules of Megatron-LM's megatron/core/num_microbatches_calculator.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .checks import check

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):([1-9]\d{0,7})", re.ASCII)


@dataclass(frozen=True)
class StepSizes:
    """The global batch size as a function of the samples consumed, as `batches.RampUp` is one. steps: (first sample, size)."""

    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def parse(text: str, seq_length: int = 1) -> StepSizes:
        """From a text such as "0:768 250B:1536": tokens, and the size from there on. Raises ValueError for another form."""
        flag, steps = f"--step-batch-size-schedule {text[:60]!r}", []
        for part in text.replace(",", " ").upper().split():
            match = _STEP.fullmatch(part)
            check(match is not None, f"{flag}: {part[:30]} is no TOKENS:SIZE, such as 250B:1536")
            steps.append((int(float(match[1]) * UNITS[match[2]]) // seq_length, int(match[3])))
        check(bool(steps) and steps[0][0] == 0, f"{flag}: the first step must begin at 0")
        rising = all(a[0] < b[0] for a, b in zip(steps, steps[1:]))
        check(rising, f"{flag}: every step must begin at least one sample behind the one before it")
        return StepSizes(tuple(steps))

    @property
    def global_batch_size(self) -> int:
        """The last size."""
        return self.steps[-1][1]

    def sizes(self) -> list[int]:
        """Every global batch size on the way, in order."""
        return [size for _, size in self.steps]

    def __call__(self, consumed: int) -> int:
        """Global batch size of the iteration that begins at `consumed` samples."""
        return next(size for first, size in reversed(self.steps) if consumed >= first)

    def next_change(self, consumed: int) -> int | None:
        """The first sample after `consumed` at which another size is due; None where the size stays."""
        return next((first for first, _ in self.steps if first > consumed), None)
