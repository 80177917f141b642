"""When the loss of an iteration is a spike: the rule, on numbers alone."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

NORMAL_MAD = 1.4826  # standard deviations in the median absolute deviation of a normal distribution
WINDOW, ENOUGH = 50, 20  # losses that are looked back on, and how many there must be
SMALLEST = 0.01  # of the median: a rise below it is no spike, however quiet the losses were


class Spikes:
    """The losses of the last iterations. A spike lies above their median by more than `deviations` standard deviations.

    The deviation is estimated from the median absolute deviation, which a few spikes do not change (Iglewicz and Hoaglin 1993, "How
    to Detect and Handle Outliers"; they use 3.5, for data without a trend).
    """

    def __init__(self, deviations: float) -> None:
        self.deviations = deviations
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._before = False  # whether the last one was a spike

    def find(self, loss: float) -> str | None:
        """Why the next loss is a spike; None where it is not, or follows one, so that a new level is told once."""
        middle, limit = self._limit()
        spike, before = not math.isfinite(loss) or loss > limit, self._before
        self._before = spike
        if math.isfinite(loss):
            self._losses.append(loss)
        if not spike or before:
            return None
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        return (f"the loss {loss:.4f} is above {limit:.4f}, the limit over the median {middle:.4f} of the last "
                f"{min(len(self._losses) - 1, WINDOW)}")

    def _limit(self) -> tuple[float, float]:
        """Median of the losses, and the largest loss that is no spike."""
        if len(self._losses) < ENOUGH:
            return math.nan, math.inf
        middle = median(self._losses)
        deviation = NORMAL_MAD * median(abs(loss - middle) for loss in self._losses)
        return middle, middle + max(self.deviations * deviation, SMALLEST * abs(middle))
