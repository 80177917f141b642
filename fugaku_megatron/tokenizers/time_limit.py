"""A limit on a tokenizer's time: its file may have a regular expression that never ends.

The package tokenizers leaves the interpreter to other threads while it works, so that the caller can wait for a while only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..text.input_errors import NeverSkipped

T = TypeVar("T")
SECONDS = 10.0  # of the process's CPU time for any text, and
SIZE_PER_SECOND = 10_000  # characters more in a second; published tokenizers take 1,000,000
PANIC = (
    "PanicException"  # of the package tokenizers, for a limit of its library of regular expressions
)


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
    begin = time.process_time()
    thread.start()
    thread.join(limit)
    while thread.is_alive() and time.process_time() < begin + limit:  # other programs have the CPU
        thread.join(1.0)
    if results:
        return results[0]
    if not errors:
        raise TokenizerLimit(
            f"{where}: did not tokenize {size} characters within {limit:.0f} s; its tokenizer.json may have a regular "
            "expression that never ends: pass another tokenizer"
        )
    error = errors[0]
    if type(error).__name__ == PANIC:
        raise TokenizerLimit(f"{where}: {error}: pass another tokenizer") from None
    raise error
