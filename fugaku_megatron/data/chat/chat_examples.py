"""Tokenized chats as text, with trained tokens marked."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from .chat_files import ChatFiles, signed, unsigned

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal could take for a command
EXAMPLES = 10  # chats that are printed


def decode_trained(
    tokens: np.ndarray, decode: Callable[[Sequence[int]], str], colour: bool, longest: int = 300
) -> str:
    """Decode a chat with trained text green or between [+ and +], and long parts shortened.

    tokens (n,): as `chat_files.signed`
    """
    ids, trained = unsigned(tokens)
    begin, end = ("\033[32m", "\033[0m") if colour else ("[+", "+]")
    borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(ids)]
    parts = []
    for start, stop in zip(borders, borders[1:]):
        text = CONTROLS.sub("\N{REPLACEMENT CHARACTER}", decode(ids[start:stop].tolist()))
        if len(text) > 2 * longest:
            text = f"{text[:longest]} ... {text[-longest:]}"
        parts.append(f"{begin}{text}{end}" if trained[start] else text)
    return "".join(parts)


def examples(files: ChatFiles, decode: Callable[[Sequence[int]], str], colour: bool) -> list[str]:
    """Return lines with the first chats, trained tokens in colour or brackets."""
    count = min(EXAMPLES, len(files))
    lines = [
        f"the first {count} chats, what is trained "
        + ("in green:" if colour else "between [+ and +]:")
    ]
    for chat in range(count):
        ids = files.get(chat)
        lines += [
            f"--- chat {chat}",
            decode_trained(
                signed(ids.astype(np.int32), files.trained(chat, len(ids))), decode, colour
            ),
        ]
    return [*lines, "---"]
