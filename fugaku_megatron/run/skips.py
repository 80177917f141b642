"""--skip-samples: ranges of samples that training leaves out.

A position in the data counts every sample, those left out as well: after an iteration of n samples it stands behind the last of
the next n samples that are not left out. So one whole number is the state of a run, with and without the flag, and a range that
lies behind it needs no flag any more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .checks import check

MAX_SAMPLE = 2**40  # as --train-samples


@dataclass(frozen=True)
class Skips:
    """ranges: of sample numbers, in order, apart from each other."""

    ranges: tuple[range, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @staticmethod
    def parse(texts: Iterable[str] | None) -> Skips:
        """From texts such as 4096:4608 or 10:20,30:40, whose end is not left out itself. Raises ValueError for another form."""
        ranges: list[range] = []
        for first, end in sorted(_bounds(part) for text in texts or () for part in text.split(",")):
            if ranges and first <= ranges[-1].stop:
                first, end = ranges[-1].start, max(end, ranges.pop().stop)
            ranges.append(range(first, end))
        return Skips(tuple(ranges))

    def __str__(self) -> str:
        return ",".join(f"{r.start}:{r.stop}" for r in self.ranges)

    def samples(self, position: int, count: int) -> Sequence[int]:
        """The next `count` samples from `position` on that are not left out."""
        ahead = [r for r in self.ranges if r.stop > position and r.start < position + count]
        if not ahead:
            return range(position, position + count)
        taken: list[int] = []
        for skip in self.ranges:
            taken += range(position, min(skip.start, position + count - len(taken)))
            position = max(position, skip.stop)
        return [*taken, *range(position, position + count - len(taken))]

    def advance(self, position: int, size: int, iterations: int) -> tuple[int, int]:
        """At most so many iterations of `size` samples from `position` on, in one go: how many, and the position after them."""
        start = next((r.start for r in self.ranges if r.stop > position), position + size * iterations)
        if start >= position + size:
            iterations = min(iterations, (start - position) // size)
            return iterations, position + iterations * size
        return 1, self.samples(position, size)[-1] + 1

    def between(self, first: int, end: int) -> Skips:
        """What of the ranges lies among samples first to end - 1."""
        cut = (range(max(r.start, first), min(r.stop, end)) for r in self.ranges)
        return Skips(tuple(r for r in cut if r))


def _bounds(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,13}):(\d{1,13})", text.strip(), re.ASCII)
    check(match is not None, f"--skip-samples {text[:40]!r}: give FIRST:END, such as 4096:4608, END not included")
    first, end = int(match[1]), int(match[2])
    check(first < end <= MAX_SAMPLE, f"--skip-samples {text}: FIRST must be below END, and END at most {MAX_SAMPLE}")
    return first, end
