"""A hang in a test becomes a failure."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.time_limit import TakesTooLong, time_limit

UNINTERRUPTIBLE = """
from tests.time_limit import time_limit
with time_limit(0.2, uninterruptible=0.2):
    sum(range(10**13))  # a loop in C: no signal handler runs
"""


def test_a_loop_and_an_open_that_waits_are_ended(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for hang in (lambda: time.sleep(60), lambda: open(tmp_path / "fifo")):
        begin = time.monotonic()
        with pytest.raises(TakesTooLong, match="no answer within "), time_limit(0.2):
            hang()
        assert time.monotonic() - begin < 30


def test_code_that_catches_everything_is_late_nevertheless():
    def stubborn():
        try:
            time.sleep(60)
        except BaseException:
            return

    with pytest.raises(TakesTooLong, match="an answer after more than"), time_limit(0.2):
        stubborn()


def test_what_ends_in_time_leaves_nothing_behind():
    with time_limit(60):
        pass
    assert (
        signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    )


def test_a_call_that_no_exception_reaches_ends_the_process():
    done = subprocess.run(
        [sys.executable, "-c", UNINTERRUPTIBLE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "Timeout" in done.stderr
