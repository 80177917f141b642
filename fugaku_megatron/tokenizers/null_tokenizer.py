"""Tokenizer of numbers."""

from __future__ import annotations

from collections.abc import Iterable

from .token_range import NULL_REMEDY, check_range
from .utf8 import clean


class NullTokenizer:
    """Space-separated numbers, for data tokenized elsewhere. `eod` is vocab_size - 1.

    Source: megatron/core/tokenizers/text/libraries/null_tokenizer.py.
    """

    name = "NullTokenizer"
    needs = ("vocab_size",)
    options: tuple[str, ...] = ()
    checksum = 0  # every one of a size is the same

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str | bytes) -> list[int]:
        words = clean(text).split()
        wrong = next((word for word in words if not (word.isascii() and word.isdigit())), None)
        if wrong is not None:
            raise ValueError(
                f"--tokenizer-type NullTokenizer reads texts of numbers, and {wrong[:40]!r} is not one: pass another "
                "type"
            )
        ids = [int(word[:20]) for word in words]
        check_range(ids, self.vocab_size, NULL_REMEDY)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def count_bytes(self, ids: Iterable[int]) -> int:
        return len(self.decode(ids))
