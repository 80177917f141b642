"""Prompts of the command line and of a file, and where the text of an answer ends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from ..run.checks import check


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The texts of --prompt and of --prompts. Raises ValueError for a file without prompts."""
    return [*(options.prompt or []), *(prompts_of(options.prompts) if options.prompts is not None else [])]


def prompts_of(path: str) -> list[str]:
    """One prompt a line, or the strings of a JSON list in a file that ends in .json. Raises ValueError where that fails."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        prompts = json.loads(text) if path.endswith(".json") else [line for line in text.splitlines() if line]
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"--prompts {path}: {reason}: give a UTF-8 file of lines, or a JSON list of texts (.json)") from None
    check(isinstance(prompts, list) and all(isinstance(prompt, str) for prompt in prompts),
          f"--prompts {path}: no JSON list of texts: give one, such as [\"a\", \"b\"]")
    check(len(prompts) > 0, f"--prompts {path} has no prompt: give at least one line")
    return prompts


class Ending:
    """Where continuations end: at a token, or before a word. decode: ids -> text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], eod: int | None, words: Sequence[str]) -> None:
        self.decode, self.eod, self.words = decode, eod, tuple(words)

    def text(self, ids: Sequence[int]) -> str:
        """The text of a continuation, up to where it ends."""
        text = self.decode([i for i in ids if i != self.eod])
        ends = [place for word in self.words if (place := text.find(word)) >= 0]
        return text[: min(ends)] if ends else text

    def reached(self, ids: Sequence[int]) -> bool:
        """Whether nothing follows these tokens."""
        if ids[-1] == self.eod:
            return True
        return bool(self.words) and any(word in self.decode(ids) for word in self.words)

    def certain(self, ids: Sequence[int]) -> str:
        """The text that further tokens do not change: without what may become one of the words, or is half a character."""
        text = self.text(ids).rstrip("\N{REPLACEMENT CHARACTER}")
        held = max((n for word in self.words for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
        return text[: len(text) - held]
