"""Progress of a search, on standard error."""

from __future__ import annotations

import sys
import time

PERIOD = 5.0  # seconds between two lines; a shorter search prints none


class SearchProgress:
    """Progress line on standard error, at most every `PERIOD` seconds."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._said = self._begin
        self.best = float("inf")  # seconds per iteration

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if now - self._said < PERIOD:
            return
        self._said = now
        fastest = (
            f", the fastest {self.best:.4g} s an iteration" if self.best < float("inf") else ""
        )
        print(
            f"search: {done} of {total} {what} after {now - self._begin:.0f} s{fastest} (model)",
            file=sys.stderr,
            flush=True,
        )
