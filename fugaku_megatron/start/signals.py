"""Signal handlers below an MPI launcher: stop requests, and interrupts during imports."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

from .exit_codes import ExitCode, report_everywhere

# Slurm sends SIGUSR1 ahead of the time limit if a job asks for it (--signal=USR1@300).
STOPS = (signal.SIGTERM, signal.SIGUSR1)
STOP_SIGNALS = (*STOPS, signal.SIGINT)
STOPPED_IN_ORDER = ("train", "supervise")  # commands that save and exit after a signal

# Argument and result type of signal.signal.
Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
Signals = TypeVar("Signals", bound="StopSignals")


class EarlyStop:
    """A handler that stores the first signal as `received`; a second ends the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)


def handle_signals(program: str, words: Sequence[str]) -> None:
    """Install the handlers used until the command in `words` installs its own. A second call has no effect."""
    report_interrupts(program)
    if words[:1] and words[0] in STOPPED_IN_ORDER and "--dry-run" not in words:
        keep_stops()


def keep_stops() -> None:
    """Store SIGTERM and SIGUSR1 until a later handler reads them through `kept_stop`."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = EarlyStop()
    for number in STOPS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, handler)


def kept_stop(handlers: Iterable[Handler]) -> signal.Signals | None:
    for handler in handlers:
        if isinstance(handler, EarlyStop) and handler.received:
            return handler.received
    return None


def report_interrupts(program: str) -> None:
    """Report interrupts as `program`; without effect outside the main thread or if SIGINT is ignored."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_importing(frame):
            raise KeyboardInterrupt
        report_everywhere(f"{program}: interrupted")
        os._exit(ExitCode.INTERRUPTED)

    signal.signal(signal.SIGINT, handle)


def is_importing(frame: FrameType | None) -> bool:
    """Return True while this frame or a caller imports, or while Python shuts down."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return sys.is_finalizing()


class StopSignals(EarlyStop):
    """A block in which the first signal only sets `stop_requested`, so that the trainer can save; a second ends the process.

    Ranks receive a signal at different times and must agree on when to stop. A signal received during the start
    counts as the first. Outside the main thread no handlers are installed.
    """

    def __init__(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        super().__init__()
        self.signals = tuple(signals)
        self._previous: dict[int, Handler] = {}

    @property
    def stop_requested(self) -> bool:
        return self.received is not None

    def __enter__(self: Signals) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._previous = {
                number: signal.signal(number, self._handle) for number in self.signals
            }
            self.received = self.received or kept_stop(self._previous.values())
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self(number, frame)
