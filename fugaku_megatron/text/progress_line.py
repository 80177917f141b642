"""Progress on standard error."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """Line on standard error, at most every `period` seconds. Not thread-safe.

    terminal_period: on a terminal, whose line is written over; None: as elsewhere
    """

    def __init__(self, period: float, terminal_period: float | None = None) -> None:
        rewritten = terminal_period is not None and sys.stderr.isatty()
        self._form = "\r{} " if rewritten else "{}\n"
        self._period = terminal_period if rewritten and terminal_period is not None else period
        self._begin = time.monotonic()
        self._printed = 0.0  # seconds

    @property
    def seconds(self) -> float:
        """Seconds since the construction."""
        return time.monotonic() - self._begin

    def __call__(self, line: str) -> None:
        """Print the line if the period is over."""
        if self.seconds - self._printed >= self._period:
            self._printed = self.seconds
            print(self._form.format(line), end="", file=sys.stderr, flush=True)
