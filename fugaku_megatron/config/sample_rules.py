"""Batch sizes of --step-batch-size-schedule, and sample ranges of --skip-samples.

The schedule follows Megatron-LM's megatron/core/num_microbatches_calculator.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .fields import check

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d{1,15}(?:\.\d{1,15})?)([KMBT]?):([1-9]\d{0,7})", re.ASCII)


@dataclass(frozen=True)
class StepSizes:
    """Global batch size in steps. steps: (first sample, size)"""

    steps: tuple[tuple[int, int], ...]

    @staticmethod
    def parse(text: str, seq_length: int = 1) -> StepSizes:
        """Parse TOKENS:SIZE ..., such as "0:768 250B:1536". Raises ValueError for another form."""
        flag = f"--step-batch-size-schedule {text[:60]!r}"
        steps: list[tuple[int, int]] = []
        for word in text.replace(",", " ").upper().split():
            match = _STEP.fullmatch(word)
            if match is None:
                raise ValueError(f"{flag}: {word[:30]} is not TOKENS:SIZE, such as 250B:1536")
            steps.append((int(float(match[1]) * UNITS[match[2]]) // seq_length, int(match[3])))
        check(bool(steps) and steps[0][0] == 0, f"{flag}: the first step must begin at 0")
        rising = all(a[0] < b[0] for a, b in zip(steps, steps[1:]))
        check(rising, f"{flag}: every step must begin at least one sample after the one before it")
        return StepSizes(tuple(steps))

    @property
    def global_batch_size(self) -> int:
        return self.steps[-1][1]

    def sizes(self) -> list[int]:
        return [size for _, size in self.steps]

    def __call__(self, consumed: int) -> int:
        return next(size for first, size in reversed(self.steps) if consumed >= first)

    def next_change(self, consumed: int) -> int | None:
        return next((first for first, _ in self.steps if first > consumed), None)


MAX_SAMPLE = 2**40  # as the maximum of --train-samples


@dataclass(frozen=True)
class Skips:
    """Skipped samples. ranges: sorted, disjoint"""

    ranges: tuple[range, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @staticmethod
    def parse(texts: Iterable[str] | None) -> Skips:
        """Parse FIRST:END ranges, such as 4096:4608 or 10:20,30:40. Raises ValueError for another
        form.
        """
        ranges: list[range] = []
        for first, end in sorted(_bounds(word) for text in texts or () for word in text.split(",")):
            if ranges and first <= ranges[-1].stop:
                last = ranges.pop()
                first = last.start
                end = max(end, last.stop)
            ranges.append(range(first, end))
        return Skips(tuple(ranges))

    def __str__(self) -> str:
        return ",".join(f"{r.start}:{r.stop}" for r in self.ranges)

    def samples(self, position: int, count: int) -> Sequence[int]:
        ahead = [r for r in self.ranges if r.stop > position and r.start < position + count]
        if not ahead:
            return range(position, position + count)
        chosen: list[int] = []
        for skip in self.ranges:
            chosen += range(position, min(skip.start, position + count - len(chosen)))
            position = max(position, skip.stop)
        return [*chosen, *range(position, position + count - len(chosen))]

    def advance(self, position: int, size: int, iterations: int) -> tuple[int, int]:
        """Advance by up to `iterations` with `size` samples each; return their number and the new
        position.
        """
        start = next(
            (r.start for r in self.ranges if r.stop > position), position + size * iterations
        )
        if start >= position + size:
            iterations = min(iterations, (start - position) // size)
            return iterations, position + iterations * size
        return 1, self.samples(position, size)[-1] + 1

    def between(self, first: int, end: int) -> Skips:
        cut = (range(max(r.start, first), min(r.stop, end)) for r in self.ranges)
        return Skips(tuple(r for r in cut if r))


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,13}):(\d{1,13})", text.strip(), re.ASCII)
    if match is None:
        raise ValueError(
            f"--skip-samples {text[:40]!r}: pass FIRST:END, such as 4096:4608, END not included"
        )
    first = int(match[1])
    end = int(match[2])
    check(
        first < end <= MAX_SAMPLE,
        f"--skip-samples {text}: FIRST must be below END, and END at most {MAX_SAMPLE}",
    )
    return first, end
