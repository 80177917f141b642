"""Progress of preprocess on stderr."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

from ...text.numbers import say
from .encoder import Encoded
from .unfinished import Unfinished


class PreprocessProgress:
    """Progress bar if stderr is a terminal and tqdm is installed, else a line every `interval`
    documents.

    Percent and remaining time refer to compressed input bytes; MB/s to text.
    """

    def __init__(self, work: Unfinished, total: int, interval: int):
        self._work = work
        self._total = total
        self._interval = interval
        self._first = work.journal
        self._read = work.bytes_read(work.journal.place)
        self._begin = self._read
        self._due = self._first.documents + interval
        self._began = time.perf_counter()
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total, initial=self._read, unit="B", unit_scale=True, desc="tokenizing"
                )
            except ImportError:
                pass

    def update(self, batch: Encoded) -> None:
        before = self._read
        self._read = self._work.bytes_read(batch.after, batch.read)
        documents = self._work.journal.documents
        if self._bar is not None:
            self._bar.update(self._read - before)
        elif documents >= self._due:
            self._due = (documents // self._interval + 1) * self._interval
            say(self.line())

    def line(self) -> str:
        """Return totals, this process's rates, fraction of input read, and remaining time."""
        now = self._work.journal
        seconds = time.perf_counter() - self._began
        documents = now.documents - self._first.documents
        size = now.size - self._first.size
        left = ""
        if self._begin < self._read < self._total:
            remaining = seconds * (self._total - self._read) / (self._read - self._begin)
            left = f", {timedelta(seconds=round(remaining))} left"
        return (
            f"Processed {now.documents} documents, {sum(now.tokens)} tokens ({documents / seconds:.1f} docs/s, "
            f"{size / seconds / 1e6:.3f} MB/s), {self._read / max(1, self._total):.0%}{left}"
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
