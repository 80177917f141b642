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
ALWAYS = ("host", "kernels")  # measured without time left, because the others depend on them
ENDING = 0.03  # share of the time that stays for what no section counts
STARTED = time.monotonic()  # when this process began, but for Python's own start


class Budget:
    """minutes: for all sections; spent: seconds before now that count"""

    def __init__(
        self, minutes: float, clock: Callable[[], float] = time.monotonic, spent: float = 0.0
    ) -> None:
        self._clock = clock
        self.minutes = minutes
        self.begin = clock() - spent

    @property
    def used(self) -> float:
        return self._clock() - self.begin

    @property
    def left(self) -> float:
        return max(0.0, 60 * self.minutes * (1 - ENDING) - self.used)

    def of(self, name: str, following: tuple[str, ...]) -> float:
        """Return a section's seconds; time left by quick sections goes to the following."""
        return self.left * SHARES[name] / (SHARES[name] + sum(SHARES[other] for other in following))
