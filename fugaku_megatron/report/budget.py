"""Sections of a report, and their time."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARES = {
    "host": 2,
    "kernels": 20,
    "communication": 22,
    "training": 26,
    "layers": 24,
    "storage": 6,
}  # of the time
NAMES = tuple(SHARES)
ENDING = 0.03  # share of the time that stays for what no section counts


class Budget:
    """minutes: for all sections"""

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.minutes = minutes
        self.begin = clock()

    @property
    def used(self) -> float:
        return self._clock() - self.begin

    @property
    def left(self) -> float:
        return max(0.0, 60 * self.minutes * (1 - ENDING) - self.used)

    def of(self, name: str, following: tuple[str, ...]) -> float:
        """Return a section's seconds; time left by quick sections goes to the following."""
        return self.left * SHARES[name] / (SHARES[name] + sum(SHARES[other] for other in following))
