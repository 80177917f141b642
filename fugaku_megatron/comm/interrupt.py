"""An interrupt (Control-C, SIGINT) while modules are imported ends the process at once, with one line.

Python would raise KeyboardInterrupt in the middle of somebody's import, where libraries swallow it or print a traceback. Outside of
imports it is raised as ever. Needs neither torch nor MPI. Left out: a trainer's orderly stop (host/runtime.py).
Test: pytest tests/test_interrupt.py
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType

from . import launcher
from .exit_codes import ExitCode


def install(program: str) -> None:
    """Report interrupts under the name of `program` from now on; nothing outside the main thread or where SIGINT is ignored."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_importing(frame):
            raise KeyboardInterrupt
        launcher.report_everywhere(f"{program}: interrupted")
        os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGINT, handle)


def is_importing(frame: FrameType | None) -> bool:
    """Whether an import is under way in this frame or a caller of it, or Python itself is ending."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return sys.is_finalizing()
