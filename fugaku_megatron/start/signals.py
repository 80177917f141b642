"""Signals of a process below an MPI launcher: requests to stop, and interrupts while modules are imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, TypeVar

from .exit_codes import ExitCode, report_everywhere

# SIGUSR1 is what Slurm sends ahead of the time limit when a job asks for it (--signal=USR1@300)
STOPS = (signal.SIGTERM, signal.SIGUSR1)


Handler = (
    Callable[[int, FrameType | None], Any] | int | signal.Handlers | None
)  # what signal.signal takes and returns


STOP_SIGNALS = (*STOPS, signal.SIGINT)


Signals = TypeVar("Signals", bound="StopSignals")


STOPPED_IN_ORDER = ("train", "supervise")  # commands that save and leave when a signal asks them to


class EarlyStop:
    """A handler that keeps the first signal as `received`; a second has the default effect, which ends the process."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)


def handle_signals(program: str, words: Sequence[str]) -> None:
    """What signals do until the command of these words, its name first, has handlers of its own. A second call changes nothing."""
    report_interrupts(program)
    if words[:1] and words[0] in STOPPED_IN_ORDER and "--dry-run" not in words:
        keep_stops()


def keep_stops() -> None:
    """From now on SIGTERM and SIGUSR1 are kept, until whoever handles them asks for them by `kept_stop`."""
    handler = EarlyStop()
    for number in STOPS:
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(number) is signal.SIG_DFL
        ):
            signal.signal(number, handler)


def kept_stop(handlers: Iterable[Handler]) -> signal.Signals | None:
    """The signal that one of these handlers has kept; None if none has."""
    return next(
        (
            handler.received
            for handler in handlers
            if isinstance(handler, EarlyStop) and handler.received
        ),
        None,
    )


def report_interrupts(program: str) -> None:
    """Report interrupts under the name of `program` from now on; nothing outside the main thread or where SIGINT is ignored."""
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
    """Whether an import is under way in this frame or a caller of it, or Python itself is ending."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return sys.is_finalizing()


class StopSignals:
    """Inside the block a first signal only sets `stop_requested`, so that the trainer can save and exit; a second ends it.

    Ranks do not receive a signal at the same moment, so they must decide together. Outside the main thread, where Python
    allows no handlers, nothing is installed. A signal that came while the process started counts as the first.
    """

    def __init__(self, signals: Iterable[int] = STOP_SIGNALS) -> None:
        self.signals = tuple(signals)
        self.received: signal.Signals | None = None
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
        if self.stop_requested:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.received = signal.Signals(number)
