"""When the memory of a process grows steadily: the rule, on numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

SPAN = 50  # iterations that a steady growth lasts at least
FEWEST = 25  # readings of them
BLOCKS = 5  # consecutive parts, each of which must have grown
LEAST = 8 << 20  # bytes in SPAN iterations: less is Python's and the allocator's business
SHARE = 0.4  # of the mean growth that every block must have


def steady_growth(readings: Sequence[tuple[int, int]]) -> float:
    """Bytes per iteration by which memory grows steadily; 0 where it does not. readings: (iteration, bytes), in order.

    The rate is the median of the slopes between all pairs of readings (Theil 1950, Sen 1968), which outliers hardly move. A step is
    no steady growth: the medians of consecutive parts must rise from each to the next.
    """
    if len(readings) < FEWEST or readings[-1][0] - readings[0][0] < SPAN - 1:
        return 0.0
    rate = median((b - a) / (later - earlier) for (earlier, a), (later, b) in combinations(readings, 2))
    bounds = [len(readings) * part // BLOCKS for part in range(BLOCKS + 1)]
    levels = [median(size for _, size in readings[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
    smallest = SHARE * (levels[-1] - levels[0]) / (BLOCKS - 1)
    rises = all(b - a > smallest for a, b in zip(levels, levels[1:], strict=False))
    return rate if rises and rate * SPAN >= LEAST else 0.0
