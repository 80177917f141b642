"""A limit on how long a piece of a test may take, so that a hang is a failure: an exception, or the end of the process.

with time_limit(): ...
assert wait_until(condition)       what another thread or process brings about
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

SECONDS = 60.0  # for what takes a few: other processes and other virtual machines may take the CPUs
UNINTERRUPTIBLE = 60.0  # s after which a call into C that lets no exception through ends the process, with all stacks on stderr


class TakesTooLong(BaseException):
    """No Exception, so that code under test which catches those cannot turn a hang into a refusal."""


@contextlib.contextmanager
def time_limit(
    seconds: float = SECONDS, uninterruptible: float = UNINTERRUPTIBLE
) -> Iterator[None]:
    """TakesTooLong is raised inside the block after `seconds`, or at its end where something in it has swallowed that.

    A host with more to do than it has CPUs gets as many times longer.
    """
    seconds *= max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

    def expire(*_: object) -> None:
        raise TakesTooLong(f"no answer within {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    begin = time.monotonic()
    try:
        faulthandler.dump_traceback_later(seconds + uninterruptible, exit=True, file=sys.__stderr__)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
    if time.monotonic() - begin > seconds:
        raise TakesTooLong(f"an answer after more than {seconds:g} s")


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> bool:
    """Wait until a condition holds, at most `seconds`; return whether it does."""
    end = time.monotonic() + seconds
    while not (held := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return held
