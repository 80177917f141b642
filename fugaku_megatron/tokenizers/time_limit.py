"""A limit on a tokenizer's time: its file may have a regular expression that never ends.

The package tokenizers leaves the interpreter to other threads while it works, so that the caller can wait for a while only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..text.input_errors import NeverSkipped

T = TypeVar("T")
SECONDS = 10.0  # of the process's CPU time for any text, and
SIZE_PER_SECOND = 10_000  # characters more in a second; published tokenizers take 1,000,000
PANIC = (
    "PanicException"  # of the package tokenizers, for a limit of its library of regular expressions
)


_STDERR = 2
_redirecting = threading.Lock()


@contextlib.contextmanager
def _native_errors() -> Iterator[Callable[[], object]]:
    """Collect what native code writes to standard error, and write it there at the end of the block.

    Yields a function that discards the text: Rust prints some 50 lines of a panic, which is an exception in Python.
    """
    with _redirecting, contextlib.ExitStack() as undo:
        try:
            stderr = os.dup(_STDERR)
        except OSError:  # closed
            yield int
            return
        undo.callback(os.close, stderr)
        collected = undo.enter_context(os.fdopen(os.memfd_create("stderr"), "r+b"))
        os.dup2(collected.fileno(), _STDERR)
        try:
            yield lambda: collected.truncate(0)
        finally:
            os.dup2(stderr, _STDERR)
            collected.seek(0)
            with os.fdopen(stderr, "wb", closefd=False) as rest:
                shutil.copyfileobj(collected, rest)


class TokenizerLimit(NeverSkipped):
    """Error of a tokenizer that exceeds its limits: other texts would take as long."""


def limited(where: str, size: int, work: Callable[[], T]) -> T:
    """Return work(). Raise TokenizerLimit if that takes too long for `size` characters, and leave the thread behind."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    limit = SECONDS + size / SIZE_PER_SECOND
    thread = threading.Thread(target=run, name="tokenizer", daemon=True)
    with _native_errors() as discard:
        begin = time.process_time()
        thread.start()
        thread.join(limit)
        # while other programs have the CPU
        while thread.is_alive() and time.process_time() < begin + limit:
            thread.join(1.0)
        panicked = any(type(error).__name__ == PANIC for error in errors)
        if panicked:
            discard()
    if results:
        return results[0]
    if not errors:
        raise TokenizerLimit(
            f"{where}: did not tokenize {size} characters within {limit:.0f} s; its tokenizer.json may have a regular "
            "expression that never ends: pass another tokenizer"
        )
    if panicked:
        raise TokenizerLimit(f"{where}: {errors[0]}: pass another tokenizer") from None
    raise errors[0]
