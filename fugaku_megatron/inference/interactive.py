"""A prompt line, and its continuation as it comes: generate --interactive.

Ctrl-C ends one answer, Ctrl-D the program. Under mpiexec, which ends all ranks at Ctrl-C, the first rank reads the prompts.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from ..comm.agreement import describe
from ..comm.base import Comm
from .sampling import Ending


class Interrupt:
    """Whether Ctrl-C was pressed since an answer began."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Inside the block Ctrl-C is noted, and does nothing else."""
        self.pressed, before = False, signal.signal(signal.SIGINT, self)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def read_line() -> str | None:
    """The next line that is not empty; None at the end of input. Ctrl-C begins a new line."""
    while True:
        try:
            if line := input("> " if sys.stdin.isatty() else ""):
                return line
        except KeyboardInterrupt:
            print()
        except EOFError:
            return None


def converse(world: Comm, encode: Callable[[str], list[int]], ending: Ending | None,
             answer: Callable[[list[int], Callable[[int, list[int]], bool]], Iterator[list[list[int]]]]) -> None:
    """Continue line after line. Collective.

    encode: tokens of a line, or ValueError. ending: on the first rank. answer(prompt, finished): the tokens so far after each step.
    """
    while (prompt := world.broadcast_object(_next_prompt(encode) if world.rank == 0 else None)) is not None:
        if ending:
            _show(prompt, ending, answer)
        else:
            for _ in answer(prompt, lambda sample, ids: False):
                pass


def _next_prompt(encode: Callable[[str], list[int]]) -> list[int] | None:
    """Tokens of the next line that can be continued; None at the end of input."""
    while (line := read_line()) is not None:
        try:
            return encode(line)
        except ValueError as error:
            print(describe(error), file=sys.stderr)
    return None


def _show(prompt: list[int], ending: Ending, answer: Callable[..., Iterator[list[list[int]]]]) -> None:
    """Write an answer as it comes."""
    interrupt, written, ids = Interrupt(), 0, []
    with interrupt.noted():
        for (ids,) in answer(prompt, lambda sample, ids: interrupt.pressed or ending.reached(ids)):
            text = ending.certain(ids)
            print(text[written:], end="", flush=True)
            written = max(written, len(text))
    print(ending.text(ids)[written:], flush=True)
