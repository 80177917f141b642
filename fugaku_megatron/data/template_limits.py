"""Limits on time and memory while a chat template is rendered: a template comes with a model's files and may loop for ever."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

SECONDS = 5.0  # for one rendering; published templates take milliseconds
BYTES = 2**30  # of memory that one rendering may add


class TemplateLimit(Exception):
    """A template took more time than it may."""


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Inside the block, raise TemplateLimit after SECONDS, and MemoryError beyond BYTES more.

    Time is limited on the main thread, on which signals arrive; the commands render on that thread.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _address_space() + BYTES
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    is_main = threading.current_thread() is threading.main_thread()

    def stop(number: int, frame: object) -> NoReturn:
        raise TemplateLimit(f"it did not end within {SECONDS:.0f} s")

    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    if is_main:
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        if is_main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """Bytes of address space that this process has mapped."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
